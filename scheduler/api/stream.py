"""Event streams to clients: one reader for all of them, each able to begin anywhere in its log.

A follower gets everything that its response has logged and then what comes, in order, without a
gap or a repeat. One connection hears the events of all responses, however many clients there
are; a client that reads too slowly is served from the log again, not from memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgpack
import redis.asyncio
from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler import events
from scheduler.events import Event
from scheduler.serializer import unpack

log = logging.getLogger("tandem.api")

KEEP_ALIVE = 10.0
"""Seconds of silence after which a comment keeps a connection alive."""
LOST_AFTER = 30.0
"""Seconds without Redis after which a follower gives up."""
BACKLOG = 2000
"""Events kept in memory for one follower before it is sent back to the log."""
CHANNEL = "tandem:live"
LISTEN_WITHIN = 5.0
"""Seconds to wait for the connection that hears events, before reading the log without it."""
RETRY_EVERY = 0.25


class LogLost(Exception):
    """The log cannot be followed to its end: Redis stayed away, or the log has expired."""


class _Follower:
    """What one client is still to be told. A future of its own wakes it: no timer, no task."""

    __slots__ = ("behind", "heard", "sleeper", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Event] = deque()
        self.sleeper: asyncio.Future[None] | None = None
        self.behind = False  # the log has something that `waiting` has not
        self.heard = time.monotonic()

    def push(self, new: list[Event]) -> None:
        if len(self.waiting) + len(new) > BACKLOG:
            self.waiting.clear()
            self.behind = True
        if not self.behind:
            self.waiting.extend(new)
        self.wake()

    def wake(self) -> None:
        if self.sleeper is not None and not self.sleeper.done():
            self.sleeper.set_result(None)

    async def sleep(self) -> None:
        """Until there is something new, or nothing for long."""
        self.heard = time.monotonic()
        self.sleeper = asyncio.get_running_loop().create_future()
        try:
            await self.sleeper
        finally:
            self.sleeper = None


class EventHub:
    """Hears the events of all responses over one connection. Lives in one event loop.

    Events are published in the step that logs them. The log is the truth: a follower reads it
    first, reads on from it where a number is missing, after a lost connection and after silence.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._followers: dict[bytes, set[_Follower]] = {}
        self._wanted = asyncio.Event()
        self._hearing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._up_at = time.monotonic()

    def start(self) -> None:
        """Begin; call inside the event loop."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._rouse())]

    async def stop(self) -> None:
        """Stop hearing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def follow(self, response: str, after: int = -1) -> AsyncGenerator[Event | None, None]:
        """Events with a number above `after`, to the terminal one; None after 10 s of silence.

        Raises LogLost where the log is gone or Redis stays away.
        """
        me = _Follower()
        self._followers.setdefault(response.encode(), set()).add(me)
        self._wanted.set()
        try:
            # What is logged before we hear is read below; a server that stays away is found there.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hearing.wait(), LISTEN_WITHIN)
            me.behind = True
            while True:
                if me.behind:
                    me.behind = False
                    async for event in self._logged(response, after):
                        after = event.seq
                        yield event
                        if events.is_terminal(event.data):
                            return
                elif me.waiting:
                    event = me.waiting.popleft()
                    if event.seq > after + 1:
                        me.behind = True
                    elif event.seq == after + 1:
                        after = event.seq
                        yield event
                        if events.is_terminal(event.data):
                            return
                else:
                    await me.sleep()
                    if not me.waiting and not me.behind:
                        await self._check(response)
                        me.behind = True
                        yield None
        except (RedisError, OSError) as error:
            raise LogLost(f"Redis cannot be reached ({type(error).__name__})") from error
        finally:
            self._leave(response.encode(), me)

    def _leave(self, name: bytes, me: _Follower) -> None:
        group = self._followers.get(name)
        if group is not None:
            group.discard(me)
            if not group:
                del self._followers[name]
        if not self._followers:
            self._wanted.clear()

    async def _logged(self, response: str, after: int) -> AsyncIterator[Event]:
        """The log from an event on; waits out a short absence of Redis."""
        while True:
            try:
                batch = await events.aread(self._client, response, after, count=1000)
            except (RedisError, OSError):
                if time.monotonic() - self._up_at > LOST_AFTER:
                    raise
                await asyncio.sleep(RETRY_EVERY)
                continue
            if not batch:
                return
            for event in batch:
                yield event
            after = batch[-1].seq

    async def _check(self, response: str) -> None:
        with contextlib.suppress(RedisError, OSError):
            if not await self._client.exists(events.key(response)):
                raise LogLost("the event log has expired or was deleted")

    async def _run(self) -> None:
        """Hear while anybody follows; connect again whenever the connection is lost."""
        while True:
            await self._wanted.wait()
            pubsub = self._client.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(CHANNEL)
                self._up_at = time.monotonic()
                self._hearing.set()
                # Whatever was said while nobody listened is in the logs.
                for group in self._followers.values():
                    for follower in group:
                        follower.behind = True
                        follower.wake()
                while self._wanted.is_set():
                    message = await pubsub.get_message(timeout=1.0)
                    self._up_at = time.monotonic()
                    if message is not None:
                        self._deliver(message["data"])
            except (RedisError, OSError) as error:
                log.warning("events cannot be heard: %s; trying again", error)
                await asyncio.sleep(RETRY_EVERY)
            finally:
                self._hearing.clear()
                with contextlib.suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]  # redis has no types here

    async def _rouse(self) -> None:
        """Wake those who have heard nothing for long, by the wall clock."""
        while True:
            await asyncio.sleep(KEEP_ALIVE / 10)
            late = time.monotonic() - KEEP_ALIVE
            for group in self._followers.values():
                for follower in group:
                    if follower.heard < late:
                        follower.wake()

    def _deliver(self, data: bytes) -> None:
        # The scripts' packer knows bytes only.
        for name, first, packed in msgpack.unpackb(data, raw=True):
            group = self._followers.get(name)
            if group:
                new = [Event(first + i, unpack(event)) for i, event in enumerate(packed)]
                for follower in group:
                    follower.push(new)


def frame(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode("utf-8", "replace")


COMMENT = b": keep-alive\n\n"


class EventStream(Response):
    """An answer that sends chunks as they come and notices when the client has gone.

    `on_gone` is called once when the client leaves before the end.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        on_gone: Callable[[], Awaitable[None]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._chunks = chunks
        self._on_gone = on_gone
        self.status_code = 200
        self.background = None
        # Proxies must neither keep nor gather events.
        fixed = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
        self.media_type = "text/event-stream"
        self.init_headers({**fixed, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            elif self._on_gone is not None:
                await self._on_gone()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
