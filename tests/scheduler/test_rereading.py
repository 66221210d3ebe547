"""Many clients that read a long log again at once: each gets all of it, and others their turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis
from api_stack import Stack
from held import Held
from hub_kit import hub
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_kit import Server, eventually

from scheduler import delivery, events
from scheduler.api import backend, gate, slices, stream
from scheduler.api.frames import EventFrames
from scheduler.api.gate import Gate
from scheduler.api.slices import Slice
from scheduler.api.stream import EventHub
from scheduler.events import Event, key
from scheduler.jobs import Jobs
from scheduler.record import NewJob
from scheduler.serializer import pack

NAME = "resp_" + "d" * 32
SLICE = 10
READERS = 2


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url) as running:
        yield running


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "AT_ONCE", SLICE)
    # Nobody reads before the hub hears, which then forgets what was kept, however late that is.
    monkeypatch.setattr(stream, "LISTEN_WITHIN", 600.0)


def write_log(client: redis.Redis, count: int, mark: str = "", *, ended: bool = True) -> None:
    pipe = client.pipeline()
    for n in range(count):
        kind = "response.completed" if ended and n == count - 1 else "x"
        pipe.xadd(key(NAME), {"e": pack({"type": kind, "n": f"{mark}{n}"})}, id=f"{n + 1}-0")
    pipe.execute()


class Rounds:
    """Counts what happens between two of its own turns in an event loop: in two rounds at most."""

    def __init__(self) -> None:
        self.round = 0
        self.seen: Counter[int] = Counter()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.round += 1
            await asyncio.sleep(0)

    def note(self) -> None:
        self.seen[self.round] += 1

    def end(self) -> int:
        """The most that was noted in one."""
        self._task.cancel()
        return max(self.seen.values())


def test_readers_of_one_log_share_it_and_give_way(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "READERS", READERS)
    count, followers = 25 * SLICE + 3, 30
    write_log(client, count)
    reads: Counter[int] = Counter()
    read = events.aread

    async def counting(client: Any, name: str, after: int, **options: Any) -> list[Event]:
        reads[after] += 1
        return await read(client, name, after, **options)

    monkeypatch.setattr(stream.events, "aread", counting)

    async def run() -> None:
        async with hub(redis_url) as made:
            rounds = Rounds()

            async def one(after: int) -> list[str]:
                found = []
                async for new in made.follow(NAME, after, born=1.0):
                    rounds.note()
                    found += [event.data["n"] for event in new]
                return found

            starts = [n * SLICE - 1 for n in range(5)] * (followers // 5)
            told = await asyncio.gather(*map(one, starts))
            for after, found in zip(starts, told, strict=True):
                assert found == [str(n) for n in range(after + 1, count)]
            assert rounds.end() <= 2 * READERS

    asyncio.run(run())
    last = 25 * SLICE - 1
    assert set(reads) == {n * SLICE - 1 for n in range(26)}
    # Only those who read at the very same time read the same piece.
    assert all(reads[after] <= READERS for after in reads if after != last)
    assert reads[last] == followers


def test_a_later_log_with_the_same_id_is_another(client: redis.Redis, redis_url: str) -> None:
    async def run() -> None:
        async with hub(redis_url) as made:

            async def all_of(born: float | None) -> list[str]:
                return [
                    event.data["n"] async for new in made.follow(NAME, born=born) for event in new
                ]

            write_log(client, 3 * SLICE, "old")
            assert await all_of(1.0) == [f"old{n}" for n in range(3 * SLICE)]
            client.delete(key(NAME))
            write_log(client, 3 * SLICE, "new")
            for born in (2.0, None):
                assert await all_of(born) == [f"new{n}" for n in range(3 * SLICE)]

    asyncio.run(run())


def test_no_more_is_kept_than_is_bounded(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(client, 10 * SLICE)
    whole = events.read(client, NAME).size
    monkeypatch.setattr(slices, "KEPT_BYTES", whole // 3)

    async def run() -> None:
        async with hub(redis_url) as made:
            found = Counter[int]()
            for _ in range(2):
                async for _new in made.follow(NAME, born=1.0):
                    kept = made._slices._kept.values()
                    assert sum(piece.size for piece in kept) <= whole // 3
                    found[len(kept)] += 1
            assert max(found) == 3

    asyncio.run(run())


@contextlib.asynccontextmanager
async def kept(redis_url: str, client: redis.Redis) -> AsyncIterator[tuple[EventHub, Any]]:
    """A hub that keeps three pieces of a log, and the task of who waits for more of it."""
    write_log(client, 3 * SLICE, ended=False)
    async with hub(redis_url) as made:

        async def follow() -> None:
            async for _ in made.follow(NAME, born=1.0):
                pass

        follower = asyncio.create_task(follow())
        await becomes(made, 3)
        try:
            yield made, follower
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)


async def becomes(made: EventHub, count: int) -> None:
    async with asyncio.timeout(60):
        while len(made._slices) != count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("why", ["old", "deleted", "nobody follows"])
def test_pieces_are_kept_for_a_while_only(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def run() -> None:
        async with kept(redis_url, client) as (made, follower):
            if why == "old":
                monkeypatch.setattr(slices, "KEPT_FOR", -1.0)
            elif why == "deleted":
                made.forget("resp_" + "e" * 32)
                assert len(made._slices) == 3
                made.forget(NAME)
            else:
                follower.cancel()
            await becomes(made, 0)

    asyncio.run(run())


def test_a_log_that_came_back_shorter_is_read_anew(client: redis.Redis, redis_url: str) -> None:
    async def run() -> None:
        async with kept(redis_url, client) as (made, _):
            client.client_kill_filter(_type="pubsub")
            await becomes(made, 0)
            client.delete(key(NAME))
            write_log(client, 4 * SLICE, "new")
            told = [e.data["n"] async for new in made.follow(NAME, born=1.0) for e in new]
            assert told == [f"new{n}" for n in range(4 * SLICE)]

    asyncio.run(run())


def test_what_was_being_read_when_it_was_deleted_is_not_kept(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(client, 3 * SLICE)
    read = events.aread

    async def run() -> None:
        async with hub(redis_url) as made:

            async def deleting(*args: Any, **options: Any) -> list[Event]:
                found = await read(*args, **options)
                made.forget(NAME)
                return found

            monkeypatch.setattr(stream.events, "aread", deleting)
            async for _ in made.follow(NAME, born=1.0):
                assert not len(made._slices)

    asyncio.run(run())


def test_shared_frames_are_those_of_each_event(client: redis.Redis) -> None:
    jobs = Jobs(client)
    jobs.accept(NewJob(NAME, "m", {}, [0], stage="decode", background=True))
    job = jobs.get(NAME)
    place = {"item_id": st.text(max_size=4), "logprobs": st.just([{"logprob": -0.5}])}
    written = st.sampled_from(["response.output_text.delta", "response.reasoning_text.delta"])
    ended = st.sampled_from(["response.output_text.done", "response.content_part.done"])
    said = st.fixed_dictionaries(
        {"type": written, "delta": st.text()}, optional=place
    ) | st.fixed_dictionaries({"type": ended})

    @settings(deadline=None)
    @given(st.lists(said, max_size=12), st.integers(1, 5))
    def check(told: list[dict[str, Any]], size: int) -> None:
        logged = [Event(n, data) for n, data in enumerate(told)]
        slices = [Slice(logged[at : at + size]) for at in range(0, len(logged), size)]
        plain = EventFrames(job)
        expected = [plain.render(seq, data) for seq, data in logged]
        for reader in (EventFrames(job), EventFrames(job)):
            assert [frame for part in slices for frame in reader.render_slice(part)] == expected
        # One who has read the beginning of it alone goes on with what was made by others.
        late = EventFrames(job)
        begun = [late.render(seq, data) for part in slices[:1] for seq, data in part]
        assert begun + [f for part in slices[1:] for f in late.render_slice(part)] == expected

    check()


def replay(stack: Stack, response: str, after: int) -> list[dict[str, Any]]:
    query = {"stream": "true", "starting_after": after}
    got = httpx.get(f"{stack.url}/v1/responses/{response}", params=query, timeout=120)
    return [json.loads(row[6:]) for row in got.text.splitlines() if row.startswith("data: ")]


def test_every_client_gets_the_rest_whoever_else_reads(stack: Stack) -> None:
    stack.workers.say = lambda job: "東京 and so on, é! " * 20
    made = stack.client().responses.create(input="Hi", max_output_tokens=2000)
    whole = replay(stack, made.id, -1)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert len(whole) > 10 * SLICE
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == made.output_text
    deltas = [e["delta"] for e in whole if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == made.output_text
    starts = [-1, 0, 1, SLICE - 1, SLICE, 5 * SLICE + 3, len(whole) - 2, len(whole) - 1] * 3
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda after: replay(stack, made.id, after), starts))
    for after, rest in zip(starts, found, strict=True):
        assert rest == whole[after + 1 :]


def test_nothing_is_kept_of_a_response_that_is_deleted(stack: Stack) -> None:
    stack.workers.say = lambda job: "東京 and so on, é! " * 20
    made = stack.client().responses.create(input="Hi", max_output_tokens=2000)

    def kept() -> bool:
        return made.id in {name[0] for name in stack.backend.hub._slices._kept}

    stack.workers.may_finish.clear()
    try:
        # While somebody follows, the hub hears, and keeps what is read.
        with stack.client(timeout=120).responses.create(input="Hi", stream=True) as running:
            next(iter(running))
            eventually(lambda: replay(stack, made.id, -1) and kept(), "nothing is kept")
            stack.client().responses.delete(made.id)
            assert not kept()
    finally:
        stack.workers.may_finish.set()


def test_looking_up_for_streams_leaves_threads_to_others(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.workers.say = lambda job: "Done."
    made = stack.client().responses.create(input="Hi")
    held = Held(delivery.recent_job)
    monkeypatch.setattr(delivery, "recent_job", held)
    with ThreadPoolExecutor(12) as pool:
        try:
            streams = [pool.submit(replay, stack, made.id, 0) for _ in range(12)]
            eventually(lambda: held.begun == backend.LOOKING, "nothing is looked up")
            assert httpx.get(f"{stack.url}/health", timeout=60).status_code == 200
            assert stack.client().responses.create(input="Hi").status == "completed"
            assert not any(one.done() for one in streams)
        finally:
            held.release()
        assert len({len(one.result()) for one in streams}) == 1
    assert held.most == backend.LOOKING


def test_a_slow_store_holds_up_no_stream_whose_job_redis_has(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.workers.say = lambda job: "Done and so on."
    held = Held(delivery.stored_job)
    monkeypatch.setattr(delivery, "stored_job", held)
    stack.workers.halfway.clear()
    stack.workers.may_finish.clear()

    def ask(number: int) -> int:
        unknown = f"{stack.url}/v1/responses/resp_{'e' * 31}{number}"
        return httpx.get(unknown, params={"stream": "true"}, timeout=120).status_code

    with ThreadPoolExecutor(12) as pool:
        try:
            events = stack.client(timeout=120).responses.create(input="Hi", stream=True)
            assert stack.workers.halfway.wait(120)
            unknown = [pool.submit(ask, n) for n in range(2 * backend.LOOKING)]
            eventually(lambda: held.begun == backend.ASKING, "the store is asked nothing")
            stack.workers.may_finish.set()
            *_, last = list(events)
            assert last.type == "response.completed"
            assert replay(stack, last.response.id, -1)[-1]["type"] == last.type
            assert not any(one.done() for one in unknown)
        finally:
            stack.workers.may_finish.set()
            held.release()
        assert [one.result() for one in unknown] == [404] * len(unknown)
    assert held.most == backend.ASKING


def test_requests_that_come_together_begin_a_few_at_a_time(stack: Stack) -> None:
    count = 5 * gate.AT_ONCE

    async def run() -> None:
        rounds, begun = Rounds(), list[str]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.append(scope["path"])
            if scope["path"] != "/health":
                rounds.note()

        front = Gate(app, stack.config, stack.backend.owners, stack.backend.audit)

        async def ask(path: str) -> None:
            headers = [(b"host", b"localhost")]
            scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
            await front(scope, _nothing, _nothing)

        await asyncio.gather(*(ask("/v1/models") for _ in range(count)), ask("/health"))
        assert len(begun) == count + 1
        assert begun.index("/health") <= gate.AT_ONCE, "behind none that waits"
        assert rounds.end() <= 2 * gate.AT_ONCE

    asyncio.run(run())


async def _nothing(*_: Any) -> Any:
    raise AssertionError("nothing is read or sent here")
