"""One client's body holds up nobody else: how much one may hold, and where it is read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_stack import Stack
from held import Held
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from redis_kit import Server, eventually

from scheduler.api import bodies, responses
from scheduler.api.bodies import LONG, MAX_DIGITS, SMALL, Tally, shortened, values_of
from scheduler.api.chat_requests import ChatRequest
from scheduler.api.compaction import CompactRequest
from scheduler.api.message_requests import CountRequest, MessagesRequest
from scheduler.api.schema import (
    MAX_IDS,
    ConversationUpdate,
    NewConversation,
    NewItems,
    ResponseRequest,
)
from scheduler.sections import ApiConfig

MOST = 1000
PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url, api={"max_values": MOST}) as running:
        yield running


@pytest.fixture(scope="module")
def roomy() -> Iterator[Stack]:
    with Server() as server, Stack(server.url) as running:
        yield running


def post(stack: Stack, body: bytes | dict[str, Any], path: str = PATHS[0]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(stack.url + path, content=content, headers=headers, timeout=60)


def count(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + (sum(map(count, value)) if isinstance(value, list) else 0)


odd = st.text(st.sampled_from('ab",:[]{}\\\n東'))
plain = st.one_of(st.none(), st.integers(), odd)
json_values = st.recursive(
    plain, lambda part: st.lists(part, max_size=4) | st.dictionaries(odd, part, max_size=4)
)


@given(value=json_values, ascii_only=st.booleans(), step=st.integers(1, 7))
def test_values_are_counted_wherever_the_text_is_cut(
    value: Any, ascii_only: bool, step: int
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    tally = Tally()
    for at in range(0, len(raw), step):
        tally.add(raw[at : at + step])
    assert count(value) <= tally.values <= 2 * count(value)
    assert values_of(raw, 10**9) == tally.values


def holding(values: int, base: dict[str, Any]) -> bytes:
    """A body that holds exactly so many values; what is not known is left alone."""
    empty = json.dumps({**base, "unknown": []}).encode()
    missing = values - values_of(empty, 10**9)
    return json.dumps({**base, "unknown": [0] * (missing + 1)}).encode()


@pytest.mark.parametrize("path", PATHS)
def test_a_body_holds_so_many_values_and_no_more(stack: Stack, path: str) -> None:
    if path == PATHS[0]:
        base: dict[str, Any] = {"input": TALK}
    else:
        base = {"model": "test-model", "messages": TALK, "max_tokens": 8}
    assert post(stack, holding(MOST, base), path).status_code == 200
    refused = post(stack, holding(MOST + 1, base), path)
    assert refused.status_code == 413
    error = refused.json()["error"]
    assert f"more than {MOST} JSON values" in error["message"]
    assert "api.max_values" in error["message"]
    expected = "request_too_large" if path == "/v1/messages" else "invalid_request_error"
    assert error["type"] == expected
    if path != "/v1/messages":
        assert error["code"] == "too_many_values"


def test_long_text_is_one_value(stack: Stack) -> None:
    text = "[1, 2], {}, " * 500 + '"quoted \\" and \\\\" '
    assert post(stack, {"input": "Hi", "instructions": text[-40:], "pad": text}).status_code == 200
    # What is too much is heard to its end, so that the client reads the answer.
    refused = post(stack, b'{"input": [' + b"[], " * 500_000 + b'"x"]}')
    assert refused.status_code == 413


def test_the_longest_conversations_and_many_tools_are_few_enough_values() -> None:
    words = "and so on, [with commas], " * 20
    parts = [{"type": "input_text", "text": words}] * 2
    fields = {f"p{n}": {"type": "string", "description": words} for n in range(50)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    tool = {"type": "function", "name": "f", "description": words, "parameters": schema}
    turns = [{"type": "message", "role": "user", "content": parts}] * MAX_IDS
    limit = ApiConfig().max_values
    assert values_of(json.dumps({"input": turns, "tools": [tool] * 128}).encode(), limit) <= limit


def chat_turn(number: int) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "t", "tool_calls": [call]}
    return [asked, {"role": "tool", "tool_call_id": f"c{number}", "content": "r"}]


def anthropic_turn(number: int) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"c{number}", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "r"}
    return [
        {"role": "assistant", "content": [{"type": "text", "text": "t"}, call]},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize(
    ("path", "turn"),
    [
        ("/v1/chat/completions", chat_turn),
        ("/v1/messages", anthropic_turn),
        ("/v1/messages/count_tokens", anthropic_turn),
    ],
)
def test_messages_that_make_too_many_items_are_refused_in_words(
    roomy: Stack, path: str, turn: Callable[[int], list[dict[str, Any]]]
) -> None:
    turns = MAX_IDS // 3 + 1
    messages = [*TALK, *(message for n in range(turns) for message in turn(n))]
    assert len(messages) < MAX_IDS
    told = post(roomy, {"model": "default", "max_tokens": 5, "messages": messages}, path)
    assert told.status_code == 400
    error = told.json()["error"]
    assert f"make {1 + 3 * turns} items, at most {MAX_IDS}" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_results_that_are_too_long_together_are_refused_in_words(roomy: Stack) -> None:
    text = {"type": "text", "text": "x" * (9 << 20)}
    result = {"type": "tool_result", "tool_use_id": "c0", "content": [text] * 4}
    messages = [*TALK, anthropic_turn(0)[0], {"role": "user", "content": [result]}]
    told = post(roomy, {"model": "default", "max_tokens": 5, "messages": messages}, PATHS[2])
    assert told.status_code == 400
    assert "messages: String should have at most" in told.json()["error"]["message"]


def test_a_line_of_a_batch_is_bounded_as_well(stack: Stack) -> None:
    entry = {"method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}}
    lines = [json.dumps({**entry, "custom_id": "few"}).encode()]
    lines += [holding(MOST + 1, {**entry, "custom_id": "many"})]
    lines += [holding(MOST, {**entry, "custom_id": "most"})]
    client = stack.client()
    file = client.files.create(file=("b.jsonl", io.BytesIO(b"\n".join(lines))), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    eventually(lambda: client.batches.retrieve(made.id).status == "completed", "no end", 120)
    done = client.batches.retrieve(made.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    assert done.error_file_id is not None
    wrong = json.loads(client.files.content(done.error_file_id).text)
    assert wrong["error"]["code"] == "too_many_values"
    assert "line 2" in wrong["error"]["message"]


PAD = "x" * (SMALL + 1)


@pytest.mark.parametrize(
    "given",
    [
        {"input": [{"role": "user", "content": [{"type": "text"}]}]},
        {"input": [{"role": "nobody", "content": "x"}, {"role": "nobody", "content": "x"}]},
        {"input": "Hi", "temperature": "warm"},
        {"input": "Hi", "metadata": {str(n): "x" for n in range(17)}},
        {"input": "Hi", "tools": [{"type": "function", "name": "no spaces"}]},
        {"input": "Hi", "tools": ["none"]},
    ],
    ids=["part", "role", "number", "metadata", "tool", "no object"],
)
def test_what_is_wrong_is_told_alike_of_small_and_larger_bodies(
    stack: Stack, given: dict[str, Any]
) -> None:
    small, larger = post(stack, given), post(stack, {**given, "unknown": PAD})
    assert small.status_code == larger.status_code == 400
    assert small.json() == larger.json()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", [b"null", b"[]", b"1", b'"a"'], ids=["null", "list", "1", "text"])
def test_what_is_no_object_is_told_alike_of_any_length(
    stack: Stack, given: bytes, path: str
) -> None:
    small, larger = post(stack, given, path), post(stack, given + b" " * (SMALL + 1), path)
    assert small.status_code == larger.status_code == 400
    assert small.json() == larger.json()
    assert "the body: should be an object" in small.text


SHAPES = (
    ResponseRequest, ChatRequest, MessagesRequest, CountRequest, CompactRequest, NewConversation,
    ConversationUpdate, NewItems,
)  # fmt: skip


def lists_in(schema: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The lists of a shape as its validator knows them, and where they are."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield at, schema
        for name, part in schema.items():
            if name not in ("metadata", "serialization"):
                yield from lists_in(part, f"{at}.{name}")
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from lists_in(part, at)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_list_is_bounded_and_told_of_once(shape: type[BaseModel]) -> None:
    found = dict(lists_in(TypeAdapter(shape).core_schema))
    assert found or shape is ConversationUpdate
    for where, schema in found.items():
        assert schema.get("fail_fast"), where
        assert schema.get("max_length", MAX_IDS + 1) <= MAX_IDS, where


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "larger"])
def test_only_plain_json_is_read(stack: Stack, pad: str) -> None:
    body = {"input": "Hi", "unknown": pad}
    raw = json.dumps(body).encode()
    assert post(stack, b"\xef\xbb\xbf" + raw).status_code == 200
    for wrong in (raw[:-1], raw + b"x", json.dumps(body).encode("utf-16"), b"\xff" + raw):
        refused = post(stack, wrong)
        assert refused.status_code == 400
        assert "not valid JSON" in refused.json()["error"]["message"]
    digits = raw[:-1] + b', "n": ' + b"9" * (MAX_DIGITS + 1) + b"}"
    assert f"more than {MAX_DIGITS} digits" in post(stack, digits).json()["error"]["message"]


def sent(pool: ThreadPoolExecutor, stack: Stack, pad: int) -> Future[httpx.Response]:
    return pool.submit(post, stack, {"input": "Hi", "unknown": "x" * pad})


def test_others_are_served_while_a_larger_body_is_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(bodies._checked)
    monkeypatch.setattr(bodies, "_checked", held)
    with ThreadPoolExecutor(3) as pool:
        try:
            larger = [sent(pool, stack, SMALL + 1) for _ in range(3)]
            eventually(lambda: held.begun, "no body is read")
            assert httpx.get(f"{stack.url}/health", timeout=60).status_code == 200
            assert post(stack, {"input": "Hi"}).json()["status"] == "completed"
            assert not any(one.done() for one in larger)
        finally:
            held.release()
        assert [one.result().status_code for one in larger] == [200] * 3
    assert (held.begun, held.most) == (3, 1), "one after the other"


def test_only_few_large_requests_are_served_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(responses.accept, lambda backend, body, *_: body.user == "large")
    monkeypatch.setattr(responses, "accept", held)
    with ThreadPoolExecutor(4) as pool:
        try:
            body = {"input": "Hi", "user": "large", "unknown": "x" * bodies.LARGE}
            large = [pool.submit(post, stack, body) for _ in range(4)]
            eventually(lambda: held.begun == 2, "large bodies are not served")
            assert post(stack, {"input": "Hi"}).json()["status"] == "completed"
            assert not any(one.done() for one in large)
        finally:
            held.release()
        assert [one.result().status_code for one in large] == [200] * 4
    assert (held.begun, held.most) == (4, 2)


def test_long_texts_are_told_apart_by_a_digest() -> None:
    text = "ab東" * LONG
    other = text[:-1] + "x"
    one = shortened({"a": [text, "short", 1], "b": None})
    assert one == shortened({"a": [text, "short", 1], "b": None})
    assert one != shortened({"a": [other, "short", 1], "b": None})
    assert len(json.dumps(one)) < 200
    assert one["a"][1:] == ["short", 1]
    with pytest.raises(UnicodeError):
        shortened(text + "\ud800")
