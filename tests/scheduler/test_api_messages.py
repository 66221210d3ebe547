"""Anthropic Messages: shapes, streams, counting, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_stack import Stack
from redis_kit import Server

from scheduler.jobs import Jobs
from scheduler.record import Result


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url) as running:
        yield running


def post(stack: Stack, path: str = "", **body: Any) -> httpx.Response:
    whole = {"model": "test-model", "max_tokens": 200, **body}
    return httpx.post(f"{stack.url}/v1/messages{path}", json=whole, timeout=120)


def streamed(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; each one's name is its type."""
    found = []
    for block in post(stack, stream=True, **body).text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


HI = [{"role": "user", "content": "Hi"}]


def test_message_and_stream(stack: Stack) -> None:
    answer = post(stack, messages=HI, system="Be brief.")
    made = answer.json()
    assert answer.status_code == 200
    assert (made["type"], made["role"], made["stop_reason"]) == ("message", "assistant", "end_turn")
    text = made["content"][0]["text"]
    assert text.startswith("You sent")
    prompt = stack.tokenizer.decode(stack.workers.prompts[answer.headers["request-id"]])
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    events = streamed(stack, messages=HI, system=[{"type": "text", "text": "Be brief."}])
    assert [e["type"] for e in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [e["type"] for e in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    said = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(said) == text
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == made["usage"]
    assert events[0]["message"]["usage"]["input_tokens"] == made["usage"]["input_tokens"]


def test_limit_of_tokens(stack: Stack) -> None:
    assert post(stack, messages=HI, max_tokens=2).json()["stop_reason"] == "max_tokens"
    events = streamed(stack, messages=HI, max_tokens=2)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_the_next_turn_reads_the_cache(stack: Stack) -> None:
    first = post(stack, messages=HI, system="Be kind.").json()
    assert first["usage"]["cache_read_input_tokens"] == 0
    messages = [
        *HI,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{"type": "text", "text": "More"}]},
    ]
    second = post(stack, messages=messages, system="Be kind.").json()
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > first["usage"]["input_tokens"]
    counted = post(stack, "/count_tokens", messages=messages, system="Be kind.").json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_tool_calls_of_the_past(stack: Stack) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "add", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "4"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    answer = post(stack, messages=messages)
    assert answer.status_code == 200
    prompt = stack.tokenizer.decode(stack.workers.prompts[answer.headers["request-id"]])
    assert "<|im_start|>tool\n4<|im_end|>" in prompt
    assert prompt.endswith("So?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": 1}]}, 400, "invalid_request_error"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
        ),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"tools": [{"name": "x"}]}, 400, "invalid_request_error"),
        ({"model": "claude-x"}, 404, "not_found_error"),
    ],
)
def test_bad_requests(
    stack: Stack, change: dict[str, Any], status: int, kind: str, stream: bool
) -> None:
    before = len(Jobs(stack.workers.runs.client).list())
    answer = post(stack, **{"messages": HI, "stream": stream, **change})
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert set(error["error"]) == {"type", "message"}
    assert len(Jobs(stack.workers.runs.client).list()) == before


def test_a_failed_run(stack: Stack) -> None:
    stack.workers.fail_with = "no room: try later"
    try:
        answer = post(stack, messages=HI)
        assert answer.status_code == 500
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"] == {"type": "api_error", "message": "no room: try later"}
        last = streamed(stack, messages=HI)[-1]
        assert last == answer.json()
    finally:
        stack.workers.fail_with = None


def test_stop_sequences_are_named(stack: Stack) -> None:
    # A worker that stops at "tokens", as the real one does: no end token, the text cut before it.
    workers = stack.workers
    whole = workers.say
    cut = "You sent "
    ended = workers.runs.finish

    def finish(job: Any, result: Result, first: int = -1) -> Any:
        output = {"text": cut, "finish": "stop"}
        return ended(job, Result(output=output, usage=result.usage), first)

    workers.runs.finish = finish  # type: ignore[method-assign]
    workers.say = lambda job: "You sent tokens"
    eos, workers.tokenizer.eos_ids = workers.tokenizer.eos_ids, frozenset({5})
    try:
        made = post(stack, messages=HI, stop_sequences=["zebra", "tokens"]).json()
    finally:
        workers.runs.finish = ended  # type: ignore[method-assign]
        workers.say, workers.tokenizer.eos_ids = whole, eos
    assert made["content"] == [{"type": "text", "text": cut}]
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "tokens")
    assert post(stack, messages=HI, stop_sequences=["zebra"]).json()["stop_reason"] == "end_turn"
