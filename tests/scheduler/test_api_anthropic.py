"""The official Anthropic client against the API: messages, streams, tools, counting, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from api_stack import Script, Stack
from redis_kit import Server

from scheduler.api import stream
from scheduler.record import Job

MODEL = "claude-opus"
HI: Any = [{"role": "user", "content": "How is it in Bern?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name":"weather",  "arguments": {"city":"Bern"}}\n</tool_call>'
ANSWER = "It is sunny in Zürich, 東京 👩‍👩‍👧!"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    sections: Any = {"api": {"aliases": ["claude-*"]}}
    with Server() as server, Stack(server.url, family="tools", **sections) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Anthropic]:
    stack.workers.script = thinking
    with Anthropic(base_url=stack.url, api_key="none", max_retries=0) as made:
        yield made
    stack.workers.open()
    stack.workers.fail_with = None


def thinking(job: Job) -> Script:
    """Thinks and calls a tool; answers once it has the result, or where there are no tools."""
    last = job.request["input"][-1]["type"]
    if last == "function_call_output" or not job.request["tools"]:
        return [(piece, [("text", piece, "")]) for piece in ANSWER.split(" ")]
    return [
        ("<think>\n", []),
        ("Let me look.", [("thinking", "Let me look.", "")]),
        ("\n</think>\n\n", [("thinking", "\n", "")]),
        ("I look.\n", [("text", "I look.\n", "")]),
        (CALL, [("call", '{"city":"Bern"}', "weather")]),
    ]


def ask(client: Anthropic, messages: Any = HI, **more: Any) -> anthropic.types.Message:
    options: Any = {"model": MODEL, "max_tokens": 200, **more}
    made: anthropic.types.Message = client.messages.create(messages=messages, **options)
    return made


def prompt_of(stack: Stack, message: anthropic.types.Message) -> str:
    response = "resp_" + message.id.removeprefix("msg_")
    return stack.tokenizer.decode(stack.workers.prompts[response])


def test_create_and_every_event_of_a_stream(stack: Stack, client: Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    made = ask(client, system=system)
    (block,) = made.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == ANSWER.replace(" ", "")
    assert (made.role, made.stop_reason, made.stop_sequence) == ("assistant", "end_turn", None)
    assert made.usage.input_tokens > 0
    assert made.usage.output_tokens_details is not None
    assert made.usage.output_tokens_details.thinking_tokens == 0
    assert "system\nBe brief.\n<|im_end|>" in prompt_of(stack, made)

    options: Any = {"model": MODEL, "max_tokens": 200, "messages": HI, "system": system}
    raw = list(client.messages.create(stream=True, **options))
    assert [event.type for event in raw[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in raw[-3:]] == [
        "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    with client.messages.stream(**options) as streamed:
        assert "".join(streamed.text_stream) == block.text
        final = streamed.get_final_message()
    assert [item.to_dict() for item in final.content] == [block.to_dict()]
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == made.usage.output_tokens
    # Each asked the same: they say which message they are.
    assert final.id != made.id


def test_tools_and_thinking_turn_after_turn(stack: Stack, client: Anthropic) -> None:
    messages: Any = list(HI)
    made = ask(client, messages, tools=[WEATHER], thinking={"type": "adaptive"})
    assert made.stop_reason == "tool_use"
    thought, said, use = made.content
    assert isinstance(thought, anthropic.types.ThinkingBlock)
    assert isinstance(said, anthropic.types.TextBlock)
    assert isinstance(use, anthropic.types.ToolUseBlock)
    assert thought.thinking == "Let me look.\n"
    assert thought.signature
    assert use.input == {"city": "Bern"}
    assert made.usage.output_tokens_details is not None
    assert made.usage.output_tokens_details.thinking_tokens > 0

    options: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER]}
    with client.messages.stream(messages=messages, **options) as streamed:
        kinds = [event.type for event in streamed]
        again = streamed.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert [block.type for block in again.content] == ["thinking", "text", "tool_use"]
    assert isinstance(again.content[0], anthropic.types.ThinkingBlock)
    assert again.content[0].signature != ""
    assert again.content[2].input == use.input  # type: ignore[union-attr]  # its type is known

    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages += [made.to_param(), {"role": "user", "content": [result]}]
    told = ask(client, messages, tools=[WEATHER])
    assert told.content[0].text == ANSWER.replace(" ", "")  # type: ignore[union-attr]  # a text
    held = made.usage.input_tokens + made.usage.output_tokens - 1
    assert told.usage.cache_read_input_tokens == held
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[WEATHER])
    assert counted.input_tokens == held + told.usage.input_tokens


def test_thoughts_may_be_kept_from_the_client(client: Anthropic) -> None:
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    made = ask(client, tools=[WEATHER], thinking=hidden)
    thought = made.content[0]
    assert isinstance(thought, anthropic.types.ThinkingBlock)
    assert (thought.thinking, thought.signature != "") == ("", True)
    options: Any = {"model": MODEL, "max_tokens": 99, "tools": [WEATHER], "thinking": hidden}
    with client.messages.stream(messages=HI, **options) as streamed:
        again = streamed.get_final_message().content[0]
    assert isinstance(again, anthropic.types.ThinkingBlock)
    assert (again.thinking, again.signature != "") == ("", True)
    # Sent back empty, it stands for what was thought.
    use = made.content[2]
    assert isinstance(use, anthropic.types.ToolUseBlock)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages: Any = [*HI, made.to_param(), {"role": "user", "content": [result]}]
    told = ask(client, messages, tools=[WEATHER], thinking=hidden)
    read = told.usage.cache_read_input_tokens
    assert read == made.usage.input_tokens + made.usage.output_tokens - 1


def test_system_messages_may_stand_between_others(stack: Stack, client: Anthropic) -> None:
    first = ask(client)
    messages: Any = [
        *HI,
        first.to_param(),
        {"role": "system", "content": "From now on speak French."},
        {"role": "user", "content": "And now?"},
    ]
    made = ask(client, messages)
    assert made.usage.cache_read_input_tokens
    # This template would leave out a system message that is not the first.
    assert prompt_of(stack, made).endswith(
        "user\nFrom now on speak French.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_formats_and_limits(stack: Stack, client: Anthropic) -> None:
    schema = WEATHER["input_schema"]
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    made = ask(client, output_config=config)
    request = last_request(stack, made)
    assert request["params"]["grammar"]["kind"] == "json_schema"
    assert request["options"] == {"enable_thinking": True}
    made = ask(client, thinking={"type": "disabled"})
    assert last_request(stack, made)["options"] == {"enable_thinking": False}
    stack.workers.script = None
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"


def last_request(stack: Stack, message: anthropic.types.Message) -> dict[str, Any]:
    turn = stack.store.get_turn("resp_" + message.id.removeprefix("msg_"))
    assert turn is not None
    found: dict[str, Any] = turn.params
    return found


def test_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.lifecycle) == ("test-model", "model", "active")
    assert model.max_input_tokens == 4096
    assert model.created_at.year >= 2025
    assert client.models.retrieve(MODEL).id == "test-model"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_pings_while_nothing_else_comes(
    stack: Stack, client: Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.2)
    stack.workers.may_prefill.clear()
    body: Any = {"model": MODEL, "max_tokens": 99, "messages": HI, "stream": True}
    pings = 0
    with client.with_streaming_response.messages.create(**body) as answer:
        for line in answer.iter_lines():
            pings += line == "event: ping"
            if pings == 3:
                stack.workers.may_prefill.set()
            if line.startswith("data: "):
                last = json.loads(line[6:])
    assert pings >= 3
    assert last == {"type": "message_stop"}


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_are_the_clients_own(stack: Stack, client: Anthropic, streamed: bool) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-4o") as missing:
        ask(client, model="gpt-4o", stream=streamed)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]  # JSON
    picture = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    refusals: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": [*HI, {"role": "assistant", "content": "It"}]},
        {"messages": [{"role": "user", "content": [picture]}]},
        {"messages": [{"role": "user", "content": "x" * 300_000}]},
        {"max_tokens": 0},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]},
    ]
    for wrong in refusals:
        body = {"messages": HI, **wrong}
        with pytest.raises(anthropic.BadRequestError) as refused:
            ask(client, stream=streamed, **body)
        error: Any = refused.value.body
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    stack.workers.fail_with = "no room: try later"
    with pytest.raises(anthropic.APIStatusError, match="no room") as failed:
        list(ask(client, stream=streamed))  # a stream tells it at its end
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]  # JSON
    if not streamed:
        assert failed.value.response.headers["x-should-retry"] == "false"


def test_a_retried_request_is_the_same_one(stack: Stack, client: Anthropic) -> None:
    key = {"Idempotency-Key": "again"}
    first = ask(client, extra_headers=key)
    assert ask(client, extra_headers=key).id == first.id
    with pytest.raises(anthropic.ConflictError, match="idempotency key"):
        ask(client, [{"role": "user", "content": "Other"}], extra_headers=key)
