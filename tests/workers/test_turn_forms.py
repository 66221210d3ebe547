"""Turns that do not simply go on: regenerated, edited, empty, and too long for the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_node import ApiNode
from model_dirs import make_tiny_model
from redis_kit import Server

from engine.device import prepare
from engine.model import load

TEXT = "Xq7Zw9 Kv3Jp5 Vb8Hy2 Gx6Dk4 " * 4
"""About a hundred tokens: the tokenizer knows nothing of the kind."""
RULES = "Be brief and kind."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiNode]:
    path = make_tiny_model(Path(tmp_path_factory.mktemp("forms")) / "tiny", context=700)
    with Server() as server, ApiNode(server.url, load(path, prepare()), path) as running:
        yield running


def send(stack: ApiNode, **body: Any) -> httpx.Response:
    whole = {"max_output_tokens": 6, "temperature": 0, "instructions": RULES, **body}
    url = f"{stack.url}/v1/responses"
    return stack.workers.serve(lambda: httpx.post(url, json=whole, timeout=120))


def ask(stack: ApiNode, **body: Any) -> dict[str, Any]:
    """A response whose answer is the oracle's."""
    answer = send(stack, **body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    turn = stack.store.get_turn(made["id"])
    assert turn is not None
    assert turn.output_ids == stack.node.oracle(stack.job(made["id"]))
    stack.node.settle()
    return made


def cached(made: dict[str, Any]) -> int:
    return int(made["usage"]["input_tokens_details"]["cached_tokens"])


def held(stack: ApiNode, made: dict[str, Any]) -> int:
    """Tokens of a turn's state: all but the pending one."""
    return len(stack.store.turn_ids(made["id"])) - 1


def said(made: dict[str, Any]) -> str:
    return str(made["output"][0]["content"][0]["text"])


def test_regenerated_edited_and_empty_turns(stack: ApiNode) -> None:
    first = ask(stack, input=TEXT * 2)
    second = ask(stack, input="And then?", previous_response_id=first["id"])
    again = ask(stack, input="And then?", previous_response_id=first["id"])
    assert said(again) == said(second)
    assert held(stack, first) <= cached(again) < again["usage"]["input_tokens"]
    assert again["tandem"]["computed_tokens"] == again["usage"]["input_tokens"] - cached(again) >= 1
    # The very first turn, too, by a client that names nothing.
    whole = ask(stack, input=TEXT * 2)
    assert said(whole) == said(first)
    assert cached(whole) < whole["usage"]["input_tokens"]

    edited = ask(stack, input="Or else?", previous_response_id=first["id"])
    assert cached(edited) == held(stack, first)
    history: list[Any] = [
        {"role": "user", "content": TEXT * 2},
        {"role": "assistant", "content": "I say what I want."},
        {"role": "user", "content": "And then?"},
    ]
    other = ask(stack, input=history)
    prompt = stack.workers.prompts[other["id"]]
    assert "I say what I want." in stack.tokenizer.decode(prompt)
    assert cached(other) < held(stack, first)

    for empty in ("", "  \n", [], [{"role": "user", "content": ""}]):
        refused = send(stack, input=empty, previous_response_id=second["id"])
        assert refused.status_code == 400
        assert "empty" in refused.json()["error"]["message"]
    more = ask(stack, input="And now?", previous_response_id=second["id"])
    assert cached(more) == held(stack, second)


def test_a_conversation_that_does_not_fit(stack: ApiNode) -> None:
    conversation = httpx.post(f"{stack.url}/v1/conversations", json={}, timeout=120).json()["id"]
    turns = [ask(stack, input=f"{n}. {TEXT}", conversation=conversation) for n in range(4)]
    last: dict[str, Any] = {"input": f"Last. {TEXT * 2}", "conversation": conversation}
    refused = send(stack, **last)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    # The refused turn spoils nothing.
    kept = httpx.get(f"{stack.url}/v1/conversations/{conversation}", timeout=120).json()
    assert kept["tandem"]["turns"] == 4

    made = ask(stack, **last, truncation="auto")
    assert made["truncation"] == "auto"
    assert made["tandem"]["details"]["dropped_items"] > 0
    prompt = stack.workers.prompts[made["id"]]
    text = stack.tokenizer.decode(prompt)
    assert len(prompt) < 700
    assert RULES in text
    assert f"Last. {TEXT}" in text
    assert "0. Xq7" not in text
    # What is left was generated, and stands as it was.
    kept = stack.store.get_turn(turns[-1]["id"])
    assert kept is not None
    ids = list(kept.output_ids[:-1])
    assert any(prompt[n : n + len(ids)] == ids for n in range(len(prompt)))
    # The next turn goes on from the shortened prompt.
    after = ask(stack, input="So?", conversation=conversation)
    assert cached(after) == held(stack, made)
    assert after["truncation"] == "disabled"
    items = httpx.get(
        f"{stack.url}/v1/conversations/{conversation}/items", params={"order": "asc"}, timeout=120
    ).json()["data"]
    assert len(items) == 12, "everything that was said is still there"


def test_a_message_that_can_never_fit(stack: ApiNode) -> None:
    for text in (TEXT * 8, "x" * 200_000):
        refused = send(stack, input=text, truncation="auto")
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
