"""Anything at all sent to any route of our own OpenAPI document: no 500, always the error shape."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from api_stack import Stack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_kit import Server

EXAMPLES = 500 if os.environ.get("TANDEM_SOAK") else 60
LIMITS = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url) as running:
        running.workers.say = lambda job: "ok"
        yield running


@pytest.fixture(scope="module")
def document(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json").json()
    return found


NAMES = st.sampled_from(
    [
        "input", "model", "messages", "role", "content", "type", "text", "stream", "conversation",
        "previous_response_id", "metadata", "items", "temperature", "max_tokens", "stop", "tools",
        "max_output_tokens", "system", "id", "call_id", "output", "arguments", "name", "seed",
    ]
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "user", "assistant", "system", "tool", "message", "input_text", "text", "function_call",
        "function_call_output", "reasoning", "tool_use", "tool_result", "test-model", "Hi", "",
        "resp_" + "0" * 32, "conv_" + "0" * 32, "\x00", "🙂", "<|im_end|>", "{{ 1/0 }}",
    ]
)  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | WORDS
    | st.text(max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
NAME = st.text(string.ascii_letters + string.digits + "_-%. ~é\x00/", max_size=40)
BODIES = st.dictionaries(NAMES, VALUES, max_size=8)


def valid_bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are nearly right: a good one with some fields replaced."""
    good: dict[str, Any] = {"model": "test-model", "background": True}
    if path.endswith(("completions", "messages", "count_tokens")):
        good |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    else:
        good |= {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]}
    return BODIES.map(lambda changes: {**good, **changes})


def check(answer: httpx.Response, path: str) -> None:
    """No internal error, and every refusal in the shape of that API."""
    assert answer.status_code != 500, (path, answer.text)
    assert answer.status_code != 503, (path, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        wanted = {"type", "message"}
        if not path.startswith("/v1/messages"):
            wanted |= {"param", "code"}
        assert set(error) == wanted
        assert error["message"]
        for inside in ("Traceback", 'File "', "/tmp/"):
            assert inside not in error["message"]


def posts(document: dict[str, Any]) -> list[str]:
    return [path for path, methods in document["paths"].items() if "post" in methods]


def test_every_route_is_described(document: dict[str, Any]) -> None:
    for path in (
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
        "/v1/conversations", "/v1/chat/completions", "/v1/messages", "/v1/models", "/ready",
    ):  # fmt: skip
        assert path in document["paths"]


@LIMITS
@given(data=st.data())
def test_bodies(stack: Stack, document: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(posts(document)))
    body = data.draw(BODIES | valid_bodies(path) | VALUES)
    real = path.replace("{response_id}", "resp_" + "1" * 32)
    real = real.replace("{conversation_id}", "conv_" + "1" * 32)
    raw = json.dumps(body)
    headers = {"content-type": "application/json"}
    check(httpx.post(stack.url + real, content=raw, headers=headers, timeout=120), path)


@LIMITS
@given(data=st.data())
def test_paths_and_queries(stack: Stack, document: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(p for p in document["paths"] if "/v1/" in p)))
    real = path
    for parameter in ("response_id", "conversation_id", "item_id"):
        if "{" + parameter + "}" in path:
            real = real.replace("{" + parameter + "}", quote(data.draw(NAME), safe=""))
    real = real.replace("{model}", quote(data.draw(NAME)))
    query = data.draw(
        st.dictionaries(
            st.sampled_from(["limit", "order", "after", "stream", "starting_after", "status"]),
            LEAVES.filter(lambda v: v is not None).map(str),
        )
    )
    method = data.draw(st.sampled_from(["GET", "DELETE", "POST", "PUT", "OPTIONS"]))
    check(httpx.request(method, stack.url + real, params=query, timeout=120), path)


@LIMITS
@given(raw=st.binary(max_size=60), path=st.sampled_from(["responses", "messages"]))
def test_bytes(stack: Stack, raw: bytes, path: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{stack.url}/v1/{path}", content=raw, headers=headers)
    check(answer, f"/v1/{path}")
