"""Event streams to clients: one reader for all of them, each able to begin anywhere in its log.

A follower gets everything that its response has logged and then what comes, in order, without a
gap or a repeat. One task reads the logs of all followed responses over one connection, however
many clients there are; a client that reads too slowly is served from the log again, not from
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

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
_BLOCK_MS = 1000


class LogLost(Exception):
    """The log cannot be followed to its end: Redis stayed away, or the log has expired."""


class _Follower:
    __slots__ = ("lagging", "ready", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Event] = deque()
        self.ready = asyncio.Event()
        self.lagging = False

    def push(self, new: list[Event]) -> None:
        if len(self.waiting) + len(new) > BACKLOG:
            self.waiting.clear()
            self.lagging = True
        if not self.lagging:
            self.waiting.extend(new)
        self.ready.set()


class EventHub:
    """Reads the logs of all followed responses. Lives in one event loop."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._followers: dict[str, set[_Follower]] = {}
        self._at: dict[str, str] = {}
        # A stream of our own: an entry in it ends a blocking read, so that a new log is watched.
        self._bell = f"tandem:api:{secrets.token_hex(8)}"
        self._bell_at = "0-0"
        self._some = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._up_at = time.monotonic()

    def start(self) -> None:
        """Begin to read; call inside the event loop."""
        self._task = asyncio.create_task(self._run(), name="event-hub")

    async def stop(self) -> None:
        """Stop reading; followers that are left end with LogLost."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(RedisError, OSError):
            await self._client.delete(self._bell)

    async def follow(self, response: str, after: int = -1) -> AsyncGenerator[Event | None, None]:
        """Events with a number above `after`, to the terminal one; None after 10 s of silence.

        Raises LogLost where the log is gone or Redis stays away.
        """
        me = _Follower()
        try:
            await self._join(response, me)
            while True:
                async for event in self._history(response, after):
                    after = event.seq
                    yield event
                    if events.is_terminal(event.data):
                        return
                while not me.lagging:
                    while me.waiting:
                        event = me.waiting.popleft()
                        if event.seq <= after:
                            continue
                        after = event.seq
                        yield event
                        if events.is_terminal(event.data):
                            return
                    me.ready.clear()
                    if me.lagging or me.waiting:
                        continue
                    try:
                        await asyncio.wait_for(me.ready.wait(), KEEP_ALIVE)
                    except TimeoutError:
                        await self._check(response)
                        yield None
                me.lagging = False
        except (RedisError, OSError) as error:
            raise LogLost(f"Redis cannot be reached ({type(error).__name__})") from error
        finally:
            self._leave(response, me)

    async def _join(self, response: str, me: _Follower) -> None:
        name = events.key(response)
        group = self._followers.setdefault(name, set())
        group.add(me)
        if name not in self._at:
            newest: Any = await self._client.xrevrange(name, count=1)
            self._at.setdefault(name, newest[0][0].decode() if newest else "0-0")
            self._some.set()
            pipe = self._client.pipeline(transaction=False)
            pipe.xadd(self._bell, {"b": b""}, maxlen=1)
            pipe.expire(self._bell, 3600)
            await pipe.execute()

    def _leave(self, response: str, me: _Follower) -> None:
        name = events.key(response)
        group = self._followers.get(name)
        if group is not None:
            group.discard(me)
            if not group:
                del self._followers[name]
                self._at.pop(name, None)

    async def _history(self, response: str, after: int) -> AsyncIterator[Event]:
        while batch := await events.aread(self._client, response, after, count=1000):
            for event in batch:
                yield event
            after = batch[-1].seq

    async def _check(self, response: str) -> None:
        try:
            if await self._client.exists(events.key(response)):
                return
        except (RedisError, OSError):
            if time.monotonic() - self._up_at > LOST_AFTER:
                raise
            return
        raise LogLost("the event log has expired or was deleted")

    async def _run(self) -> None:
        while True:
            if not self._at:
                self._some.clear()
                self._up_at = time.monotonic()
                await self._some.wait()
            names: dict[Any, Any] = dict(self._at)
            names[self._bell] = self._bell_at
            try:
                answer: Any = await self._client.xread(names, block=_BLOCK_MS, count=1000)
                self._up_at = time.monotonic()
            except (RedisError, OSError) as error:
                log.warning("event logs cannot be read: %s; trying again", error)
                await asyncio.sleep(0.25)
                continue
            for raw_name, entries in answer or ():
                self._deliver(raw_name.decode(), entries)

    def _deliver(self, name: str, entries: list[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        last = entries[-1][0].decode()
        if name == self._bell:
            self._bell_at = last
            return
        if name not in self._at:
            return
        self._at[name] = last
        new = [Event(int(i.split(b"-")[0]) - 1, unpack(fields[b"e"])) for i, fields in entries]
        for follower in self._followers.get(name, ()):
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
