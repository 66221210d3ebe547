"""Routes of /v1/chat/completions: stateless for the client, not for us.

The client sends the whole conversation each time; the turn that it repeats is found by its text
and its exact token ids are continued (see `scheduler.api.threads`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler.api import chat_stored
from scheduler.api.backend import Backend
from scheduler.api.chat_requests import ChatRequest, to_response_request
from scheduler.api.faults import Fault
from scheduler.api.intake import accept
from scheduler.api.lookup import find_job
from scheduler.api.sessions import session_of
from scheduler.api.stream import EventStream
from scheduler.api.view import response_object
from scheduler.delivery import abandon, follow, wait

_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/chat", tags=["chat"])

    @routes.post("/completions")
    async def create_completion(
        request: Request,
        body: ChatRequest,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    ) -> Response:
        wanted = to_response_request(body)
        try:
            about = {"chat": True} if body.store else {}
            session = session_of(request.headers, wanted)
            accepted = await run_in_threadpool(
                accept, backend, wanted, idempotency_key, about, session
            )
        except Fault as fault:
            raise _renamed(fault) from fault
        headers = {"x-request-id": accepted.id}
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(
                _chunks(backend, accepted.id, usage),
                on_gone=lambda: abandon(backend, accepted.id),
                headers=headers,
            )
        await wait(backend, accepted.id, request)
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
    backend: Backend, response: str, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent chat.completion.chunk objects; empty ones while nothing else comes."""
    base: dict[str, Any] = {}
    calls = 0
    async with contextlib.aclosing(follow(backend, response)) as events:
        async for event in events:
            if event is None:
                if base:
                    yield _sse(_delta(base, {}))
            elif event["type"] == "response.created":
                base = _frame(event["response"], "chat.completion.chunk")
                yield _sse(_delta(base, {"role": "assistant", "content": ""}))
            elif event["type"] == "response.output_text.delta":
                if event["delta"] or event["logprobs"]:
                    said = {"content": event["delta"]}
                    yield _sse(_delta(base, said, logprobs=event["logprobs"]))
            elif event["type"] == "response.reasoning_text.delta":
                if event["delta"]:
                    yield _sse(_delta(base, {"reasoning_content": event["delta"]}))
            elif event["type"] == "response.output_item.added":
                if event["item"]["type"] == "function_call":
                    yield _sse(_delta(base, {"tool_calls": [_call(event["item"], calls)]}))
                    calls += 1
            elif event["type"] == "response.function_call_arguments.delta":
                piece = {"index": calls - 1, "function": {"arguments": event["delta"]}}
                yield _sse(_delta(base, {"tool_calls": [piece]}))
            elif event["type"] in ("response.completed", "response.incomplete"):
                made = event["response"]
                yield _sse(_delta(base, {}, finish_reason(made)))
                if include_usage:
                    yield _sse({**base, "choices": [], "usage": usage(made)})
                yield b"data: [DONE]\n\n"
            elif event["type"] == "response.failed":
                error = event["response"]["error"]
                yield _sse(Fault(500, error["message"], code=error["code"]).body())
            elif event["type"] == "error":
                yield _sse(Fault(503, event["message"], code=event["code"]).body())


def _delta(
    base: dict[str, Any],
    delta: dict[str, Any],
    finish: str | None = None,
    logprobs: list[Any] | None = None,
) -> dict[str, Any]:
    told = {"content": logprobs, "refusal": None} if logprobs else None
    choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish}
    return {**base, "choices": [choice]}


def _frame(made: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-" + made["id"].removeprefix("resp_"),
        "object": kind,
        "created": made["created_at"],
        "model": made["model"],
        "system_fingerprint": None,
    }


def _sse(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


def _renamed(fault: Fault) -> Fault:
    """The fault with the name that this API has for the input."""
    if fault.param and fault.param.startswith("input"):
        fault.param = "messages"
    return fault
