"""Answers in a form: calls, thinking, schemas, log probabilities; and retries at every event."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Node, make_job, replay_of
from model_dirs import make_tiny_model

from engine.device import prepare
from engine.model import Model, load
from engine.text import load_tokenizer
from scheduler.api.prompt import Parent, build
from scheduler.api.schema import ResponseRequest
from scheduler.api.shaping import Shaping, shape
from scheduler.api.tokenizer import Tokenizer
from scheduler.record import Job

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "sure": {"type": "boolean"}},
    "required": ["size", "sure"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "rate", "parameters": SCHEMA}]
USER: dict[str, Any] = {"type": "message", "role": "user", "content": "How large is it?"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("forms") / "tiny", family="tools")


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path, prepare())


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture
def node(model: Model, path: Path, tmp_path: Path) -> Iterator[Node]:
    made = Node(model, load_tokenizer(path), tmp_path)
    yield made
    made.close()


def ask(
    tokenizer: Tokenizer,
    items: Any = (USER,),
    *,
    tokens: int = 200,
    parent: Parent | None = None,
    previous: str = "",
    **wanted: Any,
) -> tuple[Job, Shaping]:
    """A job for a request of the Responses API, as the API makes it."""
    body = ResponseRequest.model_validate({"input": "x", **wanted})
    shaping = shape(tokenizer, body)
    prompt = build(tokenizer, items, tools=shaping.tools, options=shaping.options, parent=parent)
    params = {"max_output_tokens": tokens, "seed": 1, **shaping.params}
    request = {"input": list(items), "tools": shaping.tools, "params": params}
    return make_job(prompt.ids, previous=previous, request=request), shaping


def retried_everywhere(node: Node, job: Job) -> list[dict[str, Any]]:
    """Run a job, then again from where its log may end: nothing may change. Returns its items.

    The log ends at every event that is no delta, at the one after it, and at some deltas.
    """
    whole = node.answer(job)
    assert whole.result is not None
    log = node.events.pop(job.id)
    odd = [n for n, event in enumerate(log) if not event["type"].endswith(".delta")]
    cuts = {0, len(log), *range(0, len(log), 20)}
    cuts |= {n + more for n in odd for more in (0, 1, 2) if n + more <= len(log)}
    for length in sorted(cuts):
        again = node.run(node.execution(job, replay_of(log[:length])))
        assert again.result is not None
        assert [*log[:length], *node.events.pop(job.id, [])] == log
        assert again.result.output == whole.result.output
        assert again.result.events == whole.result.events
    turn = node.store.get_turn(job.id)
    assert turn is not None
    return turn.items[1:]


def test_a_required_call_is_made_and_its_turn_goes_on(node: Node, tokenizer: Tokenizer) -> None:
    job, shaping = ask(tokenizer, tools=TOOLS, tool_choice={"type": "function", "name": "rate"})
    (call,) = retried_everywhere(node, job)
    assert (call["type"], call["name"], call["status"]) == ("function_call", "rate", "completed")
    arguments = json.loads(call["arguments"])
    assert set(arguments) == {"size", "sure"}
    turn = node.store.get_turn(job.id)
    assert turn is not None
    parent = Parent(
        [USER], [call], node.store.turn_ids(job.id), len(turn.output_ids), tools=shaping.tools
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    told, _ = ask(tokenizer, [output], parent=parent, previous=job.id, tools=TOOLS, tokens=4)
    finished = node.answer(told)
    assert finished.result is not None
    assert finished.result.path["path"] in ("hot", "restored")
    assert finished.result.path["held_tokens"] == len(parent.ids) - 1
    assert node.said(told) == node.oracle(told)


def test_a_schema_is_followed(node: Node, tokenizer: Tokenizer) -> None:
    text = {"format": {"type": "json_schema", "name": "rating", "schema": SCHEMA}}
    job, _ = ask(tokenizer, text=text)
    (message,) = retried_everywhere(node, job)
    assert set(json.loads(message["content"][0]["text"])) == {"size", "sure"}


def test_log_probabilities_survive_a_retry(node: Node, tokenizer: Tokenizer) -> None:
    job, _ = ask(tokenizer, tokens=12, top_logprobs=3)
    whole = node.answer(job)
    log = node.events.pop(job.id)
    cuts = [n + 1 for n, event in enumerate(log) if "logprobs" in event]
    for cut in cuts:
        again = node.run(node.execution(job, replay_of(log[:cut])))
        assert [*log[:cut], *node.events.pop(job.id, [])] == log
        assert again.result == whole.result
    turn = node.store.get_turn(job.id)
    assert turn is not None
    told = turn.items[-1]["content"][0]["logprobs"]
    assert len(told) == len(turn.output_ids) == 12
    for entry, token in zip(told, turn.output_ids, strict=True):
        assert entry["token"] == tokenizer.decode([token])
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0  # greedy
        assert len(entry["top_logprobs"]) == 3
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1.001
    joined = bytes(byte for entry in told for byte in entry["bytes"])
    assert joined.decode(errors="replace") == tokenizer.decode(list(turn.output_ids))


def test_bias_and_penalties_reach_the_sampler(node: Node, tokenizer: Tokenizer) -> None:
    (forced,) = tokenizer.encode("x")
    job, _ = ask(tokenizer, tokens=3, logit_bias={str(forced): 100.0})
    node.answer(job)
    assert node.said(job) == [forced] * 3
    job, _ = ask(tokenizer, tokens=3, logit_bias={str(forced): 100.0}, frequency_penalty=2.0)
    node.answer(job)
    assert node.said(job)[0] == forced


def scripted(node: Node, tokenizer: Tokenizer, text: str, **wanted: Any) -> list[dict[str, Any]]:
    """The items of an answer that a grammar makes the model spell out."""
    job, _ = ask(tokenizer, tokens=200, **wanted)
    params = job.request["params"]
    marks = r"(</?(?:think|tool_call)>)"
    bits = [bit for bit in re.split(marks, text) if bit]
    rule = " ".join(bit if re.fullmatch(marks, bit) else json.dumps(bit) for bit in bits)
    params["grammar"] = {"kind": "lark", "text": f"start: {rule}"}
    return retried_everywhere(node, job)


def test_thinking_text_and_calls_become_items(node: Node, tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "rate", "arguments": {"size": "small"}}\n</tool_call>'
    text = f"<think>\nHm, 東.\n</think>\n\nI rate.\n{call}\n{call}"
    found = scripted(node, tokenizer, text, tools=TOOLS)
    assert [item["type"] for item in found] == [
        "reasoning", "message", "function_call", "function_call"
    ]  # fmt: skip
    assert found[0]["content"] == [{"type": "reasoning_text", "text": "Hm, 東.\n"}]
    assert found[1]["content"][0]["text"].strip() == "I rate."
    assert len({item["id"] for item in found}) == 4
    assert len({item["call_id"] for item in found[2:]}) == 2


def test_without_tools_a_call_is_text(node: Node, tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "rate", "arguments": {}}\n</tool_call>'
    (message,) = scripted(node, tokenizer, text)
    assert message["content"][0]["text"] == text
