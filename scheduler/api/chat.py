"""Routes of /v1/chat/completions: stateless for the client, not for us.

The client sends the whole conversation each time; the turn that it repeats is found by its text
and its exact token ids are continued (see `scheduler.api.threads`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler.api import chat_stored
from scheduler.api.backend import Backend
from scheduler.api.bodies import BodyRoute, in_turn
from scheduler.api.chat_requests import ChatRequest, to_response_request
from scheduler.api.clients import Client
from scheduler.api.faults import Fault
from scheduler.api.frames import Spliced, encode
from scheduler.api.intake import accept
from scheduler.api.lane import Lane
from scheduler.api.lookup import find_job
from scheduler.api.sessions import session_of
from scheduler.api.stream import EventStream
from scheduler.api.view import EventView, response_object
from scheduler.delivery import follow, look_up, wait
from scheduler.record import Accepted, Job

_TEXT_DELTA = "response.output_text.delta"
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/chat", route_class=BodyRoute, tags=["chat"])

    @routes.post("/completions")
    async def create_completion(
        request: Request,
        body: ChatRequest,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    ) -> Response:
        def accepting() -> Accepted:
            wanted = to_response_request(body)
            about = {"chat": True} if body.store else {}
            session = session_of(request.headers, wanted)
            return accept(backend, wanted, idempotency_key, about, session)

        try:
            accepted = await in_turn(request, accepting)
        except Fault as fault:
            raise _renamed(fault) from fault
        headers = {"x-request-id": accepted.id}
        client = Client(accepted.id, accepted.client)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            lane = Lane()
            return EventStream(
                _chunks(backend, client, usage, lane),
                during=backend.clients.serving(client),
                headers=headers,
                lane=lane,
            )
        await wait(backend, client, request)
        job = await run_in_threadpool(find_job, backend, accepted.id)
        made = response_object(job)
        if made["status"] == "failed":
            # It ran and failed: the same request would fail again, at the same cost.
            raise Fault(500, made["error"]["message"], code=made["error"]["code"], retry=False)
        return JSONResponse(completion(made), headers=headers)

    chat_stored.add_to(routes, backend, completion)
    return routes


def completion(made: dict[str, Any]) -> dict[str, Any]:
    """A chat.completion of an ended response."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    message["annotations"] = []
    texts: list[str] = []
    logprobs: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in made["output"]:
        if item["type"] == "message":
            texts += [part.get("text", "") for part in item["content"]]
            logprobs += [entry for part in item["content"] for entry in part.get("logprobs") or ()]
        elif item["type"] == "function_call":
            calls.append(_call(item))
        elif item["type"] == "reasoning":
            thoughts += [part["text"] for part in item.get("content") or ()]
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": finish_reason(made),
    }
    return {
        **_frame(made, "chat.completion"),
        "choices": [choice],
        "usage": usage(made),
        "service_tier": made["service_tier"],
        "tandem": made["tandem"] | {"response": made["id"]},
    }


def finish_reason(made: dict[str, Any]) -> str:
    """Why an ended response ended, in this API's words."""
    cut = _FINISH.get((made["incomplete_details"] or {}).get("reason", ""))
    called = any(item["type"] == "function_call" for item in made["output"])
    return cut or ("tool_calls" if called else "stop")


def _call(item: dict[str, Any], index: int | None = None) -> dict[str, Any]:
    """A tool call; with `index` as the first piece of it in a stream."""
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return call if index is None else {"index": index, **call}


def usage(made: dict[str, Any]) -> dict[str, Any] | None:
    """Token counts in this API's names."""
    told = made["usage"]
    if told is None:
        return None
    return {
        "prompt_tokens": told["input_tokens"],
        "completion_tokens": told["output_tokens"],
        "total_tokens": told["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": told["input_tokens_details"]["cached_tokens"]},
        "completion_tokens_details": {
            "reasoning_tokens": told["output_tokens_details"]["reasoning_tokens"]
        },
    }


async def _chunks(
    backend: Backend, client: Client, include_usage: bool, lane: Lane
) -> AsyncGenerator[bytes, None]:
    """Server-sent chat.completion.chunk objects; empty ones while nothing else comes."""
    job = await look_up(backend, client.response)
    chunks = _Chunks(job, include_usage)
    batches = follow(backend, job, chunks, lane=lane, say=b"".join, client=client)
    async with contextlib.aclosing(batches):
        async for new in batches:
            if told := b"".join(new) if new else chunks.alive():
                yield told


class _Chunks:
    """A response's events as chunks, in order from the first."""

    def __init__(self, job: Job, include_usage: bool) -> None:
        self._view = EventView(job)
        self._include_usage = include_usage
        self._base: dict[str, Any] = {}
        self._calls = 0
        self._content: Spliced | None = None

    def alive(self) -> bytes:
        """What is sent while nothing comes; nothing before the first chunk."""
        return self._said({}) if self._base else b""

    def render(self, seq: int, data: Mapping[str, Any], ended: Job | None = None) -> bytes:
        """The chunks that an event means here; mostly one or none."""
        if data["type"] == _TEXT_DELTA and not data.get("logprobs"):
            if self._content is None:
                self._content = Spliced(lambda text, _: self._said({"content": text}))
            return self._content(data["delta"]) if data["delta"] else b""
        event = self._view.render(seq, data, ended)
        kind = event["type"]
        if kind == "response.created":
            self._base = _frame(event["response"], "chat.completion.chunk")
            return self._said({"role": "assistant", "content": ""})
        if kind == _TEXT_DELTA:
            return self._said({"content": event["delta"]}, logprobs=event["logprobs"])
        if kind == "response.reasoning_text.delta":
            return self._said({"reasoning_content": event["delta"]}) if event["delta"] else b""
        if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            self._calls += 1
            return self._said({"tool_calls": [_call(event["item"], self._calls - 1)]})
        if kind == "response.function_call_arguments.delta":
            piece = {"index": self._calls - 1, "function": {"arguments": event["delta"]}}
            return self._said({"tool_calls": [piece]})
        if kind in ("response.completed", "response.incomplete"):
            made = event["response"]
            told = self._said({}, finish_reason(made))
            if self._include_usage:
                told += _sse({**self._base, "choices": [], "usage": usage(made)})
            return told + b"data: [DONE]\n\n"
        if kind == "response.failed":
            error = event["response"]["error"]
            return _sse(Fault(500, error["message"], code=error["code"]).body())
        if kind == "error":
            return _sse(Fault(503, event["message"], code=event["code"]).body())
        return b""

    def _said(
        self,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: list[Any] | None = None,
    ) -> bytes:
        told = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish}
        return _sse({**self._base, "choices": [choice]})


def _frame(made: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-" + made["id"].removeprefix("resp_"),
        "object": kind,
        "created": made["created_at"],
        "model": made["model"],
        "system_fingerprint": None,
    }


def _sse(data: dict[str, Any]) -> bytes:
    return b"data: " + encode(data).encode("utf-8", "replace") + b"\n\n"


def _renamed(fault: Fault) -> Fault:
    """The fault with the name that this API has for the input."""
    if fault.param and fault.param.startswith("input"):
        fault.param = "messages"
    return fault
