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
from starlette.requests import Request

from scheduler import events
from scheduler.api.backend import Backend
from scheduler.api.clients import Client
from scheduler.api.faults import Fault
from scheduler.api.frames import EventFrames
from scheduler.api.lane import Lane
from scheduler.api.lookup import recent_job, stored_job
from scheduler.api.slices import Slice
from scheduler.api.stream import LogLost, gone
from scheduler.api.view import replayed
from scheduler.record import Job
from scheduler.redis_client import AWAY

log = logging.getLogger("tandem.api")


async def wait(backend: Backend, client: Client, request: Request) -> None:
    """Return at the end of the response that the client waits for, or when the client has gone."""

    async def end() -> None:
        try:
            async for _ in backend.hub.follow(client.response):
                pass
        except LogLost as error:
            client.returns = True
            # It was accepted and may well be running: the client must not send it again by itself.
            raise Fault(
                503,
                f"{client.response} was accepted, but its end cannot be seen ({error}): retrieve "
                "it later",
                code="service_unavailable",
                retry=False,
            ) from error
        client.over = True

    ending = asyncio.create_task(end())
    leaving = asyncio.create_task(gone(request.receive))
    try:
        with backend.clients.serving(client):
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
    finally:
        for task in (ending, leaving):
            task.cancel()
        await asyncio.gather(ending, leaving, return_exceptions=True)


async def attend(backend: Backend, job: Job) -> Client | None:
    """Who follows a foreground response waits for it, like whoever began it; None: nobody need."""
    if job.background or job.ended:
        return None
    client = Client(job.id)
    # Where Redis is away, it is told when the lease is renewed.
    with contextlib.suppress(RedisError, *AWAY):
        here = [(client.response, client.name)]
        await run_sync(backend.jobs.attend, here, limiter=backend.looking)
    return client


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
    client: Client | None = None,
) -> AsyncGenerator[list[T], None]:
    """A response's events numbered above `after` as `view` renders them, to the response's end.

    All that are there at once; an empty list where nothing has come for a while. Where the log
    cannot be followed to its end, the last event is of type "error". What comes while the caller
    waits and `lane` is free goes there as `say` puts it, and not to the caller; a terminal event
    never does. `client`: waits for the response, and is told when that is over.
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
                    if client is not None:
                        client.over = True
                    ended = job if job.ended else await look_up(backend, job.id)
                told = _told(view, new, ended)
                seq = last
                if after < new[0].seq:
                    yield told
                elif after < last:
                    yield told[after - last :]
    except (LogLost, Fault) as error:
        log.warning("the stream of %s ends early: %s", job.id, error)
        if client is not None:
            client.returns = True
        lost = {
            "type": "error",
            "code": "service_unavailable",
            "message": f"the stream cannot go on ({error}): retrieve {job.id} to see its end",
            "param": None,
        }
        yield [view.render(seq + 1, lost)]
