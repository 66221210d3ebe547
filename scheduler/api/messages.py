"""Routes of /v1/messages, in Anthropic's shapes; as stateless for the client as chat is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler import events
from scheduler.api.backend import Backend
from scheduler.api.bodies import BodyRoute, in_turn
from scheduler.api.clients import Client
from scheduler.api.faults import ANTHROPIC, Fault
from scheduler.api.frames import frame
from scheduler.api.intake import accept, count_tokens
from scheduler.api.items import output_items
from scheduler.api.lane import Lane
from scheduler.api.lookup import find_job
from scheduler.api.message_requests import CountRequest, MessagesRequest, to_response_request
from scheduler.api.sessions import session_of
from scheduler.api.stream import EventStream
from scheduler.api.view import EventView, facts, response_object
from scheduler.delivery import follow, look_up, wait
from scheduler.record import Accepted, Job

_PING = frame({"type": "ping"})


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix=ANTHROPIC, route_class=BodyRoute, tags=["messages"])

    @routes.post("")
    async def create_message(
        request: Request,
        body: MessagesRequest,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    ) -> Response:
        def accepting() -> Accepted:
            wanted = to_response_request(body)
            session = session_of(request.headers, wanted)
            return accept(backend, wanted, idempotency_key, session=session)

        accepted = await in_turn(request, accepting)
        headers = {"request-id": accepted.id}
        client = Client(accepted.id, accepted.client)
        stops = body.stop_sequences or []
        shown = body.thinking is None or body.thinking.display != "omitted"
        if body.stream:
            lane = Lane()
            return EventStream(
                _events(backend, client, stops, shown, lane),
                during=backend.clients.serving(client),
                headers=headers,
                lane=lane,
            )
        await wait(backend, client, request)
        job = await run_in_threadpool(find_job, backend, accepted.id)
        if job.status == "failed":
            made = response_object(job)
            # It ran and failed: the same request would fail again, at the same cost.
            raise Fault(500, made["error"]["message"], retry=False)
        reason, stop = await run_in_threadpool(_stop, backend, job, stops)
        message = _message(job) | {
            "content": content(output_items(job.id, job.output, job.status), shown=shown),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(job),
            "tandem": facts(job) | {"response": job.id},
        }
        return JSONResponse(message, headers=headers)

    @routes.post("/count_tokens")
    def count(body: CountRequest) -> dict[str, int]:
        return {"input_tokens": count_tokens(backend, to_response_request(body))}

    return routes


def content(items: Sequence[dict[str, Any]], *, shown: bool = True) -> list[dict[str, Any]]:
    """Output items as blocks of content; texts that say nothing are left out.

    Unless `shown`, thoughts are empty. A thought's signature names the answer that it belongs to.
    """
    blocks: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "function_call":
            call = {"id": item["call_id"], "name": item["name"], "input": _arguments(item)}
            blocks.append({"type": "tool_use", **call})
            continue
        for part in item.get("content") or ():
            if text := part.get("text"):
                thought = {"thinking": text if shown else "", "signature": item["id"]}
                blocks.append(
                    {"type": "thinking", **thought}
                    if item["type"] == "reasoning"
                    else {"type": "text", "text": text}
                )
    return blocks


def _arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as an object; text that is none is passed on under a name."""
    try:
        value = json.loads(item["arguments"] or "{}")
    except (ValueError, RecursionError):
        value = item["arguments"]
    return value if isinstance(value, dict) else {"arguments": value}


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


def _usage(job: Job) -> dict[str, Any]:
    """Token counts; here, unlike elsewhere, cached tokens are not among the input tokens."""
    told = job.usage or {}
    cached = int(told.get("cached_tokens", 0 if job.ended else job.held_tokens))
    return {
        "input_tokens": max(0, job.prompt_tokens - cached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": int(told.get("output_tokens", 0)),
        "output_tokens_details": {"thinking_tokens": int(told.get("reasoning_tokens", 0))},
    }


def _stop(backend: Backend, job: Job, stops: Sequence[str]) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) of an ended job. Blocking: may read its event log."""
    if job.status == "incomplete":
        return "max_tokens", None
    items = output_items(job.id, job.output, job.status)
    if any(item["type"] == "function_call" for item in items):
        return "tool_use", None
    if not stops:
        return "end_turn", None
    ids = events.replay(backend.redis, job.id).ids
    if not ids or ids[-1] in backend.tokenizer.eos_ids:
        return "end_turn", None
    text = backend.tokenizer.decode(ids)
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return ("stop_sequence", min(found)[1]) if found else ("end_turn", None)


async def _events(
    backend: Backend, client: Client, stops: Sequence[str], shown: bool, lane: Lane
) -> AsyncGenerator[bytes, None]:
    """Anthropic's server-sent events; pings while nothing else comes."""
    job = await look_up(backend, client.response)
    yield frame({"type": "message_start", "message": _message(job)}) + _PING
    blocks = _Blocks(shown)

    def say(new: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(frame(block) for event in new for block in blocks.tell(event))

    batches = follow(backend, job, EventView(job), lane=lane, say=say, client=client)
    async with contextlib.aclosing(batches):
        async for new in batches:
            told = [] if new else [_PING]
            for event in new:
                kind = event["type"]
                if kind in ("response.completed", "response.incomplete"):
                    told += map(frame, blocks.close())
                    ended = await look_up(backend, client.response)
                    reason, stop = await run_in_threadpool(_stop, backend, ended, stops)
                    delta = {"stop_reason": reason, "stop_sequence": stop}
                    last = {"type": "message_delta", "delta": delta, "usage": _usage(ended)}
                    told += [frame(last), frame({"type": "message_stop"})]
                elif kind == "response.failed":
                    error = Fault(500, event["response"]["error"]["message"])
                    told.append(frame(error.body(ANTHROPIC)))
                elif kind == "error":
                    told.append(frame(Fault(503, event["message"]).body(ANTHROPIC)))
                else:
                    told += map(frame, blocks.tell(event))
            if told:
                yield b"".join(told)


class _Blocks:
    """Blocks of content, one after another, from the events of a response."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._index = -1
        self._kind = ""
        self._signature = ""

    def tell(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What an event means here; mostly nothing or one delta."""
        kind = event["type"]
        if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            item = event["item"]
            block = {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": {}}
            return self._begin("tool_use", block)
        if kind == "response.function_call_arguments.delta":
            return [self._delta({"type": "input_json_delta", "partial_json": event["delta"]})]
        if kind == "response.output_text.delta" and event["delta"]:
            begun = self._begin("text", {"type": "text", "text": ""})
            return [*begun, self._delta({"type": "text_delta", "text": event["delta"]})]
        if kind == "response.reasoning_text.delta" and event["delta"]:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            begun = self._begin("thinking", empty)
            self._signature = event["item_id"]
            if not self._shown:
                return begun
            return [*begun, self._delta({"type": "thinking_delta", "thinking": event["delta"]})]
        if kind == "response.output_item.done":
            return self.close()
        return []

    def close(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if not self._kind:
            return []
        stop = {"type": "content_block_stop", "index": self._index}
        signed = self._kind == "thinking"
        self._kind = ""
        if not signed:
            return [stop]
        return [self._delta({"type": "signature_delta", "signature": self._signature}), stop]

    def _begin(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self._kind == kind != "tool_use":
            return []
        ended = self.close()
        self._kind = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, start]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
