"""Routes of /v1/messages, in Anthropic's shapes; as stateless for the client as chat is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler import events
from scheduler.backend import Backend
from scheduler.delivery import abandon, follow, wait
from scheduler.faults import ANTHROPIC, Fault, bad
from scheduler.intake import accept, count_tokens
from scheduler.lookup import find_job
from scheduler.record import Job
from scheduler.schema import MAX_IDS, Name, ResponseRequest, Shape, Text
from scheduler.stream import EventStream, frame
from scheduler.view import response_object

_MEDIA = ("image", "document", "file", "container_upload")


class Block(Shape):
    """A block of content; which fields count depends on its type."""

    type: Name
    text: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Any = None
    thinking: Text | None = None


def _kind(value: Any) -> str:
    return "«text»" if isinstance(value, str) else "«blocks»"


Blocks = Annotated[
    Annotated[Text, Tag("«text»")]
    | Annotated[list[Block], Field(max_length=MAX_IDS), Tag("«blocks»")],
    Discriminator(_kind),
]


class AnthropicMessage(Shape):
    """One message."""

    role: Literal["user", "assistant"]
    content: Blocks


class Sender(Shape):
    """Who asks."""

    user_id: Name | None = None


class CountRequest(Shape):
    """Body of POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_IDS)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]] | None, Field(max_length=16)
    ] = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    metadata: Sender | None = None
    service_tier: Name | None = None


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix=ANTHROPIC, tags=["messages"])

    @routes.post("")
    async def create_message(request: Request, body: MessagesRequest) -> Response:
        accepted = await run_in_threadpool(accept, backend, to_response_request(body))
        headers = {"request-id": accepted.id}
        stops = body.stop_sequences or []
        if body.stream:
            return EventStream(
                _events(backend, accepted.id, stops),
                on_gone=lambda: abandon(backend, accepted.id),
                headers=headers,
            )
        await wait(backend, accepted.id, request)
        job = await run_in_threadpool(find_job, backend, accepted.id)
        if job.status == "failed":
            made = response_object(job)
            # It ran and failed: the same request would fail again, at the same cost.
            raise Fault(500, made["error"]["message"], retry=False)
        reason, stop = await run_in_threadpool(_stop, backend, job, stops)
        text = str((job.output or {}).get("text", ""))
        message = _message(job) | {
            "content": [{"type": "text", "text": text}] if text else [],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(job),
        }
        return JSONResponse(message, headers=headers)

    @routes.post("/count_tokens")
    def count(body: CountRequest) -> dict[str, int]:
        return {"input_tokens": count_tokens(backend, to_response_request(body))}

    return routes


def to_response_request(body: CountRequest) -> ResponseRequest:
    """The same request in the terms of the Responses API. Raises Fault for what is not served."""
    if body.tools and (body.tool_choice or {}).get("type") != "none":
        raise bad("tools are not supported: leave them out", "tools", "unsupported_parameter")
    if body.messages[-1].role != "user":
        raise bad("the last message must be the user's: an answer cannot be begun for the model")
    items: list[dict[str, Any]] = []
    for index, message in enumerate(body.messages):
        items += _items(message, f"messages.{index}")
    fields: dict[str, Any] = {
        "model": body.model,
        "input": items,
        "instructions": "\n\n".join(_texts(body.system, "system")) or None,
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_output_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": body.metadata.user_id if body.metadata else None,
        }
    return ResponseRequest.model_validate(fields)


def _texts(content: str | Sequence[Block] | None, where: str) -> list[str]:
    """The text blocks of a content."""
    if isinstance(content, str):
        return [content] if content else []
    texts: list[str] = []
    for index, block in enumerate(content or []):
        if block.type in _MEDIA:
            raise bad(
                f"{where}.content.{index}: this model takes text only: leave out the {block.type}",
                code="unsupported_content",
            )
        if block.type == "text":
            texts.append(block.text or "")
    return texts


def _items(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """The items of one message; texts next to each other are one message."""
    items: list[dict[str, Any]] = []
    said = {"type": "message", "role": message.role}
    if isinstance(message.content, str):
        return [{**said, "content": message.content}]
    texts: list[dict[str, str]] = []

    def close() -> None:
        if texts:
            items.append({**said, "content": list(texts)})
            texts.clear()

    for index, block in enumerate(message.content):
        at = f"{where}.content.{index}"
        if block.type == "tool_use":
            close()
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            call = {"call_id": _need(block.id, at, "id"), "name": _need(block.name, at, "name")}
            items.append({"type": "function_call", "arguments": arguments, **call})
        elif block.type == "tool_result":
            close()
            call_id = _need(block.tool_use_id, at, "tool_use_id")
            output = _result(block.content, at)
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        elif block.type == "thinking":
            close()
            thought = {"type": "reasoning_text", "text": block.thinking or ""}
            items.append({"type": "reasoning", "content": [thought]})
        else:
            texts += [{"type": "text", "text": text} for text in _texts([block], at)]
    close()
    return items


def _result(content: Any, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad(f"{where}.content: a string or a list of blocks is needed")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{where}.content: this model takes text only", code="unsupported_content")
    return "\n".join(part["text"] for part in content)


def _need(value: str | None, where: str, name: str) -> str:
    if not value:
        raise bad(f"{where}.{name} is missing")
    return value


def _message(job: Job) -> dict[str, Any]:
    return {
        "id": "msg_" + job.id.removeprefix("resp_"),
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(job),
    }


def _usage(job: Job) -> dict[str, int]:
    """Token counts; here, unlike elsewhere, cached tokens are not among the input tokens."""
    told = job.usage or {}
    cached = int(told.get("cached_tokens", 0 if job.ended else job.held_tokens))
    return {
        "input_tokens": max(0, job.prompt_tokens - cached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": int(told.get("output_tokens", 0)),
    }


def _stop(backend: Backend, job: Job, stops: Sequence[str]) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) of an ended job. Blocking: may read its event log."""
    if job.status == "incomplete":
        return "max_tokens", None
    if not stops:
        return "end_turn", None
    ids = events.replay(backend.redis, job.id).ids
    if not ids or ids[-1] in backend.tokenizer.eos_ids:
        return "end_turn", None
    text = backend.tokenizer.decode(ids)
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return ("stop_sequence", min(found)[1]) if found else ("end_turn", None)


async def _events(
    backend: Backend, response: str, stops: Sequence[str]
) -> AsyncGenerator[bytes, None]:
    """Anthropic's server-sent events; pings while nothing else comes."""
    job = await run_in_threadpool(find_job, backend, response)
    yield frame({"type": "message_start", "message": _message(job)})
    yield frame({"type": "ping"})
    is_open = False
    async with contextlib.aclosing(follow(backend, response)) as followed:
        async for event in followed:
            kind = "ping" if event is None else event["type"]
            if kind == "ping":
                yield frame({"type": "ping"})
            elif event is None:
                continue
            elif kind == "response.output_text.delta" and event["delta"]:
                if not is_open:
                    is_open = True
                    block = {"type": "text", "text": ""}
                    start = {"type": "content_block_start", "index": 0, "content_block": block}
                    yield frame(start)
                delta = {"type": "text_delta", "text": event["delta"]}
                yield frame({"type": "content_block_delta", "index": 0, "delta": delta})
            elif kind in ("response.completed", "response.incomplete"):
                if is_open:
                    yield frame({"type": "content_block_stop", "index": 0})
                job = await run_in_threadpool(find_job, backend, response)
                reason, stop = await run_in_threadpool(_stop, backend, job, stops)
                ended = {"stop_reason": reason, "stop_sequence": stop}
                yield frame({"type": "message_delta", "delta": ended, "usage": _usage(job)})
                yield frame({"type": "message_stop"})
            elif kind == "response.failed":
                error = Fault(500, event["response"]["error"]["message"])
                yield frame(error.body(ANTHROPIC))
            elif kind == "error":
                yield frame(Fault(503, event["message"]).body(ANTHROPIC))
