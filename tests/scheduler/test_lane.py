"""What comes while a client's task sleeps is written at once: in order, once, and to each alone."""

from __future__ import annotations

import asyncio

import msgpack
import pytest
from hub_kit import hub
from starlette.types import Message

from scheduler.api.lane import Lane
from scheduler.api.stream import TOGETHER, EventHub, Write, _Follower
from scheduler.events import Event, key
from scheduler.redis_client import connect, connect_async
from scheduler.serializer import pack

NAME = "resp_" + "b" * 32


class Client:
    """Takes what is sent; while it is `full`, a sender waits."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self.error: Exception | None = None

    async def send(self, message: Message) -> None:
        await self.room.wait()
        if self.error is not None:
            raise self.error
        self.got.append(message["body"])


def test_a_client_that_reads_is_written_to_at_once() -> None:
    async def run() -> None:
        client, lane = Client(), Lane()
        assert not lane.free
        lane.open(client.send)
        for chunk in (b"a", b"b"):
            assert lane.free
            lane.write(chunk)
        assert client.got == [b"a", b"b"]
        await lane.drained()
        await lane.close()
        assert not lane.free

    asyncio.run(run())


def test_a_client_that_does_not_read_is_waited_for() -> None:
    async def run() -> None:
        client, lane = Client(), Lane()
        lane.open(client.send)
        client.room.clear()
        lane.write(b"a")
        assert not lane.free
        lane.write(b"b")  # of the same step
        waiting = asyncio.create_task(lane.drained())
        await asyncio.sleep(0)
        assert client.got == []
        client.room.set()
        await asyncio.wait_for(waiting, 90)
        assert lane.free
        lane.write(b"c")
        assert client.got == [b"a", b"b", b"c"]

    asyncio.run(run())


def test_an_error_of_a_client_that_was_waited_for_is_its_tasks() -> None:
    async def run() -> None:
        client, lane = Client(), Lane()
        lane.open(client.send)
        client.room.clear()
        lane.write(b"a")
        client.error = RuntimeError("gone")
        client.room.set()
        with pytest.raises(RuntimeError, match="gone"):
            await asyncio.wait_for(lane.drained(), 90)

    asyncio.run(run())


def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    async def run() -> None:
        client, lane = Client(), Lane()
        lane.open(client.send)
        client.room.clear()
        lane.write(b"a")
        await asyncio.wait_for(lane.close(), 90)
        client.room.set()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert client.got == []

    asyncio.run(run())


def test_one_that_fails_takes_no_event_from_the_others(redis_url: str) -> None:
    """Three follow: one is told at once, one fails as it is told, one is woken each time."""

    async def run() -> None:
        told: list[int] = []
        asked = asyncio.Event()

        def straight(new: list[Event]) -> Write:
            return lambda: told.extend(event.seq for event in new)

        def broken(_: list[Event]) -> Write:
            asked.set()
            raise RuntimeError("cannot be told")

        async with hub(redis_url) as made:

            async def follow(way: object) -> list[int]:
                how = {"straight": straight, "broken": broken}.get(str(way))
                return [e.seq async for new in made.follow(NAME, straight=how) for e in new]

            ways = ("straight", "broken", "woken")
            tasks = {way: asyncio.create_task(follow(way)) for way in ways}

            def asleep() -> bool:
                group = made._followers.get(NAME.encode(), set())
                heard = made._hearing.is_set()
                return heard and len(group) == 3 and all(one.sleeper for one in group)

            def asleep_two() -> bool:
                group = made._followers.get(NAME.encode(), set())
                return all(one.sleeper and one.after == 2 for one in group)

            def tell(seq: int, *kinds: str) -> None:
                packed = [pack({"type": kind}) for kind in kinds]
                with connect(redis_url) as client:
                    for at, data in enumerate(packed, seq + 1):
                        client.xadd(key(NAME), {"e": data}, id=f"{at}-0")
                made._deliver(msgpack.packb([[NAME, seq, packed]], use_bin_type=False))

            async with asyncio.timeout(90):
                while not asleep():
                    await asyncio.sleep(0.005)
                tell(0, "a", "b")
                assert told == [0, 1]
                with pytest.raises(RuntimeError, match="cannot be told"):
                    await tasks["broken"]
                assert asked.is_set()
                # What cannot be read is in the log, and spoils nothing that comes after it.
                with connect(redis_url) as client:
                    client.xadd(key(NAME), {"e": pack({"type": "c"})}, id="3-0")
                made._deliver(msgpack.packb([[NAME, 2, [b"\xc1"]]], use_bin_type=False))
                while not asleep_two():
                    await asyncio.sleep(0.005)
                tell(3, "response.completed")
                assert await tasks["woken"] == [0, 1, 2, 3]
                assert sorted(told + await tasks["straight"]) == [0, 1, 2, 3]
                assert made._followers == {}

    asyncio.run(run())


def test_the_first_of_many_clients_do_not_wait_for_the_last(redis_url: str) -> None:
    count = 2 * TOGETHER + 1
    done: list[tuple[str, int]] = []

    async def run() -> None:
        made = EventHub(connect_async(redis_url))
        names = [f"resp_{number:032x}" for number in range(count)]

        def way(number: int) -> _Follower:
            def straight(new: list[Event]) -> Write:
                assert [(e.seq, e.data["n"]) for e in new] == [(0, number), (1, number)]
                done.append(("made", number))
                return lambda: done.append(("written", number))

            one = _Follower(-1, straight)
            one.sleeper = asyncio.get_running_loop().create_future()
            return one

        followers = [way(number) for number in range(count)]
        for name, one in zip(names, followers, strict=True):
            made._followers[name.encode()] = {one}
        packed = [[pack({"type": "a", "n": n}), pack({"type": "b", "n": n})] for n in range(count)]
        rows = [[name, 0, events] for name, events in zip(names, packed, strict=True)]
        made._deliver(msgpack.packb(rows, use_bin_type=False))
        assert [one.after for one in followers] == [1] * count

    asyncio.run(run())
    expected = []
    for first in range(0, count, TOGETHER):
        some = range(first, min(first + TOGETHER, count))
        expected += [("made", n) for n in some] + [("written", n) for n in some]
    assert done == expected
