"""The hub that hears events: nothing missed, nothing repeated, whatever gets lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator

import msgpack
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_kit import Server

from scheduler.api import stream
from scheduler.api.stream import EventHub, LogLost, frame
from scheduler.events import key
from scheduler.redis_client import connect, connect_async
from scheduler.serializer import pack

NAME = "resp_" + "a" * 32
#: What is lost is read at the next look at the log, about a second later.
EXAMPLES = 25 if os.environ.get("TANDEM_SOAK") else 6


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


class Writer:
    """Writes a log as the scripts do, or as if the message about it had been lost."""

    def __init__(self, client: redis.Redis, name: str = NAME) -> None:
        self.client, self.name, self.seq = client, name, 0

    def write(self, *kinds: str, told: bool = True) -> None:
        packed = [pack({"type": kind, "n": self.seq + i}) for i, kind in enumerate(kinds)]
        if told:
            message = msgpack.packb([[self.name.encode(), self.seq, packed]], use_bin_type=False)
            self.client.publish(stream.CHANNEL, message)
        for data in packed:
            self.seq += 1
            self.client.xadd(key(self.name), {"e": data}, id=f"{self.seq}-0")

    def end(self) -> None:
        self.write("response.completed")


@contextlib.asynccontextmanager
async def hub(url: str) -> AsyncIterator[EventHub]:
    client = connect_async(url, patience=0)
    made = EventHub(client)
    made.start()
    try:
        yield made
    finally:
        await made.stop()
        await client.aclose()


async def collect(made: EventHub, name: str = NAME, after: int = -1) -> list[int]:
    return [e.data["n"] async for e in made.follow(name, after) if e is not None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def test_many_follow_from_anywhere(client: redis.Redis, redis_url: str) -> None:
    async def run() -> None:
        writer = Writer(client)
        writer.write("a", "b")
        async with hub(redis_url) as made:
            tasks = [asyncio.create_task(collect(made, after=n)) for n in range(-1, 8)]
            await until(lambda: made._hearing.is_set())
            for _ in range(10):
                await asyncio.to_thread(writer.write, "c", "d")
            await asyncio.to_thread(writer.end)
            for after, task in enumerate(tasks, -1):
                assert await task == list(range(after + 1, writer.seq))
            assert made._followers == {}
            assert await collect(made, after=5) == list(range(6, writer.seq))

    asyncio.run(run())


@settings(max_examples=EXAMPLES, deadline=None)
@given(told=st.lists(st.booleans(), max_size=30))
def test_lost_messages_are_read_from_the_log(server: Server, told: list[bool]) -> None:
    async def run() -> None:
        with connect(server.url) as client:
            client.delete(key(NAME))
            writer = Writer(client)
            writer.write("start")
            async with hub(server.url) as made:
                task = asyncio.create_task(collect(made))
                await until(lambda: made._hearing.is_set())
                for one in told:
                    await asyncio.to_thread(writer.write, "x", told=one)
                await asyncio.to_thread(writer.end)
                assert await task == list(range(writer.seq))

    asyncio.run(run())


def test_silence_is_told_and_ends_a_lost_last_word(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.05)

    async def run() -> None:
        writer = Writer(client)
        writer.write("a")
        async with hub(redis_url) as made:
            seen: list[int | None] = []
            async for event in made.follow(NAME):
                seen.append(event.data["n"] if event else None)
                if seen.count(None) == 2:
                    writer.write("response.completed", told=False)
            assert seen[0] == 0
            assert seen[-1] == 1
            writer.client.delete(key(NAME))
            with pytest.raises(LogLost, match="expired"):
                await collect(made)

    asyncio.run(run())


def test_a_slow_reader_is_served_from_the_log(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BACKLOG", 5)

    async def run() -> None:
        writer = Writer(client)
        writer.write("a")
        async with hub(redis_url) as made:
            seen = []
            async for event in made.follow(NAME):
                assert event is not None
                seen.append(event.data["n"])
                if len(seen) == 1:
                    for _ in range(30):
                        writer.write("b")
                    writer.end()
                    await until(lambda: any(f.behind for g in made._followers.values() for f in g))
            assert seen == list(range(32))

    asyncio.run(run())


def test_redis_comes_back(durable_redis: Server) -> None:
    async def run() -> None:
        with connect(durable_redis.url) as client:
            writer = Writer(client)
            writer.write("a", "b")
            async with hub(durable_redis.url) as made:
                seen: list[int] = []

                async def read() -> None:
                    async for event in made.follow(NAME):
                        if event is not None:
                            seen.append(event.data["n"])

                task = asyncio.create_task(read())
                await until(lambda: len(seen) == 2)
                await asyncio.to_thread(durable_redis.kill)
                await until(lambda: not made._hearing.is_set())
                await asyncio.to_thread(durable_redis.start)
                await asyncio.to_thread(writer.write, "c", told=False)
                await asyncio.to_thread(writer.end)
                async with asyncio.timeout(30):
                    await task
                assert seen == [0, 1, 2, 3]

    asyncio.run(run())


def test_a_server_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LISTEN_WITHIN", 0.05)
    monkeypatch.setattr(stream, "LOST_AFTER", 0.2)

    async def run() -> None:
        async with hub("unix:///nowhere.sock") as made:
            with pytest.raises(LogLost, match="cannot be reached"):
                await collect(made)

    asyncio.run(run())


@given(text=st.text(), number=st.integers(0, 1 << 40))
def test_a_frame_is_one_event_whatever_its_text(text: str, number: int) -> None:
    raw = frame({"type": "t", "delta": text, "sequence_number": number})
    lines = raw.split(b"\n")
    assert lines[0] == b"event: t"
    assert lines[2:] == [b"", b""]
    data = json.loads(lines[1].removeprefix(b"data: "))
    assert data["sequence_number"] == number
    assert data["delta"] == text.encode("utf-8", "replace").decode()
