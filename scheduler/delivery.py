"""Bringing a running response to its client: waiting for its end, following its events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from scheduler import events
from scheduler.api.backend import Backend
from scheduler.api.faults import Fault
from scheduler.api.lookup import find_job
from scheduler.api.stream import LogLost, gone
from scheduler.api.view import EventView, replayed
from scheduler.record import JobError

log = logging.getLogger("tandem.api")


async def wait(backend: Backend, response: str, request: Request) -> None:
    """Return at the response's end; give it up when the client goes away first."""

    async def end() -> None:
        async for _ in backend.hub.follow(response):
            pass

    ending = asyncio.create_task(end())
    leaving = asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await abandon(backend, response)
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


async def abandon(backend: Backend, response: str) -> None:
    """The client of a foreground request has gone: stop, unless it soon asks for the same again."""
    log.info("the client of %s has gone", response)
    with contextlib.suppress(JobError, RedisError):
        await run_in_threadpool(backend.jobs.abandon, response)


async def follow(
    backend: Backend, response: str, after: int = -1
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """A response's events numbered above `after`, in OpenAI's shape, to its end.

    None where nothing has come for a while. Where the log cannot be followed to its end, the last
    event is of type "error".
    """
    job = await run_in_threadpool(find_job, backend, response)
    view = EventView(job)
    if not job.events:
        for seq, data in enumerate(replayed(job)):
            rendered = view.render(seq, data, job if events.is_terminal(data) else None)
            if seq > after:
                yield rendered
        return
    seq = -1
    try:
        async with contextlib.aclosing(backend.hub.follow(response)) as logged:
            async for event in logged:
                if event is None:
                    yield None
                    continue
                seq, ended = event.seq, None
                if events.is_terminal(event.data):
                    ended = await run_in_threadpool(find_job, backend, response)
                rendered = view.render(seq, event.data, ended)
                if seq > after:
                    yield rendered
    except (LogLost, Fault) as error:
        log.warning("the stream of %s ends early: %s", response, error)
        yield {
            "type": "error",
            "sequence_number": seq + 1,
            "code": "service_unavailable",
            "message": f"the stream cannot go on ({error}): retrieve {response} to see its end",
            "param": None,
        }
