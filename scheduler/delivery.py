"""Bringing a running response to its client: waiting for its end, following its events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

from anyio.to_thread import run_sync
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from scheduler import events
from scheduler.api.backend import Backend
from scheduler.api.faults import Fault
from scheduler.api.frames import EventFrames
from scheduler.api.lane import Lane
from scheduler.api.lookup import recent_job, stored_job
from scheduler.api.slices import Slice
from scheduler.api.stream import LogLost, gone
from scheduler.api.view import replayed
from scheduler.record import Job, JobError

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


async def look_up(backend: Backend, response: str) -> Job:
    """The job of a stream. Raises Fault 404 where there is none that the caller may see.

    A store may be slow: who needs it waits in another line than those whose job Redis has, such
    as every stream at its end.
    """
    job = await run_sync(recent_job, backend, response, limiter=backend.looking)
    if job is None:
        job = await run_sync(stored_job, backend, response, limiter=backend.asking)
    return job


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class View(Protocol[T_co]):
    """How a client is told of a response's events."""

    def render(self, seq: int, data: Mapping[str, Any], ended: Job | None = None) -> T_co:
        """The event numbered `seq`; `ended`: the job after its end, for a terminal event."""
        ...


def _nothing() -> None:
    """What some events mean to a client."""


def _told(view: View[T], new: list[events.Event], ended: Job | None) -> list[T]:
    """What a client is told of events, the last of them terminal where `ended` is given."""
    if ended is None and isinstance(view, EventFrames) and isinstance(new, Slice):
        return cast("list[T]", view.render_slice(new))
    last = new[-1].seq
    return [view.render(n, d, ended if n == last else None) for n, d in new]


async def follow(
    backend: Backend,
    job: Job,
    view: View[T],
    after: int = -1,
    lane: Lane | None = None,
    say: Callable[[list[T]], bytes] | None = None,
) -> AsyncGenerator[list[T], None]:
    """A response's events numbered above `after` as `view` renders them, to the response's end.

    All that are there at once; an empty list where nothing has come for a while. Where the log
    cannot be followed to its end, the last event is of type "error". What comes while the caller
    waits and `lane` is free goes there as `say` puts it, and not to the caller; a terminal event
    never does.
    """
    if not job.events:
        logged = list(enumerate(replayed(job)))
        told = [view.render(n, d, job if events.is_terminal(d) else None) for n, d in logged]
        yield told[after + 1 :]
        return
    seq = -1

    def straight(new: list[events.Event]) -> Callable[[], None] | None:
        nonlocal seq
        if lane is None or say is None or not lane.free or new[0].seq <= after:
            return None
        chunk = say([view.render(n, d) for n, d in new])
        seq = new[-1].seq
        return functools.partial(lane.write, chunk) if chunk else _nothing

    try:
        through = straight if lane else None
        hub = backend.hub.follow(job.id, straight=through, born=job.created_at)
        async with contextlib.aclosing(hub) as batches:
            async for new in batches:
                if not new:
                    yield []
                    continue
                ended, last = None, new[-1].seq
                if events.is_terminal(new[-1].data):
                    ended = job if job.ended else await look_up(backend, job.id)
                told = _told(view, new, ended)
                seq = last
                if after < new[0].seq:
                    yield told
                elif after < last:
                    yield told[after - last :]
    except (LogLost, Fault) as error:
        log.warning("the stream of %s ends early: %s", job.id, error)
        lost = {
            "type": "error",
            "code": "service_unavailable",
            "message": f"the stream cannot go on ({error}): retrieve {job.id} to see its end",
            "param": None,
        }
        yield [view.render(seq + 1, lost)]
