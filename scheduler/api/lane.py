"""The way to one client, for events that come while its own task sleeps."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator
from typing import Any

from starlette.types import Message, Send

from scheduler.api.wire import Wire


class _Rest:
    """What is left of a call that was begun outside any task, when it has to wait for `first`."""

    def __init__(self, begun: Generator[Any, Any, None], first: Any) -> None:
        self._begun, self._first = begun, first

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._first
        while True:
            try:
                came = yield waits_for
            except BaseException as error:
                step = functools.partial(self._begun.throw, error)
            else:
                step = functools.partial(self._begun.send, came)
            try:
                waits_for = step()
            except StopIteration:
                return


class Lane:
    """Writes to one client without waking the task that serves it, while that one waits.

    A client that does not read fast enough is left to its task, which waits until it does.
    """

    __slots__ = ("_later", "_rest", "_send", "_wire")

    def __init__(self) -> None:
        self._send: Send | None = None
        self._wire: Wire | None = None
        self._rest: asyncio.Task[None] | None = None
        self._later: list[bytes] = []

    def open(self, send: Send, wire: Wire | None = None) -> None:
        """From now on `send` leads to the client, and so does `wire`, which is quicker."""
        self._send = send
        self._wire = wire

    @property
    def free(self) -> bool:
        """Whether the client takes what is written at once."""
        return self._send is not None and self._rest is None

    def write(self, chunk: bytes) -> None:
        """Write a chunk; for who has seen that the lane is free, and has not waited since."""
        if self._rest is not None:
            self._later.append(chunk)
            return
        if self._wire is not None and self._wire.write(chunk):
            return
        assert self._send is not None
        begun = self._send(body(chunk)).__await__()
        try:
            first = next(begun)
        except StopIteration:
            return
        # The client's buffer is full: a task waits for it in our place.
        self._rest = asyncio.create_task(self._finish(self._send, _Rest(begun, first)))

    async def _finish(self, send: Send, rest: _Rest) -> None:
        await rest
        while self._later:
            await send(body(self._later.pop(0)))

    async def drained(self) -> None:
        """Wait until all that was written has gone; raises what sending it raised."""
        if self._rest is not None:
            await self._rest
            self._rest = None

    async def close(self) -> None:
        """Write no more, and forget what has not gone."""
        self._send = self._wire = None
        if self._rest is not None:
            self._rest.cancel()
            await asyncio.gather(self._rest, return_exceptions=True)


def body(chunk: bytes, more: bool = True) -> Message:
    """A piece of an answer; `more`: another follows."""
    return {"type": "http.response.body", "body": chunk, "more_body": more}
