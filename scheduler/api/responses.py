"""Routes of /v1/responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler.api import compaction, explained
from scheduler.api.backend import Backend
from scheduler.api.bodies import BodyRoute, in_turn
from scheduler.api.caller import current
from scheduler.api.clients import Client
from scheduler.api.faults import Fault, bad
from scheduler.api.frames import COMMENT, EventFrames, frame
from scheduler.api.intake import accept, count_tokens
from scheduler.api.lane import Lane
from scheduler.api.lookup import Order, find_job, input_items, page
from scheduler.api.schema import ResponseRequest
from scheduler.api.sessions import session_of
from scheduler.api.stream import EventStream
from scheduler.api.view import response_object
from scheduler.delivery import attend, follow, look_up, wait
from scheduler.record import LIVE, Job

ResponseId = Annotated[str, Path(max_length=256)]
CANCEL_WAIT = 3.0
"""Seconds that a cancel waits for the worker to stop before it answers."""


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/responses", route_class=BodyRoute, tags=["responses"])

    @routes.post("")
    async def create_response(
        request: Request,
        body: ResponseRequest,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    ) -> Response:
        session = session_of(request.headers, body)
        accepted = await in_turn(request, accept, backend, body, idempotency_key, session=session)
        headers = {"x-request-id": accepted.id}
        if body.stream:
            client = None if body.background else Client(accepted.id, accepted.client)
            return _stream(backend, accepted.id, client, headers=headers)
        if not body.background:
            await wait(backend, Client(accepted.id, accepted.client), request)
        return JSONResponse(await _object(backend, accepted.id), headers=headers)

    @routes.get("")
    def list_responses(
        status: Literal["live", "queued", "prefilling", "handing_off", "decoding", "completed",
                        "incomplete", "failed", "cancelled"] | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> dict[str, Any]:  # fmt: skip
        """An extension: responses by Tandem's own stages, newest first, without their output."""
        states = LIVE if status == "live" else None if status is None else (status,)
        caller = current()
        jobs = backend.jobs.list(states, limit, owner=caller.owner if caller.scoped else None)
        waiting = {job.queue for job in jobs if not job.ended and not job.run}
        places = {r: f for queue in waiting for r, f in backend.jobs.forecast(queue).items()}
        data = [{**response_object(job, places.get(job.id)), "output": []} for job in jobs]
        return {"object": "list", "data": data}

    @routes.post("/input_tokens")
    def count_input_tokens(body: ResponseRequest) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": count_tokens(backend, body)}

    compaction.add_to(routes, backend)

    @routes.get("/{response_id}")
    async def retrieve_response(
        response_id: ResponseId,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        if stream:
            job = await look_up(backend, response_id)
            return _stream(backend, job.id, await attend(backend, job), starting_after, job)
        return JSONResponse(await _object(backend, response_id))

    @routes.post("/{response_id}/cancel")
    async def cancel_response(
        response_id: ResponseId,
        force: Annotated[bool, Query(description="extension: foreground ones too")] = False,
    ) -> JSONResponse:
        job = await run_in_threadpool(find_job, backend, response_id)
        if not job.ended:
            if not job.background and not force:
                raise bad(
                    "only background responses can be cancelled: to stop this one, close the "
                    "connection that waits for it",
                    "response_id",
                )
            await run_in_threadpool(backend.jobs.cancel, response_id)
            backend.note("cancel", response_id)
            with contextlib.suppress(TimeoutError):
                await run_in_threadpool(backend.jobs.wait, response_id, CANCEL_WAIT)
        return JSONResponse(await _object(backend, response_id))

    @routes.delete("/{response_id}")
    def delete_response(response_id: ResponseId) -> dict[str, Any]:
        job = find_job(backend, response_id)
        if not job.ended:
            raise Fault(
                409,
                f"{response_id} is still {job.status}: cancel it first",
                code="response_in_progress",
                retry=False,
            )
        backend.delete(job)
        backend.note("delete", response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    @routes.get("/{response_id}/input_items")
    def list_input_items(
        response_id: ResponseId,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        job = find_job(backend, response_id)
        return page(input_items(backend, job), limit, order, after)

    explained.add(routes, backend)
    return routes


async def _object(backend: Backend, response: str) -> dict[str, Any]:
    """The response as it is now, with its place in the queue while it waits."""

    def look() -> dict[str, Any]:
        job = find_job(backend, response)
        waits = not job.ended and not job.run
        return response_object(job, backend.jobs.forecast_of(response) if waits else None)

    return await run_in_threadpool(look)


def _stream(
    backend: Backend,
    response: str,
    client: Client | None,
    after: int = -1,
    job: Job | None = None,
    headers: Mapping[str, str] | None = None,
) -> EventStream:
    """The events above `after`, for a client that may wait for the response's end."""
    lane = Lane()
    frames = _frames(backend, response, lane, client, after, job)
    during = backend.clients.serving(client) if client is not None else None
    return EventStream(frames, during=during, headers=headers, lane=lane)


async def _frames(
    backend: Backend,
    response: str,
    lane: Lane,
    client: Client | None,
    after: int,
    job: Job | None,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events; while nothing comes, how far the response is.

    Such a sign of life is in no log. It repeats the number of the event before it, so that a
    client that goes on from the last number it saw misses nothing and gets nothing twice.
    """
    job = job or await look_up(backend, response)
    number = after

    def say(new: list[bytes]) -> bytes:
        nonlocal number
        number += len(new)
        return b"".join(new)

    view = EventFrames(job)
    batches = follow(backend, job, view, after, lane, say, client)
    async with contextlib.aclosing(batches):
        async for new in batches:
            if new:
                yield say(new)
            elif number < 0:
                yield COMMENT
            else:
                yield frame(await _alive(backend, response, number))


async def _alive(backend: Backend, response: str, number: int) -> dict[str, Any]:
    made = await _object(backend, response)
    waits = made["status"] == "queued"
    done, total = made["tandem"]["prefill"]["done"], made["tandem"]["prefill"]["total"]
    return {
        "type": "response.queued" if waits else "response.in_progress",
        "sequence_number": number,
        "response": {**made, "output": []},
        "prefilled_percent": round(100 * done / max(1, total), 1),
    }
