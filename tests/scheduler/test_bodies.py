"""One client's body holds up nobody else: how much one may hold, and where it is read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_stack import Stack
from held import Held
from hypothesis import given
from hypothesis import strategies as st
from redis_kit import Server, eventually

from scheduler.api import bodies, responses
from scheduler.api.bodies import LONG, MAX_DIGITS, SMALL, Tally, shortened, values_of
from scheduler.api.schema import MAX_IDS
from scheduler.sections import ApiConfig

MOST = 1000
PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url, api={"max_values": MOST}) as running:
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
    ],
    ids=["part", "role", "number", "metadata", "tool"],
)
def test_what_is_wrong_is_told_alike_of_small_and_larger_bodies(
    stack: Stack, given: dict[str, Any]
) -> None:
    small, larger = post(stack, given), post(stack, {**given, "unknown": PAD})
    assert small.status_code == larger.status_code == 400
    assert small.json() == larger.json()


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
