"""Routes of /v1/chat/completions: stateless for the client, not for us.

The client sends the whole conversation each time; the turn that it repeats is found by its text
and its exact token ids are continued (see `scheduler.threads`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag, field_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler.backend import Backend
from scheduler.delivery import abandon, follow, wait
from scheduler.faults import Fault, bad
from scheduler.intake import accept
from scheduler.lookup import find_job
from scheduler.schema import MAX_IDS, Name, ResponseRequest, Shape, Stop, Text, check_metadata
from scheduler.stream import EventStream
from scheduler.view import response_object

_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


class ChatPart(Shape):
    """A part of a message's content."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: Text | None = None
    refusal: Text | None = None


def _kind_of_content(value: Any) -> str:
    return "«text»" if isinstance(value, str) or value is None else "«parts»"


ChatContent = Annotated[
    Annotated[Text | None, Tag("«text»")]
    | Annotated[list[ChatPart], Field(max_length=MAX_IDS), Tag("«parts»")],
    Discriminator(_kind_of_content),
]


class ChatFunction(Shape):
    """The function of a tool call."""

    name: Name
    arguments: Text = "{}"


class ChatCall(Shape):
    """A tool call that an assistant made."""

    id: Name
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatMessage(Shape):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ChatContent = None
    tool_calls: list[ChatCall] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None


class StreamOptions(Shape):
    """What a stream tells besides text."""

    include_usage: bool | None = None


class ResponseFormat(Shape):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"]


class ChatRequest(Shape):
    """Body of POST /v1/chat/completions."""

    model: Name | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_IDS)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = Field(None, description="extension")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="extension")
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Name | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    _check_metadata = field_validator("metadata")(check_metadata)


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
            accepted = await run_in_threadpool(accept, backend, wanted, idempotency_key)
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

    return routes


def to_response_request(body: ChatRequest) -> ResponseRequest:
    """The same request in the terms of the Responses API. Raises Fault for what is not served."""
    unserved = {
        "logprobs": body.logprobs,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": body.logit_bias,
        "response_format": body.response_format and body.response_format.type != "text",
        "tools": body.tools and body.tool_choice != "none",
    }
    for name, value in unserved.items():
        if value:
            raise bad(f"{name} is not supported: leave it out", name, "unsupported_parameter")
    fields: dict[str, Any] = {
        name: getattr(body, name)
        for name in (
            "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "metadata", "user",
            "safety_identifier", "prompt_cache_key", "service_tier",
        )
    }  # fmt: skip
    fields["input"] = [item for i, m in enumerate(body.messages) for item in _items(m, i)]
    fields["max_output_tokens"] = body.max_completion_tokens or body.max_tokens
    return ResponseRequest.model_validate(fields)


def _items(message: ChatMessage, index: int) -> list[dict[str, Any]]:
    """The items of one message."""
    content = message.content
    parts = [ChatPart(type="text", text=content)] if isinstance(content, str) else content or []
    for j, part in enumerate(parts):
        if part.type not in ("text", "refusal"):
            where = f"messages[{index}].content[{j}]"
            raise bad(
                f"this model takes text only: leave out {where}", where, "unsupported_content"
            )
    texts = [{"type": "text", "text": part.text or part.refusal or ""} for part in parts]
    if message.role == "tool":
        if not message.tool_call_id:
            where = f"messages[{index}].tool_call_id"
            raise bad(f"{where} is missing: name the call that this answers", where)
        text = "\n".join(part["text"] for part in texts)
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": text}]
    items: list[dict[str, Any]] = []
    if message.reasoning_content:
        thought = {"type": "reasoning_text", "text": message.reasoning_content}
        items.append({"type": "reasoning", "content": [thought]})
    calls = message.tool_calls or []
    if texts or not calls:
        items.append({"type": "message", "role": message.role, "content": texts})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": call.function.arguments,
        }
        for call in calls
    ]
    return items


def completion(made: dict[str, Any]) -> dict[str, Any]:
    """A chat.completion of an ended response."""
    text = "".join(
        part.get("text", "")
        for item in made["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None, "annotations": []},
        "logprobs": None,
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
    return _FINISH.get((made["incomplete_details"] or {}).get("reason", ""), "stop")


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
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def _chunks(
    backend: Backend, response: str, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent chat.completion.chunk objects; empty ones while nothing else comes."""
    base: dict[str, Any] = {}
    async with contextlib.aclosing(follow(backend, response)) as events:
        async for event in events:
            if event is None:
                if base:
                    yield _sse(_delta(base, {}))
            elif event["type"] == "response.created":
                base = _frame(event["response"], "chat.completion.chunk")
                yield _sse(_delta(base, {"role": "assistant", "content": ""}))
            elif event["type"] == "response.output_text.delta":
                if event["delta"]:
                    yield _sse(_delta(base, {"content": event["delta"]}))
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
    base: dict[str, Any], delta: dict[str, Any], finish: str | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
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
