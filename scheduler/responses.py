"""Routes of /v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler import events
from scheduler.backend import Backend
from scheduler.faults import Fault, bad
from scheduler.intake import accept
from scheduler.lookup import Order, find_job, page
from scheduler.record import LIVE, Job, JobError
from scheduler.schema import ResponseRequest
from scheduler.stream import COMMENT, EventStream, LogLost, frame, gone
from scheduler.view import EventView, replayed, response_object

log = logging.getLogger("tandem.api")

ResponseId = Annotated[str, Path(max_length=256)]
CANCEL_WAIT = 3.0
"""Seconds that a cancel waits for the worker to stop before it answers."""


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/responses", tags=["responses"])

    @routes.post("")
    async def create_response(
        request: Request,
        body: ResponseRequest,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    ) -> Response:
        accepted = await run_in_threadpool(accept, backend, body, idempotency_key)
        headers = {"x-request-id": accepted.id}
        if body.stream:
            stop = None if body.background else (lambda: _abandon(backend, accepted.id))
            return EventStream(_frames(backend, accepted.id), on_gone=stop, headers=headers)
        if not body.background:
            await _wait(backend, accepted.id, request)
        return JSONResponse(await _object(backend, accepted.id), headers=headers)

    @routes.get("")
    def list_responses(
        status: Literal["live", "queued", "prefilling", "handing_off", "decoding", "completed",
                        "incomplete", "failed", "cancelled"] | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> dict[str, Any]:  # fmt: skip
        """An extension: responses by Tandem's own stages, newest first, without their output."""
        states = LIVE if status == "live" else None if status is None else (status,)
        jobs = backend.jobs.list(states, limit)
        data = []
        for job in jobs:
            waits = not job.ended and not job.run
            shown = response_object(job, backend.jobs.position(job.id) if waits else None)
            data.append({**shown, "output": []})
        return {"object": "list", "data": data}

    @routes.get("/{response_id}")
    async def retrieve_response(
        response_id: ResponseId,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        job = await run_in_threadpool(find_job, backend, response_id)
        if stream:
            return EventStream(_frames(backend, job.id, starting_after))
        return JSONResponse(await _object(backend, response_id))

    @routes.post("/{response_id}/cancel")
    async def cancel_response(response_id: ResponseId) -> JSONResponse:
        job = await run_in_threadpool(find_job, backend, response_id)
        if not job.ended:
            if not job.background:
                raise bad(
                    "only background responses can be cancelled: to stop this one, close the "
                    "connection that waits for it",
                    "response_id",
                )
            await run_in_threadpool(backend.jobs.cancel, response_id)
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
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    @routes.get("/{response_id}/input_items")
    def list_input_items(
        response_id: ResponseId,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        job = find_job(backend, response_id)
        return page(job.request.get("input") or [], limit, order, after)

    return routes


async def _object(backend: Backend, response: str) -> dict[str, Any]:
    """The response as it is now, with its place in the queue while it waits."""

    def look() -> dict[str, Any]:
        job = find_job(backend, response)
        waiting = not job.ended and not job.run
        return response_object(job, backend.jobs.position(response) if waiting else None)

    return await run_in_threadpool(look)


async def _wait(backend: Backend, response: str, request: Request) -> None:
    """Return at the response's end; cancel it when the client goes away first."""

    async def end() -> None:
        async for _ in backend.hub.follow(response):
            pass

    ending = asyncio.create_task(end())
    leaving = asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await _abandon(backend, response)
        else:
            ending.result()
    except LogLost as error:
        # It was accepted and may well be running: the client must not send it again by itself.
        raise Fault(
            503,
            f"{response} was accepted, but its end cannot be seen ({error}): retrieve it later",
            code="service_unavailable",
            retry=False,
        ) from error
    finally:
        for task in (ending, leaving):
            task.cancel()
        await asyncio.gather(ending, leaving, return_exceptions=True)


async def _abandon(backend: Backend, response: str) -> None:
    """Stop the work for a foreground request whose client has gone."""
    log.info("the client of %s has gone: cancelling it", response)
    with contextlib.suppress(JobError, RedisError):
        await run_in_threadpool(backend.jobs.cancel, response)


async def _frames(backend: Backend, response: str, after: int = -1) -> AsyncGenerator[bytes, None]:
    """Server-sent events with numbers above `after`, to the response's end."""
    job = await run_in_threadpool(find_job, backend, response)
    view = EventView(job)
    if not job.events:
        for seq, data in enumerate(replayed(job)):
            rendered = view.render(seq, data, job if events.is_terminal(data) else None)
            if seq > after:
                yield frame(rendered)
        return
    seq = -1
    try:
        async for event in backend.hub.follow(response):
            if event is None:
                yield COMMENT
                continue
            seq, ended = event.seq, None
            if events.is_terminal(event.data):
                ended = await _ended(backend, response)
            rendered = view.render(seq, event.data, ended)
            if seq > after:
                yield frame(rendered)
    except LogLost as error:
        log.warning("the stream of %s ends early: %s", response, error)
        message = f"the stream cannot go on ({error}): retrieve {response} to see how it ended"
        yield frame(
            {
                "type": "error",
                "sequence_number": seq + 1,
                "code": "service_unavailable",
                "message": message,
                "param": None,
            }
        )


async def _ended(backend: Backend, response: str) -> Job:
    return await run_in_threadpool(find_job, backend, response)
