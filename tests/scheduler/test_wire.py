"""What goes straight into a connection reaches the client as the server itself would send it."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import uvicorn
from redis_kit import eventually
from starlette.types import Receive, Scope, Send

from scheduler.api.lane import Lane
from scheduler.api.stream import WIRE, EventStream
from scheduler.api.wire import Wire

LONG = b"x" * (1 << 20)
END = b"the end\n"


class Served:
    """An application that tells of pieces that go both ways; what `Wire.write` said of each."""

    def __init__(self) -> None:
        self.told: list[bool | None] = []
        self.wires: list[Wire | None] = []
        self.many = 0
        self.until_full = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = scope[WIRE] = Wire.of(scope, receive)
        self.wires.append(wire)
        self.told = []
        await EventStream(self._chunks(wire), lane=Lane())(scope, receive, send)

    def _write(self, wire: Wire | None, piece: bytes) -> bool:
        self.told.append(wire.write(piece) if wire else None)
        return bool(self.told[-1])

    async def _chunks(self, wire: Wire | None) -> AsyncGenerator[bytes, None]:
        yield b"first\n"
        if self.until_full:
            while self._write(wire, LONG):
                self.many += 1
        else:
            for piece in (b"a" * 300, b"", "é\n".encode()):
                self._write(wire, piece)
                yield b"between\n"
        yield END

    @asynccontextmanager
    async def at(self) -> AsyncIterator[int]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            config = uvicorn.Config(self, log_level="error", lifespan="off", http="h11")
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True
                await task


@pytest.fixture
def served() -> Iterator[tuple[Served, int]]:
    app, started, done = Served(), threading.Event(), threading.Event()
    ports: list[int] = []

    async def run() -> None:
        async with app.at() as port:
            ports.append(port)
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(60)
        yield app, ports[0]
    finally:
        done.set()
        thread.join(60)


def _get(
    port: int,
    version: str = "HTTP/1.1",
    method: str = "GET",
    ended: Callable[[], bool] = lambda: True,
) -> bytes:
    """The body; the client leaves only when `ended`, for a HEAD has none to be read to its end."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client._http_vsn_str = version  # type: ignore[attr-defined]  # the way to speak HTTP/1.0
    with closing(client):
        client.request(method, "/")
        body = client.getresponse().read()
        eventually(ended, "the server does not end its answer")
        return body


def test_pieces_of_both_ways_arrive_in_order(served: tuple[Served, int]) -> None:
    app, port = served
    body = _get(port)
    assert app.told == [True, False, True]  # an empty chunk would end the body
    between = b"between\n"
    assert body == b"first\n" + b"a" * 300 + between + between + "é\n".encode() + between + END
    last = app.wires[-1]
    assert last is not None
    assert not last.write(b"after the end")


@pytest.mark.parametrize(("version", "method"), [("HTTP/1.0", "GET"), ("HTTP/1.1", "HEAD")])
def test_an_answer_without_chunks_is_left_to_the_server(
    served: tuple[Served, int], version: str, method: str
) -> None:
    app, port = served
    body = _get(port, version, method, lambda: len(app.told) == 3)
    assert app.told == [None, None, None]
    assert body == (b"" if method == "HEAD" else b"first\n" + 3 * b"between\n" + END)


def test_a_client_that_does_not_read_is_left_to_the_server(served: tuple[Served, int]) -> None:
    app, port = served
    app.until_full = True
    body = _get(port)
    assert app.told[-1] is False
    assert len(body) == len(b"first\n") + app.many * len(LONG) + len(END)
    assert body.endswith(LONG[-10:] + END)


def test_no_other_server_is_written_to() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "http_version": "1.1", "method": "GET"}
    assert Wire.of(scope, receive) is None
