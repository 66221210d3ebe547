"""The hub that hears events: nothing missed, nothing repeated, whatever gets lost on the way."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import redis
from hub_kit import hub
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.client import Pipeline
from redis_kit import Server

from scheduler.api import stream
from scheduler.api.frames import EventFrames, Spliced, frame
from scheduler.api.stream import EventHub, LogLost
from scheduler.api.view import EventView
from scheduler.events import key
from scheduler.jobs import Jobs
from scheduler.record import Job, NewJob
from scheduler.redis_client import connect
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
        self._lock = threading.Lock()  # as one script after the other

    def write(self, *kinds: str, told: bool = True) -> None:
        with self._lock:
            # In one step: who hears of an event finds it in the log.
            step = self.client.pipeline(transaction=True)
            self.put(step, *kinds, told=told)
            step.execute()

    def put(self, step: Pipeline, *kinds: str, told: bool = True) -> None:
        """Make it a part of a step."""
        packed = [pack({"type": kind, "n": self.seq + i}) for i, kind in enumerate(kinds)]
        if told:
            message = msgpack.packb([[self.name.encode(), self.seq, packed]], use_bin_type=False)
            step.publish(stream.CHANNEL, message)
        for data in packed:
            self.seq += 1
            step.xadd(key(self.name), {"e": data}, id=f"{self.seq}-0")

    def end(self) -> None:
        self.write("response.completed")


async def collect(made: EventHub, name: str = NAME, after: int = -1) -> list[int]:
    return [e.data["n"] async for new in made.follow(name, after) for e in new]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
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
            async for new in made.follow(NAME):
                seen += [event.data["n"] for event in new] or [None]
                if seen.count(None) == 2:
                    writer.write("response.completed", told=False)
            assert seen[0] == 0
            assert seen[-1] == 1
            writer.client.delete(key(NAME))
            with pytest.raises(LogLost, match="expired"):
                await collect(made)

    asyncio.run(run())


def test_a_log_is_read_no_more_often_than_it_must_be(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither silence nor a slow connection is a reason here, however long this machine stalls.
    monkeypatch.setattr(stream, "KEEP_ALIVE", 10_000.0)
    monkeypatch.setattr(stream, "LISTEN_WITHIN", 600.0)
    reads = 0
    read = stream.events.aread

    async def slower_than_steps(*args: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        new = await read(*args, **options)
        await asyncio.to_thread(writer.write, "b")
        await until(lambda: all(f.waiting for g in made._followers.values() for f in g))
        return new

    writer = Writer(client)

    async def run() -> None:
        nonlocal made
        monkeypatch.setattr(stream.events, "aread", slower_than_steps)
        writer.write("a")
        async with hub(redis_url) as made:
            task = asyncio.create_task(collect(made))
            await until(lambda: made._hearing.is_set() and reads > 0)
            for _ in range(5):
                await asyncio.to_thread(writer.write, "c")
            await asyncio.to_thread(writer.end)
            assert await task == list(range(writer.seq))
        assert reads == 1

    made: EventHub
    asyncio.run(run())


def test_a_slow_reader_is_served_from_the_log(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BACKLOG", 5)

    async def run() -> None:
        writer = Writer(client)
        writer.write("a")
        async with hub(redis_url) as made:
            seen: list[int] = []
            async for new in made.follow(NAME):
                assert new
                seen += [event.data["n"] for event in new]
                if len(seen) == 1:
                    for _ in range(30):
                        writer.write("b")
                    writer.end()
                    await until(lambda: any(f.behind for g in made._followers.values() for f in g))
            assert seen == list(range(32))

    asyncio.run(run())


@pytest.mark.parametrize("told", [b"\xc1", b"", msgpack.packb([[NAME.encode(), 1, [b"\xda"]]])])
def test_a_message_that_is_none_is_read_from_the_log(
    client: redis.Redis, redis_url: str, told: bytes
) -> None:
    async def run() -> None:
        writer = Writer(client)
        writer.write("a")
        async with hub(redis_url) as made:
            task = asyncio.create_task(collect(made))
            await until(lambda: made._hearing.is_set())
            writer.write("b", told=False)
            await asyncio.to_thread(client.publish, stream.CHANNEL, told)
            await asyncio.to_thread(writer.write, "c", "d")
            await asyncio.to_thread(writer.end)
            assert await task == list(range(writer.seq))

    asyncio.run(run())


def test_redis_comes_back(durable_redis: Server) -> None:
    async def run() -> None:
        with connect(durable_redis.url) as client:
            writer = Writer(client)
            writer.write("a", "b")
            async with hub(durable_redis.url) as made:
                seen: list[int] = []

                async def read() -> None:
                    async for new in made.follow(NAME):
                        seen.extend(event.data["n"] for event in new)

                task = asyncio.create_task(read())
                await until(lambda: len(seen) == 2)
                await asyncio.to_thread(durable_redis.kill)
                await until(lambda: not made._hearing.is_set())
                await asyncio.to_thread(durable_redis.start)
                await asyncio.to_thread(writer.write, "c", told=False)
                await asyncio.to_thread(writer.end)
                async with asyncio.timeout(90):
                    await task
                assert seen == [0, 1, 2, 3]

    asyncio.run(run())


def test_what_was_said_while_the_client_connected_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its retries make a lost connection anew without a word; nothing comes after the last event
    that would show the gap."""
    monkeypatch.setattr(stream, "KEEP_ALIVE", 10_000.0)

    async def run() -> None:
        with connect(server.url) as client:
            client.delete(key(NAME))
            writer = Writer(client)
            writer.write("a")
            async with hub(server.url, patience=5) as made:
                task = asyncio.create_task(collect(made))
                await until(
                    lambda: (
                        made._hearing.is_set()
                        and any(f.sleeper for g in made._followers.values() for f in g)
                    )
                )
                killing = client.pipeline()
                killing.client_kill_filter(_type="pubsub")
                writer.put(killing, "response.completed")
                killed, heard, _ = await asyncio.to_thread(killing.execute)
                assert (killed, heard) == (1, 0)
                async with asyncio.timeout(90):
                    assert await task == [0, 1]

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


def the_job(client: redis.Redis) -> Job:
    jobs = Jobs(client)
    jobs.accept(NewJob(NAME, "m", {}, [0], stage="decode", background=True))
    return jobs.get(NAME)


def test_spliced_events_are_the_bytes_of_plain_ones(client: redis.Redis) -> None:
    job = the_job(client)
    places = st.fixed_dictionaries(
        {"delta": st.text()},
        optional={
            "ids": st.lists(st.integers(0, 9), max_size=2),
            "item_id": st.text(max_size=4),
            "content_index": st.integers(0, 2),
            "output_index": st.integers(0, 2),
            "logprobs": st.lists(st.just({"token": "x", "logprob": -0.5}), max_size=1),
        },
    )
    kinds = st.sampled_from(["output_text", "reasoning_text", "function_call_arguments"])

    @settings(deadline=None)
    @given(st.lists(st.tuples(kinds, places), max_size=8))
    def check(told: list[tuple[str, dict[str, object]]]) -> None:
        frames, view = EventFrames(job), EventView(job)
        logged: list[dict[str, object]] = [{"type": "response.created"}]
        logged += [{"type": f"response.{kind}.delta", **event} for kind, event in told]
        logged.append({"type": "response.output_text.done"})
        for seq, data in enumerate(logged):
            assert frames.render(seq, data) == frame(view.render(seq, data))

    check()


@given(text=st.text(), number=st.integers(0, 1 << 40))
def test_what_is_spliced_has_a_number_or_none(text: str, number: int) -> None:
    both = Spliced(lambda told, n: frame({"type": "t", "n": n, "at": "n", "delta": told}))
    assert both(text, number) == frame({"type": "t", "n": number, "at": "n", "delta": text})
    one = Spliced(lambda told, _: frame({"type": "t", "delta": told, "n": 1}))
    assert one(text) == frame({"type": "t", "delta": text, "n": 1})
