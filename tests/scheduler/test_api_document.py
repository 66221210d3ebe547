"""Our own OpenAPI document, fuzzed: no internal error, no answer of another shape than it says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from api_stack import Stack
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from redis_kit import Server
from schemathesis.checks import not_a_server_error
from schemathesis.errors import InvalidSchema, SchemathesisError
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from scheduler.api.document import ANSWERS

EXAMPLES = 60 if os.environ.get("TANDEM_SOAK") else 2
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
#: What cannot be driven by one answer after another: live dashboards and files of their own tests.
LEFT_OUT = ("/rq", "/metrics", "/v1/files", "/v1/batches", "/ready")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url) as running:
        running.workers.say = lambda job: "ok"
        yield running


@pytest.fixture(scope="module")
def document(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json", timeout=60).json()
    return found


def test_every_answer_is_described(document: dict[str, Any]) -> None:
    operations = {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert set(ANSWERS) <= set(operations)
    for name, operation in operations.items():
        assert "422" not in operation["responses"], name
        assert "default" in operation["responses"], name
    body = operations["post /v1/responses"]["requestBody"]["content"]["application/json"]["schema"]
    shape = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"input", "previous_response_id", "text", "tools"} <= set(shape["properties"])
    streamed = operations["post /v1/messages"]["responses"]["200"]["content"]
    assert set(streamed) == {"application/json", "text/event-stream"}


def test_the_events_of_streams_are_described(stack: Stack, document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    talk = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/responses", {"input": "Hi", "stream": True}),
        ("/v1/chat/completions", {"messages": talk, "stream": True}),
        (
            "/v1/messages",
            {"model": "test-model", "max_tokens": 9, "messages": talk, "stream": True},
        ),
    ):
        case = schema[path]["POST"].Case(body=body, media_type="application/json")
        answer = case.call(base_url=stack.url, timeout=120)
        assert answer.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(answer, checks=CHECKS)


def real_names(stack: Stack) -> dict[str, str]:
    """Names of things that are there."""
    url, body = f"{stack.url}/v1", {"input": "Hi", "store": True}
    response = httpx.post(f"{url}/responses", json=body, timeout=60).json()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "store": True}
    completion = httpx.post(f"{url}/chat/completions", json=chat, timeout=60).json()
    conversation = httpx.post(f"{url}/conversations", json={}).json()
    return {
        "response_id": response["id"],
        "completion_id": completion["id"],
        "conversation_id": conversation["id"],
        "model": "test-model",
    }


def aim(case: Any, names: dict[str, str]) -> None:
    """Let a request name what is there, so that more than refusals are seen."""
    if case.method.upper() != "DELETE":
        for name, value in names.items():
            if name in (case.path_parameters or {}):
                case.path_parameters[name] = value
    if isinstance(case.body, dict) and names:
        for name in ("previous_response_id", "conversation", "tool_choice", "response_id"):
            case.body.pop(name, None)
        if "model" in case.body:
            case.body["model"] = names["model"]


def hold(stack: Stack, cases: Any, names: dict[str, str], seen: set[int]) -> None:
    """Send some cases and check the answers; `seen`: their statuses."""

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=EXAMPLES < 10,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(case=cases)
    def send(case: Any) -> None:
        aim(case, names)
        answer = case.call(base_url=stack.url, timeout=60)
        seen.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    send()


@pytest.mark.rotate(3)
def test_the_document_holds(stack: Stack, document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    names = real_names(stack)
    tried, seen = 0, set[int]()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/" or operation.path.startswith(LEFT_OUT):
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            right = mode is GenerationMode.POSITIVE
            try:
                hold(stack, operation.as_strategy(mode), names if right else {}, seen)
            except (Unsatisfiable, SchemathesisError) as error:
                if isinstance(error, InvalidSchema) or right:
                    raise
                continue  # nothing can be wrong with an operation that takes nothing
            tried += 1
    assert tried > 30
    assert {200, 400, 404} <= seen
