"""Reading event logs: from any place, waiting, following, and what a retry is told."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis
from jobs_kit import new_job

from scheduler import events
from scheduler.jobs import Jobs
from scheduler.record import Job, Result
from scheduler.redis_client import connect_async
from scheduler.runs import Runs
from scheduler.serializer import pack


@pytest.fixture
def job(client: redis.Redis) -> Job:
    new = new_job(stage="decode")
    Jobs(client).accept(new)
    taken = Runs(client).take("decode", "w", "decode:local")
    assert taken is not None
    return taken


def say(client: redis.Redis, job: Job, first: int, *tokens: int) -> None:
    packed = [
        pack({"type": "response.output_text.delta", "delta": f"{token} ", "ids": [token]})
        for token in tokens
    ]
    assert Runs(client).append(job, first, packed, True) == "ok"


def test_any_place_can_be_read_from(client: redis.Redis, job: Job) -> None:
    say(client, job, 3, 10, 11, 12)
    everything = events.read(client, job.id)
    assert [event.seq for event in everything] == list(range(6))
    for after in range(-1, 6):
        assert events.read(client, job.id, after) == everything[after + 1 :]
    assert events.read(client, job.id, count=2) == everything[:2]
    assert events.read(client, "resp_" + "0" * 32) == []


def test_a_blocked_reader_wakes_up(client: redis.Redis, job: Job) -> None:
    assert events.read(client, job.id, 2, block=0.02) == []
    writer = threading.Timer(0.1, say, (client, job, 3, 10))
    writer.start()
    assert [event.data["ids"] for event in events.read(client, job.id, 2, block=120)] == [[10]]
    writer.join()


def test_following_ends_with_the_terminal_event(
    client: redis.Redis, redis_url: str, job: Job
) -> None:
    async def follow() -> list[events.Event | None]:
        seen: list[events.Event | None] = []
        async with connect_async(redis_url) as reader:
            async for event in events.afollow(reader, job.id, 0, keepalive=0.05):
                # Silence is told, so that a connection can be kept alive; then it is over.
                if event is None and None not in seen:
                    await asyncio.to_thread(write)
                seen.append(event)
        return seen

    def write() -> None:
        say(client, job, 3, 10)
        Runs(client).finish(job, Result(status="incomplete", reason="max_output_tokens"), 4)

    seen = asyncio.run(asyncio.wait_for(follow(), 60))
    told = [event for event in seen if event is not None]
    assert [event.seq for event in told] == [1, 2, 3, 4]
    assert told[-1].data == {
        "type": "response.incomplete",
        "status": "incomplete",
        "reason": "max_output_tokens",
    }


def test_following_nothing_ends(redis_url: str, client: redis.Redis) -> None:
    async def follow() -> list[events.Event | None]:
        async with connect_async(redis_url) as reader:
            return [e async for e in events.afollow(reader, "resp_" + "0" * 32, keepalive=0.05)]

    assert asyncio.run(follow()) == []


def test_a_retry_is_told_all_that_was_said(client: redis.Redis, job: Job) -> None:
    say(client, job, 3, *range(100, 105))
    replay = events.replay(client, job.id)
    assert replay.ids == [100, 101, 102, 103, 104]
    assert replay.text == "100 101 102 103 104 "
    assert replay.seq == 8
    assert "response.in_progress" in replay.types
    assert events.replay(client, job.id, replay.seq) == replay
    assert events.replay(client, job.id, 0) == events.Replay()
