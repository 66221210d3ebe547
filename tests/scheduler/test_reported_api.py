"""Reports about the APIs of such servers, as tests.

The case, what went wrong there, and what stands for it here (in this module where none is named):

- A01: cancelling a finished background response was refused. Here: `test_every_kind_of_cancel`,
  `test_api_openai::test_cancel`,
  `test_api_requests::test_cancelling_a_foreground_response_is_refused_in_words`.
- A02: the model saw the system prompt in place of its own answer. Here:
  `test_instructions_are_replaced_and_answers_stay`.
- A03: chaining dropped calls and their outputs. Here: `test_calls_stay_in_the_chain`.
- A04: chaining doubled the history. Here: `test_the_history_is_there_once`,
  `test_api_openai::test_history_grows_by_what_is_said`.
- A06: events without numbers that last. Here:
  `test_api_calls::test_a_stream_dropped_at_every_event_while_it_runs`.
- A07: a stream that failed ended like one that did not. Here:
  `test_a_failure_in_the_middle_is_told_by_every_stream`,
  `test_stream::test_a_server_that_stays_away`.
- A08: refused streams answered 200. Here: `test_api_requests::test_bad_requests`,
  `test_api_chat::test_bad_requests` and `test_api_messages::test_bad_requests`, streamed or not.
- A09: failures inside were told as 404. Here:
  `test_api_openai::test_a_failed_run_is_told_the_same_way_everywhere`.
- A10: endings without the whole object. Here: `test_every_ending_is_whole`.
- A12: characters split over tokens. Here:
  `engine/test_text::test_any_tokens_make_up_the_whole_text`,
  `test_stream::test_a_frame_is_one_event_whatever_its_text`.
- A14: pieces of stop strings were shown. Here:
  `engine/test_text::test_nothing_of_a_stop_string_is_shown`,
  `engine/test_seam::test_a_stop_string_and_a_character_across_the_seam`.
- A15: biased tokens outside of the vocabulary killed the engine. Here:
  `test_biased_tokens_are_in_the_vocabulary`.
- A16: empty prompts stopped the server. Here: `test_api_requests::test_bad_requests`,
  `test_api_chat::test_bad_requests`,
  `workers/test_turn_forms::test_regenerated_edited_and_empty_turns`.
- A17, A23: what did not fit was cut silently, or stayed. Here:
  `workers/test_turn_forms::test_a_conversation_that_does_not_fit`.
- A18: prompt and answer together did not fit. Here:
  `test_api_requests::test_the_answer_is_clamped_to_the_context`.
- A19: work went on when its client had gone. Here:
  `test_api_requests::test_a_client_that_leaves_stops_foreground_work` and
  `test_a_client_that_leaves_does_not_stop_background_work`.
- A20: cached tokens were told as 0. Here: `test_cached_tokens_are_told_everywhere`,
  `workers/test_agent_sessions`, where they are those that skipped the model.
- A21: responses lived in one process's memory. Here:
  `test_api_openai::test_a_response_outlives_its_record_in_redis`,
  `test_api_calls::test_what_is_not_stored_leaves_nothing`.
- A22: one undecodable job hid the others. Here:
  `test_policy::test_vanished_records_do_not_block_the_queue`, `test_dashboard`.

- S21, S22: templates that drop thoughts, tokens that spell what the tokenizer would not. Here:
  `test_weave`, `test_prompt`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic, APIStatusError
from api_stack import Script, Stack
from openai import OpenAI
from redis_kit import Server, eventually

from scheduler.record import Job

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "name": "weather", "parameters": None, "strict": False}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url, family="tools") as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client() as made:
        yield made
    stack.workers.fail_with, stack.workers.script = None, None
    stack.workers.open()


def prompt(stack: Stack, response: str) -> str:
    return stack.tokenizer.decode(stack.workers.prompts[response])


def test_every_kind_of_cancel(stack: Stack, client: OpenAI) -> None:
    create: Any = {"model": "test-model", "input": "Hi", "background": True}

    def ended(response: str) -> Any:
        return eventually(
            lambda: (
                found
                if (found := client.responses.retrieve(response)).status
                not in ("queued", "in_progress")
                else None
            ),
            "it goes on",
        )

    stack.workers.fail_with = "no room: try later"
    failed = ended(client.responses.create(**create).id)
    assert client.responses.cancel(failed.id) == failed
    stack.workers.fail_with = None
    stack.workers.may_prefill.clear()
    waiting = client.responses.create(**create)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: client.responses.cancel(waiting.id).status, range(4)))
    assert found == ["cancelled"] * 4
    stack.workers.open()
    done = ended(client.responses.create(**create).id)
    assert client.responses.cancel(done.id) == done
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_instructions_are_replaced_and_answers_stay(stack: Stack, client: OpenAI) -> None:
    stack.workers.say = lambda job: "My answer."
    previous: Any = None
    for number in range(3):
        made = client.responses.create(
            model="test-model", input=f"Question {number}.", instructions=f"Rule {number}.",
            previous_response_id=previous,
        )  # fmt: skip
        text, previous = prompt(stack, made.id), made.id
        assert re.findall(r"Rule \d", text) == [f"Rule {number}"]
        assert text.count("<|im_start|>assistant\nMy answer.<|im_end|>") == number


def test_calls_stay_in_the_chain(stack: Stack, client: OpenAI) -> None:
    def script(job: Job) -> Script:
        if job.request["input"][-1]["type"] == "message" and "How" in str(job.request["input"]):
            call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
            return [(call, [("call", "{}", "weather")])]
        return [("Sunny.", [("text", "Sunny.", "")])]

    stack.workers.script = script
    conversation = client.conversations.create().id
    for how in ({"conversation": conversation}, {}):
        options: Any = {"model": "test-model", "tools": [TOOL]}
        first = client.responses.create(input="How is it?", **options, **how)
        call: Any = first.output[0]
        output: Any = {
            "type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"
        }  # fmt: skip
        then: Any = how or {"previous_response_id": first.id}
        second = client.responses.create(input=[output], **options, **then)
        then = how or {"previous_response_id": second.id}
        third = client.responses.create(input="Sure?", **options, **then)
        whole: Any = [
            {"role": "user", "content": "How is it?"},
            {"type": "function_call", "call_id": call.call_id, "name": "weather",
             "arguments": "{}"},
            output,
            {"role": "assistant", "content": "Sunny."},
            {"role": "user", "content": "Sure?"},
        ]  # fmt: skip
        full = client.responses.create(input=whole, **options)
        assert prompt(stack, third.id) == prompt(stack, full.id)
        assert stack.workers.prompts[third.id] == stack.workers.prompts[full.id]
        text = prompt(stack, third.id)
        assert text.index("<tool_call>") < text.index("22 degrees") < text.index("Sunny.")


def test_the_history_is_there_once(stack: Stack, client: OpenAI) -> None:
    conversation = client.conversations.create().id
    for number in range(6):
        made = client.responses.create(
            model="test-model", input=f"Turn {number}.", conversation=conversation
        )
        found = re.findall(r"Turn \d", prompt(stack, made.id))
        assert found == [f"Turn {n}" for n in range(number + 1)]
    items = client.conversations.items.list(conversation, limit=100).data
    assert len(items) == 12
    assert len({item.id for item in items}) == 12


def test_a_failure_in_the_middle_is_told_by_every_stream(stack: Stack, client: OpenAI) -> None:
    workers = stack.workers

    whole = workers._write

    def write(job: Job, at: int, script: Any) -> None:
        at = workers._emit(
            job, at,
            {"type": "response.output_item.added"},
            {"type": "response.content_part.added"},
            {"type": "response.output_text.delta", "delta": "Half", "ids": [50]},
        )  # fmt: skip
        workers.runs.fail(job, "server_error", "the model produced no number: try another prompt")

    workers.script = lambda job: []
    workers._write = write  # type: ignore[method-assign]
    try:
        events = list(client.responses.create(model="test-model", input="Hi", stream=True))
        assert [event.type for event in events[-2:]] == [
            "response.output_text.delta", "response.failed"
        ]  # fmt: skip
        last: Any = events[-1]
        again = client.responses.retrieve(last.response.id)
        assert again.status == "failed"
        assert again.error == last.response.error
        said = []
        stream = client.chat.completions.create(model="test-model", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="no number"):
            said += [chunk.choices[0].delta.content for chunk in stream]
        with Anthropic(base_url=stack.url, api_key="none", max_retries=0) as other:
            options: Any = {"model": "test-model", "max_tokens": 9, "messages": HI}
            with pytest.raises(APIStatusError, match="no number"):
                list(other.messages.create(stream=True, **options))
    finally:
        workers._write = whole  # type: ignore[method-assign]


def test_every_ending_is_whole(stack: Stack, client: OpenAI) -> None:
    with client.responses.stream(model="test-model", input="Hi", max_output_tokens=3) as stream:
        last: Any = list(stream)[-1]  # this client has no helper for such an end
    assert (last.type, last.response.incomplete_details.reason) == (
        "response.incomplete", "max_output_tokens"
    )  # fmt: skip
    assert last.response.usage.output_tokens <= 3
    assert last.response.output_text == client.responses.retrieve(last.response.id).output_text
    stack.workers.may_finish.clear()
    stack.workers.halfway.clear()
    running = client.responses.create(model="test-model", input="Hi", background=True)
    assert stack.workers.halfway.wait(60)
    client.responses.cancel(running.id)
    events: list[Any] = list(client.responses.retrieve(running.id, stream=True))
    assert events[-1].response == client.responses.retrieve(running.id)
    assert events[-1].response.status == "cancelled"
    stack.workers.open()
    stack.workers.fail_with = "no room: try later"
    events = list(client.responses.create(model="test-model", input="Hi", stream=True))
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.message == "no room: try later"


@pytest.mark.parametrize("key", ["{size}", "50000000", "-1", "abc", "1.5", "", "²", "9" * 30])
def test_biased_tokens_are_in_the_vocabulary(stack: Stack, client: OpenAI, key: str) -> None:
    key = key.format(size=stack.tokenizer.vocab_size)
    for value in (1, 1e9, "x"):
        body = {"messages": HI, "logit_bias": {key: value}}
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("logit_bias")
    assert client.chat.completions.create(model="test-model", messages=HI).choices


def test_cached_tokens_are_told_everywhere(stack: Stack, client: OpenAI) -> None:
    made = client.responses.create(model="test-model", input="Where am I?")
    held = len(stack.store.turn_ids(made.id)) - 1
    history: Any = [
        {"role": "user", "content": "Where am I?"},
        {"role": "assistant", "content": made.output_text},
        {"role": "user", "content": "Sure?"},
    ]
    options: Any = {"model": "test-model", "messages": history}
    events: list[Any] = list(
        client.responses.create(
            model="test-model", input="Sure?", previous_response_id=made.id, stream=True
        )
    )
    assert events[-1].response.usage.input_tokens_details.cached_tokens == held
    chat = client.chat.completions.create(**options)
    assert chat.usage.prompt_tokens_details.cached_tokens == held
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options=usage))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == held
    with Anthropic(base_url=stack.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(**options, max_tokens=50)
        assert message.usage.cache_read_input_tokens == held
        with other.messages.stream(**options, max_tokens=50) as stream:
            final = stream.get_final_message()
        assert final.usage.cache_read_input_tokens == held


def test_what_is_named_above_exists() -> None:
    tests = Path(__file__).parent.parent
    found = {
        f"{path.stem}::{node.name}"
        for path in tests.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    names = re.findall(r"`(?:(?:\w+/)?(test_\w+)::)?(test_\w+)`", __doc__ or "")
    own = Path(__file__).stem
    modules = {name.partition("::")[0] for name in found}
    for module, name in names:
        known = f"{module or own}::{name}" in found or name in modules
        known = known or any(entry.endswith(f"::{name}") for entry in found)
        assert known, f"{module}::{name}"
    assert len(names) > 30
