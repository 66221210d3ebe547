"""Tools, thinking and forms of answers in all three APIs, and how their turns go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api_stack import Script, Stack
from openai import OpenAI
from redis_kit import Server

from scheduler.record import Job

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
HI: Any = [{"role": "user", "content": "How is it in Bern?"}]
# Not as the template writes it: other spaces, and a number of them.
CALL = '<tool_call>\n{"name":"weather",  "arguments": {"city":"Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url, family="tools") as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    stack.workers.script = calling
    with stack.client() as made:
        yield made


def calling(job: Job) -> Script:
    """Thinks and calls; answers once a tool has."""
    if job.request["input"][-1]["type"] == "function_call_output":
        return [("It is sunny.", [("text", "It is sunny.", "")])]
    return [
        ("<think>\n", []),
        ("Let me look.", [("thinking", "Let me look.", "")]),
        ("\n</think>\n\n", [("thinking", "\n", "")]),
        ("I look.\n", [("text", "I look.\n", "")]),
        (CALL, [("call", '{"city":"Bern"}', "weather")]),
    ]


def test_responses_call_stream_and_continue(stack: Stack, client: OpenAI) -> None:
    asked: Any = {"model": "test-model", "input": "How is it in Bern?", "tools": [TOOL]}
    made = client.responses.create(**asked)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    call = made.output[2]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern"})
    assert made.output_text == "I look.\n"
    assert made.usage is not None
    assert made.usage.output_tokens_details.reasoning_tokens > 0
    assert made.tools[0].type == "function"

    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    for kind in ("reasoning_text.delta", "reasoning_text.done", "function_call_arguments.done"):
        assert f"response.{kind}" in kinds
    last: Any = events[-1]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    arguments = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(arguments) == call.arguments
    # Every place of the stream can be gone on from.
    for after in range(len(events)):
        again = client.responses.retrieve(last.response.id, stream=True, starting_after=after)
        assert list(again) == events[after + 1 :]

    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = client.responses.create(
        model="test-model", input=[output], tools=[TOOL], previous_response_id=made.id
    )
    assert told.output_text == "It is sunny."
    assert told.usage is not None
    # The tokens that were generated are continued, not the template's rendering of them.
    first = [*stack.workers.prompts[made.id], *stack.store.get_turn(made.id).output_ids]
    assert stack.workers.prompts[told.id][: len(first)] == first
    assert told.usage.input_tokens_details.cached_tokens == len(first) - 1
    stored = stack.store.get_turn(told.id)
    assert [item["type"] for item in stored.items] == ["function_call_output", "message"]


def test_a_log_that_has_expired_tells_calls_as_well(stack: Stack, client: OpenAI) -> None:
    made = client.responses.create(model="test-model", input="Bern?", tools=[TOOL])
    for key in ("job", "events", "prompt"):
        stack.workers.runs.client.delete(f"tandem:{key}:{made.id}")
    later = client.responses.retrieve(made.id)
    assert later.output == made.output
    assert later.tools == made.tools
    events = list(client.responses.retrieve(made.id, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == made.output
    assert any(event.type == "response.function_call_arguments.done" for event in events)
    assert any(event.type == "response.reasoning_text.delta" for event in events)


def test_chat_calls_and_sends_them_back_in_its_own_rendering(stack: Stack, client: OpenAI) -> None:
    create = client.chat.completions.create
    made = create(model="test-model", messages=HI, tools=[CHAT_TOOL])
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Bern"}')
    assert choice.message.model_extra == {"reasoning_content": "Let me look.\n"}

    chunks = list(create(model="test-model", messages=HI, tools=[CHAT_TOOL], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert pieces[0].function is not None
    assert pieces[0].function.name == "weather"
    assert "".join(p.function.arguments or "" for p in pieces if p.function) == '{"city":"Bern"}'
    assert {piece.index for piece in pieces} == {0}
    assert "".join(delta.content or "" for delta in deltas) == "I look.\n"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    # Laid out anew, the thinking left out or kept: the generated ids stand while it is shown.
    again: Any = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Let me look.",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "weather", "arguments": '{ "city": "Bern" }'},
            }
        ],
    }
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told = create(model="test-model", messages=[*HI, again, result], tools=[CHAT_TOOL])
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    cached = told.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > made.usage.prompt_tokens  # type: ignore[union-attr]  # every answer has it
    # The next question: this template now leaves the thinking out, so all of it is computed anew.
    final: Any = {"role": "assistant", "content": told.choices[0].message.content}
    messages = [*HI, again, result, final, {"role": "user", "content": "Thanks!"}]
    stack.workers.script = None
    last = create(model="test-model", messages=messages, tools=[CHAT_TOOL])
    prompt = stack.tokenizer.decode(
        stack.workers.prompts["resp_" + last.id.removeprefix("chatcmpl-")]
    )
    assert "Let me look" not in prompt
    assert prompt.count("<tool_call>") == 1
    assert last.usage is not None


def test_messages_use_tools(stack: Stack, client: OpenAI) -> None:
    tools = [{"name": "weather", "input_schema": WEATHER}]

    def post(messages: Any, **more: Any) -> httpx.Response:
        body = {"model": "test-model", "max_tokens": 99, "messages": messages, "tools": tools}
        return httpx.post(f"{stack.url}/v1/messages", json=body | more, timeout=120)

    made = post(HI).json()
    assert made["stop_reason"] == "tool_use"
    assert [block["type"] for block in made["content"]] == ["thinking", "text", "tool_use"]
    assert made["content"][2]["input"] == {"city": "Bern"}
    events = [
        json.loads(line[6:])
        for line in post(HI, stream=True).text.splitlines()
        if line.startswith("data: ")
    ]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]
    parts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    written = "".join(d["partial_json"] for d in parts if d["type"] == "input_json_delta")
    assert json.loads(written) == {"city": "Bern"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    use = made["content"][2]["id"]
    result = [{"type": "tool_result", "tool_use_id": use, "content": "sunny"}]
    messages = [
        *HI,
        {"role": "assistant", "content": made["content"]},
        {"role": "user", "content": result},
    ]
    told = post(messages).json()
    assert told["content"] == [{"type": "text", "text": "It is sunny."}]
    assert told["usage"]["cache_read_input_tokens"] > made["usage"]["input_tokens"]


def last_request(stack: Stack, response: str) -> dict[str, Any]:
    found = stack.workers.runs.client.hget(f"tandem:job:{response}", "request")
    from scheduler.serializer import unpack

    request: dict[str, Any] = unpack(found)  # type: ignore[arg-type]  # redis is synchronous here
    return request


def test_choices_become_grammars(stack: Stack, client: OpenAI) -> None:
    stack.workers.script = None
    other: Any = {"type": "function", "name": "clock", "parameters": None, "strict": False}

    def asked(**more: Any) -> dict[str, Any]:
        made = client.responses.create(
            model="test-model", input="Bern?", tools=[TOOL, other], **more
        )
        return last_request(stack, made.id)

    assert "grammar" not in asked()["params"]
    both = asked(tool_choice="required")["params"]["grammar"]["text"]
    assert "weather" in both
    assert "clock" in both
    one = asked(tool_choice={"type": "function", "name": "clock"})["params"]["grammar"]["text"]
    assert "weather" not in one
    none = asked(tool_choice="none")
    assert [tool["function"]["name"] for tool in none["tools"]] == ["weather", "clock"]
    (mark,) = stack.tokenizer.encode("<tool_call>")
    assert none["params"]["logit_bias"] == {str(mark): -10000.0}
    schema = {"type": "json_schema", "name": "w", "schema": WEATHER}
    mixed = asked(text={"format": schema})["params"]["grammar"]
    assert mixed["kind"] == "lark"
    assert mixed["text"].startswith("start: calls | answer")


def test_some_tools_are_allowed_and_strict_ones_are_held(stack: Stack, client: OpenAI) -> None:
    stack.workers.script = None
    other: Any = {"type": "function", "name": "clock", "parameters": None, "strict": False}
    strict: Any = {**TOOL, "strict": True}

    def made(tools: list[Any], **more: Any) -> tuple[Any, str]:
        answer = client.responses.create(model="test-model", input="Bern?", tools=tools, **more)
        request = last_request(stack, answer.id)
        names = [tool["function"]["name"] for tool in request["tools"]]
        assert names == [tool["name"] for tool in tools], "the prompt's head stays the same"
        assert all("strict" not in tool["function"] for tool in request["tools"])
        return answer, request["params"].get("grammar", {}).get("text", "")

    def allowed(mode: str) -> Any:
        tools = [{"type": "function", "name": "clock"}]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}

    for mode, start in (("auto", "start: free"), ("required", "start: calls\n")):
        answer, grammar = made([TOOL, other], tool_choice=allowed(mode))
        assert grammar.startswith(start)
        assert "clock" in grammar
        assert "weather" not in grammar
        assert answer.tool_choice.to_dict() == allowed(mode)
    answer, grammar = made([strict, other])
    assert grammar.startswith("start: free (calls free)*")
    assert [tool.strict for tool in answer.tools] == [True, False]
    answer, grammar = made([TOOL, other], parallel_tool_calls=False)
    assert grammar.startswith("start: free (calls free)?")
    assert not answer.parallel_tool_calls
    assert made([TOOL, other])[1] == ""
    # What is not strict may have a schema that nobody can follow.
    odd: Any = {**other, "parameters": {"type": "odd"}}
    assert made([strict, odd])[1]
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        made([{**odd, "strict": True}])
    # Chat has other words for it.
    chat = client.chat.completions.create(
        model="test-model", messages=HI,
        tools=[CHAT_TOOL, {"type": "function", "function": {"name": "clock"}}],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "weather"}}],
            },
        },
    )  # fmt: skip
    grammar = last_request(stack, "resp_" + chat.id.removeprefix("chatcmpl-"))["params"]["grammar"]
    assert "weather" in grammar["text"]
    assert "clock" not in grammar["text"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [TOOL]}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "parameters": {"maximum": 1 << 80}}]}, "tools"),
        (
            {"tools": [{**TOOL, "parameters": {"type": "odd"}}], "tool_choice": "required"},
            "tools",
        ),
    ],
)
def test_tools_that_are_refused(
    stack: Stack, client: OpenAI, more: dict[str, Any], param: str
) -> None:
    body: dict[str, Any] = {"model": "test-model", "input": "x", "tools": [TOOL], **more}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**body)
    assert caught.value.param == param
