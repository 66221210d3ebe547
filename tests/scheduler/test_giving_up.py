"""Clients that go away and ask again: they gain, and nothing is computed twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis
from chaos_points import write_pid
from jobs_kit import Worker, answer, assert_idle, eventually, new_job, oracle

from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.reclaim import Reclaimer
from scheduler.record import ConversationBusy


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


def test_the_same_request_attaches_to_the_abandoned_run(client: redis.Redis, jobs: Jobs) -> None:
    first = new_job(owner="ada", digest="d", conversation="conv_a", lock=True)
    jobs.accept(first)
    again = new_job(owner="ada", digest="d", conversation="conv_a", lock=True)
    with pytest.raises(ConversationBusy):
        jobs.accept(again)
    assert jobs.abandon(first.id) == "queued"
    for other in (
        new_job(owner="bob", digest="d"),
        new_job(owner="ada", digest="e"),
        new_job(owner="ada", digest="d", background=True),
        new_job(owner="ada"),
    ):
        assert jobs.accept(other).id == other.id
        jobs.cancel(other.id)
    accepted = jobs.accept(again)
    assert (accepted.id, accepted.duplicate) == (first.id, True)
    assert not client.exists("tandem:abandoned")
    with pytest.raises(ConversationBusy):
        jobs.accept(new_job(owner="ada", digest="d", conversation="conv_a", lock=True))
    jobs.cancel(first.id)
    assert_idle(client)


def test_a_submission_repeated_by_its_key_is_not_given_up(client: redis.Redis, jobs: Jobs) -> None:
    new = new_job(digest="d")
    jobs.accept(new)
    jobs.abandon(new.id)
    again = jobs.accept(new)
    assert (again.id, again.duplicate) == (new.id, True)
    assert not client.exists("tandem:abandoned")


@pytest.mark.parametrize("grace", [0, 30])
def test_a_client_that_goes_gives_nothing_up_for_another(client: redis.Redis, grace: int) -> None:
    """That a connection has ended may be noticed after its request came again by its key."""
    jobs = Jobs(client, JobsConfig(abandon_seconds=grace))
    new = new_job(digest="d", client="one")
    jobs.accept(new)
    jobs.accept(replace(new, client="two"))
    assert jobs.abandon(new.id, "one") == "queued"
    assert not client.exists("tandem:abandoned")
    jobs.accept(replace(new, client="three"))
    assert jobs.abandon(new.id, "two") == "queued"
    assert not client.exists("tandem:abandoned")
    assert jobs.abandon(new.id, "three") == ("queued" if grace else "cancelled")
    assert client.zcard("tandem:abandoned") == (1 if grace else 0)
    assert not client.exists("tandem:attended", f"tandem:waiting:{new.id}")
    assert jobs.accept(replace(new, client="four")).duplicate
    assert not client.exists("tandem:abandoned")


def test_an_abandoned_job_is_cancelled_after_its_grace(client: redis.Redis, jobs: Jobs) -> None:
    gone, kept = new_job(digest="d"), new_job(digest="e")
    jobs.accept(gone)
    jobs.accept(kept)
    jobs.abandon(gone.id)
    reclaimer = Reclaimer(client)
    assert not reclaimer.expired()
    client.zadd("tandem:abandoned", {gone.id: 1.0})
    assert dict(reclaimer.expired()) == {"abandoned": 1}
    assert jobs.get(gone.id).status == "cancelled"
    assert jobs.get(kept.id).status == "queued"
    assert not client.exists("tandem:abandoned")
    ended = jobs.accept(new_job(digest="d"))
    assert not ended.duplicate


def test_without_a_grace_going_away_is_a_cancel(client: redis.Redis) -> None:
    jobs = Jobs(client, JobsConfig(abandon_seconds=0))
    new = new_job(digest="d")
    jobs.accept(new)
    assert jobs.abandon(new.id) == "cancelled"
    assert jobs.abandon(new.id) == "cancelled"


@pytest.mark.parametrize("parks", [0, 2])
def test_a_client_that_drops_and_retries_gets_its_answer(
    client: redis.Redis, redis_url: str, jobs: Jobs, parks: int, tmp_path: Path
) -> None:
    """A long prefill; its client gives up every 0.2 s and sends the same again."""
    limit = tmp_path / "limit"
    write_pid(limit, 390)  # it does not end before its client has come for the last time
    prefill = Worker("prefill", redis_url, chunk_s=0.02, parks=parks, limit=str(limit))
    with prefill, Worker("decode", redis_url):
        ids = set()
        new = new_job(tokens=401, owner="ada", digest="d")
        for _ in range(8):
            again = new_job(tokens=401, owner="ada", digest="d")
            resp = jobs.accept(again).id
            ids.add(resp)
            with pytest.raises(TimeoutError):
                jobs.wait(resp, 0.2)
            jobs.abandon(resp)
        ids.add(jobs.accept(new_job(tokens=401, owner="ada", digest="d")).id)
        write_pid(limit, 1000)
        job = jobs.wait(resp, 60)
        assert len(ids) == 1
        assert job.status == "completed"
        assert answer(client, resp) == oracle(new)
        assert job.handoff is not None
        assert job.handoff["chunks"] == 40, "each chunk was computed once"
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_the_finished_part_of_a_cancelled_prefill_is_used_again(
    client: redis.Redis, redis_url: str, jobs: Jobs, tmp_path: Path
) -> None:
    limit = tmp_path / "limit"
    write_pid(limit, 0)
    prefill = Worker("prefill", redis_url, chunk_s=0.01, parks=2, limit=str(limit))
    with prefill, Worker("decode", redis_url):
        chunks = 0
        for reached in (70, 140, 210, 280):
            new = new_job(tokens=401)
            jobs.accept(new)
            write_pid(limit, reached)
            eventually(
                lambda new=new, reached=reached: jobs.get(new.id).prefilled_tokens == reached,
                "no progress",
            )
            jobs.cancel(new.id)
            ended = jobs.wait(new.id, 60)
            assert ended.status == "cancelled"
            eventually(lambda: client.keys("tandem:parked:*"), "nothing is kept")
        last = new_job(tokens=401)
        jobs.accept(last)
        assert int(client.hget(f"tandem:job:{last.id}", "parked_tokens") or 0) >= 60
        write_pid(limit, 1000)
        job = jobs.wait(last.id, 60)
        assert job.handoff is not None
        chunks = job.handoff["chunks"]
        assert 0 < chunks < 40
        assert answer(client, last.id) == oracle(last)
