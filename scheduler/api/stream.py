"""Event streams to clients: one reader for all of them, each able to begin anywhere in its log.

A follower gets everything that its response has logged and then what comes, in order, without a
gap or a repeat. One connection hears the events of all responses, however many clients there
are; a client that reads too slowly is served from the log again, not from memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager

import msgpack
import redis.asyncio
from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler import events
from scheduler.api.lane import Lane, body
from scheduler.api.slices import Slice, Slices
from scheduler.api.wire import Wire
from scheduler.events import Event
from scheduler.redis_client import subscription

log = logging.getLogger("tandem.api")

KEEP_ALIVE = 10.0
"""Seconds of silence after which a comment keeps a connection alive."""
LOST_AFTER = 30.0
"""Seconds without Redis after which a follower gives up."""
BACKLOG = 2000
"""Events kept in memory for one follower before it is sent back to the log."""
AT_ONCE = 200
"""Events read from a log at once: others wait while they are decoded and written."""
READERS = 8
"""Logs that are read at the same time, and pieces of them that are told in one round of the loop:
however many clients read a log from its beginning, the others are served in between."""
TOGETHER = 8
"""Clients that are written to in one go: each write may wake one on this very processor, and who
still has work to do between two writes gives way to one after another. Not all of a step at once:
on other processors the first read while the next events are put into words."""
CHANNEL = "tandem:live"
LISTEN_WITHIN = 5.0
"""Seconds to wait for the connection that hears events, before reading the log without it."""
RETRY_EVERY = 0.25


class LogLost(Exception):
    """The log cannot be followed to its end: Redis stayed away, or the log has expired."""


Write = Callable[[], None]
Straight = Callable[[list[Event]], Write | None]
"""Makes what a client is told of events while its follower's task waits; None: it cannot now."""


class _Follower:
    """What one client is still to be told. A future of its own wakes it: no timer, no task."""

    __slots__ = ("after", "behind", "failure", "heard", "sleeper", "straight", "waiting")

    def __init__(self, after: int, straight: Straight | None) -> None:
        self.after = after
        self.straight = straight
        self.failure: Exception | None = None
        self.waiting: list[Event] = []
        self.sleeper: asyncio.Future[None] | None = None
        self.behind = False  # the log has something that `waiting` has not
        self.heard = time.monotonic()

    def push(self, new: list[Event]) -> None:
        if len(self.waiting) + len(new) > BACKLOG:
            self.waiting = []
            self.behind = True
        if not self.behind:
            self.waiting += new
        self.wake()

    def told(self, new: list[Event]) -> Write | None:
        """What tells the client of `new` without waking its task.

        None unless the task waits, so that all before was sent, and `new` is just what comes next.
        """
        if (
            self.straight is None
            or self.sleeper is None
            or self.sleeper.done()
            or self.waiting
            or self.behind
            or not new
            or new[0].seq != self.after + 1
            or events.is_terminal(new[-1].data)
        ):
            return None
        try:
            write = self.straight(new)
        except Exception as error:
            self.fail(error)
            return None
        if write is not None:
            self.after = new[-1].seq
            self.heard = time.monotonic()
        return write

    def fail(self, error: Exception) -> None:
        """Have the follower's task raise an error: others must hear what comes."""
        self.failure = error
        self.wake()

    def take(self) -> list[Event]:
        """What waits after event `after`, up to a gap; then it is behind."""
        new, self.waiting = self.waiting, []
        after = self.after
        if new[0].seq == after + 1 and new[-1].seq == after + len(new):
            return new
        found = []
        for event in new:
            if event.seq > after + 1:
                self.behind = True
                break
            if event.seq == after + 1:
                found.append(event)
                after += 1
        return found

    def wake(self) -> None:
        sleeper, self.sleeper = self.sleeper, None
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)


def _unpacker() -> msgpack.Unpacker:
    return msgpack.Unpacker(raw=False, strict_map_key=False)


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
        # Each has a connection while it reads: clients that come back all at once share them.
        self._readers = asyncio.Semaphore(READERS)
        # Only while events are heard: a log that was lost with Redis may have come back shorter.
        self._slices = Slices()
        self._up_at = time.monotonic()
        # One for all events: making one costs more than an event.
        self._unpacker = _unpacker()

    def start(self) -> None:
        """Begin; call inside the event loop."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._rouse())]

    async def stop(self) -> None:
        """Stop hearing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self, response: str) -> None:
        """Keep nothing of a response that is deleted. From any thread."""
        self._slices.forget(response)

    async def follow(
        self,
        response: str,
        after: int = -1,
        straight: Straight | None = None,
        born: float | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """Events with a number above `after`, to the terminal one, all that are there at once.

        An empty list after 10 s of silence. What comes while the caller waits for more goes to
        `straight` instead, where that takes it. `born`: when the response was created, which tells
        its log from that of an earlier one with the same id; what is read of it is shared with
        others who give the same. Raises LogLost where the log is gone, or Redis
        stays away, and what `straight` raised.
        """
        me = _Follower(after, straight)
        loop = asyncio.get_running_loop()
        self._followers.setdefault(response.encode(), set()).add(me)
        self._wanted.set()
        try:
            # What is logged before we hear is read below; a server that stays away is found there.
            with contextlib.suppress(TimeoutError):
                # Not by wait_for, which forgets a cancel that comes together with what it awaits.
                async with asyncio.timeout(LISTEN_WITHIN):
                    await self._hearing.wait()
            me.behind = True
            while True:
                if me.behind:
                    me.behind = False
                    async for new in self._logged(response, me.after, born):
                        me.after = new[-1].seq
                        yield new
                        if events.is_terminal(new[-1].data):
                            return
                elif me.waiting:
                    if new := me.take():
                        me.after = new[-1].seq
                        yield new
                        if events.is_terminal(new[-1].data):
                            return
                else:
                    me.heard = loop.time()
                    me.sleeper = loop.create_future()
                    await me.sleeper
                    if me.failure is not None:
                        raise me.failure
                    if not me.waiting and not me.behind:
                        await self._check(response)
                        me.behind = True
                        yield []
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

    async def _logged(
        self, response: str, after: int, born: float | None
    ) -> AsyncIterator[list[Event]]:
        """The log from an event on; waits out a short absence of Redis."""
        while True:
            try:
                async with self._readers:
                    batch = await self._slice(response, after, born)
            except (RedisError, OSError):
                if time.monotonic() - self._up_at > LOST_AFTER:
                    raise
                await asyncio.sleep(RETRY_EVERY)
                continue
            if not batch:
                return
            yield batch
            if len(batch) < AT_ONCE:
                # What came since waits already. Reading until nothing is new would not end where
                # steps are sooner than reads.
                return
            after = batch[-1].seq

    async def _slice(self, response: str, after: int, born: float | None) -> Slice:
        """The events after one, as many as are read at once."""
        name = (response, born or 0.0, after)
        if born is not None and (known := self._slices.get(name)) is not None:
            # Others have their turn even where nothing has to be waited for.
            await asyncio.sleep(0)
            return known
        epoch = self._slices.epoch
        made = Slice(await events.aread(self._client, response, after, count=AT_ONCE))
        if born is not None and len(made) == AT_ONCE:
            # A full one never changes: logs only grow.
            self._slices.put(name, made, epoch)
        return made

    async def _check(self, response: str) -> None:
        with contextlib.suppress(RedisError, OSError):
            if not await self._client.exists(events.key(response)):
                raise LogLost("the event log has expired or was deleted")

    async def _run(self) -> None:
        """Hear while anybody follows; connect again whenever the connection is lost."""
        while True:
            await self._wanted.wait()
            pubsub = subscription(self._client)
            try:
                await pubsub.subscribe(CHANNEL)
                while self._wanted.is_set():
                    message = await pubsub.get_message(timeout=1.0)
                    self._up_at = time.monotonic()
                    if message is None:
                        continue
                    if message["type"] == "subscribe":
                        self._heard()
                    elif message["type"] == "message":
                        self._deliver(message["data"])
            except (RedisError, OSError, ValueError) as error:
                log.warning("events cannot be heard: %s; trying again", error)
                await asyncio.sleep(RETRY_EVERY)
            finally:
                self._hearing.clear()
                self._slices.forget()
                with contextlib.suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]  # redis has no types here

    def _heard(self) -> None:
        """Redis says that it tells us events from now on: at first, and whenever the client has
        made a lost connection anew by itself."""
        self._hearing.set()
        self._slices.forget()
        # Whatever was said while nobody listened is in the logs.
        for group in self._followers.values():
            for follower in group:
                follower.behind = True
                follower.wake()

    async def _rouse(self) -> None:
        """Wake those who have heard nothing for long, by the wall clock; drop what is old."""
        while True:
            await asyncio.sleep(KEEP_ALIVE / 10)
            self._slices.age()
            late = time.monotonic() - KEEP_ALIVE
            for group in self._followers.values():
                for follower in group:
                    if follower.heard < late:
                        follower.wake()

    def _deliver(self, data: bytes) -> None:
        writes: list[tuple[_Follower, Write]] = []
        # The scripts' packer knows bytes only.
        for name, first, packed in msgpack.unpackb(data, raw=True):
            group = self._followers.get(name)
            if group:
                try:
                    self._unpacker.feed(b"".join(packed))
                    new = [Event(first + i, event) for i, event in enumerate(self._unpacker)]
                except (ValueError, msgpack.UnpackException):
                    new = []
                if len(new) != len(packed):
                    # What cannot be read is in the log as well; nothing is left for the next one.
                    self._unpacker = _unpacker()
                    new = []
                for follower in group:
                    follower.behind |= not new
                    if write := follower.told(new):
                        writes.append((follower, write))
                    else:
                        follower.push(new)
                if len(writes) >= TOGETHER:
                    _write(writes)
                    writes = []
        _write(writes)


def _write(writes: list[tuple[_Follower, Write]]) -> None:
    """Tell some clients, one after the other without other work in between; see `TOGETHER`."""
    for follower, write in writes:
        try:
            write()
        except Exception as error:
            follower.fail(error)


DIRECT = "tandem.send"
"""Key of a request's scope: the way to the client that nothing in between looks at."""
WIRE = "tandem.wire"
"""Key of a request's scope: the connection itself, where it can be written to."""


class EventStream(Response):
    """An answer that sends chunks as they come and notices when the client has gone.

    `during` is entered while the client is served, and left however that ends. `lane`: leads to
    the client while it is served, for who makes `chunks`.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        during: AbstractContextManager[None] | None = None,
        headers: Mapping[str, str] | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._chunks = chunks
        self._lane = lane or Lane()
        self._during = during or contextlib.nullcontext()
        self.status_code = 200
        self.background = None
        # Proxies must neither keep nor gather events.
        fixed = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
        self.media_type = "text/event-stream"
        self.init_headers({**fixed, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            with self._during:
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                # What stands between looks at how an answer begins: the rest passes it by.
                sending = asyncio.create_task(self._send(scope.get(DIRECT, send), scope.get(WIRE)))
                tasks = {sending, asyncio.create_task(gone(receive))}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._lane.close()

    async def _send(self, send: Send, wire: Wire | None) -> None:
        self._lane.open(send, wire)
        async with contextlib.aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await self._lane.drained()
                await send(body(chunk))
        await self._lane.drained()
        await send(body(b"", more=False))


async def gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
