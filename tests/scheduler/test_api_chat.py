"""Chat Completions: the official client, and reuse of what was said before without any ID."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api_stack import Stack
from jobs_kit import eventually
from openai import OpenAI

from scheduler.api.threads import same_answer
from scheduler.jobs import Jobs


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, jobs={"abandon_seconds": 0}) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client() as made:
        yield made


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="test-model", messages=messages, **options)


def last_job(stack: Stack) -> Any:
    return Jobs(stack.workers.runs.client).list(limit=1)[0]


def test_completion_and_stream(stack: Stack, client: OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    made = ask(client, messages, max_tokens=100)
    assert made.id.startswith("chatcmpl-")
    assert made.choices[0].finish_reason == "stop"
    text = made.choices[0].message.content
    assert text.startswith("You sent")
    assert made.usage.prompt_tokens == last_job(stack).prompt_tokens
    chunks = list(ask(client, messages, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == made.usage.total_tokens
    assert len({c.id for c in chunks}) == 1
    cut = ask(client, messages, max_completion_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens <= 2


def test_turn_after_turn_continues_the_exact_ids(stack: Stack, client: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    before: list[int] = []
    for number in range(5):
        messages.append({"role": "user", "content": [{"type": "text", "text": f"Turn {number}"}]})
        made = ask(client, messages)
        job = last_job(stack)
        prompt = stack.workers.prompts[job.id]
        assert prompt[: len(before)] == before
        assert made.usage.prompt_tokens_details.cached_tokens == max(0, len(before) - 1)
        before = stack.store.turn_ids(job.id)
        # Clients trim what they send back.
        said = made.choices[0].message.content
        messages.append({"role": "assistant", "content": f"{said} "})
    turns = stack.store.conversation_turns(job.conversation)
    assert len(turns) == 5
    inputs = httpx.get(f"{stack.url}/v1/responses/{job.id}/input_items?limit=100&order=asc").json()
    assert len(inputs["data"]) == len(messages) - 1


def test_regenerate_edit_and_branch(stack: Stack, client: OpenAI) -> None:
    one: list[Any] = [{"role": "user", "content": "One"}]
    first = ask(client, one)
    root = last_job(stack)
    two = [*one, {"role": "assistant", "content": first.choices[0].message.content}]
    follow = [*two, {"role": "user", "content": "Two"}]
    for _ in range(2):  # the second time: regenerate
        ask(client, follow)
        assert last_job(stack).previous == root.id
    ask(client, [*two, {"role": "user", "content": "Something else"}])
    assert last_job(stack).previous == root.id
    edited = [*one, {"role": "assistant", "content": "I never said this."}, follow[-1]]
    made = ask(client, edited)
    assert last_job(stack).previous is None
    assert made.usage.prompt_tokens_details.cached_tokens == 0
    other = [{"role": "system", "content": "New rules"}, *follow]
    ask(client, other)
    assert last_job(stack).previous is None


def test_a_named_conversation_is_not_continued_by_its_text(stack: Stack, client: OpenAI) -> None:
    conversation = client.conversations.create()
    made = client.responses.create(model="test-model", input="One", conversation=conversation.id)
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": made.output_text},
        {"role": "user", "content": "Two"},
    ]
    chat = ask(client, messages)
    job = last_job(stack)
    assert job.previous == made.id
    assert chat.usage.prompt_tokens_details.cached_tokens > 0
    assert job.conversation != conversation.id
    assert stack.store.get_conversation(conversation.id)["head"] == made.id
    # A client of Responses may send everything as well.
    ask(client, messages)
    whole = client.responses.create(model="test-model", input=messages)
    assert whole.previous_response_id is None
    assert whole.usage.input_tokens_details.cached_tokens > 0


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999": 5}},
            "logit_bias",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 500}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools[0].type"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "x"}},
            "response_format.type",
        ),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]},
            "modalities",
        ),
        ({"messages": HI, "audio": {"voice": "alloy"}}, "audio"),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "web_search_options": {}},
            "web_search_options",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "functions": [{"name": "f"}]},
            "functions",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(stack: Stack, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json={**body, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert Jobs(stack.workers.runs.client).list() == []


def test_failures_and_departures(stack: Stack, client: OpenAI) -> None:
    stack.workers.fail_with = "no room: try later"
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.InternalServerError, match="no room") as caught:
        ask(client, messages)
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match="no room"):
        list(ask(client, messages, stream=True))
    stack.workers.fail_with = None
    stack.workers.may_prefill.clear()
    with ask(client, messages, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: last_job(stack).status == "cancelled", "the job goes on")


def test_what_counts_as_the_same_answer() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}

    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": text}

    assert same_answer([said("x")], [said("\nx ")])
    assert not same_answer([said("x")], [said("y")])
    assert not same_answer([said("x")], [])
    assert same_answer([call('{"a": 1, "b": 2}')], [call('{"b":2,"a":1}')])
    assert not same_answer([call('{"a": 1}')], [call('{"a": 2}')])
    assert same_answer([call("not json")], [call("not json")])
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert same_answer([said("x")], [thought, said("x")])
