"""Prefills are begun only for what a decode node has room for; long waits are told beforehand."""

from __future__ import annotations

import pytest
import redis
from jobs_kit import assert_idle, new_job

from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.reclaim import Reclaimer
from scheduler.record import Job, QueueFull, Result
from scheduler.runs import Runs


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    client.set("tandem:rate:prefill", 1000)
    return Jobs(client)


@pytest.fixture
def runs(client: redis.Redis) -> Runs:
    # What is published holds for two of these.
    return Runs(client, JobsConfig(lease_seconds=600))


def take(runs: Runs, queue: str = "prefill") -> Job | None:
    return runs.take(queue, "w", f"{queue}:local")


def must_take(runs: Runs, queue: str = "prefill") -> Job:
    job = take(runs, queue)
    assert job is not None
    return job


def test_only_what_fits_is_begun(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    runs.publish_budget("local", limit=101, fixed=10, per_token=1.0)
    first, second, small = (new_job(tokens=n) for n in (40, 41, 30))
    other = new_job(tokens=50, node="m4")
    for new in (first, second, small):
        jobs.accept(new)
    running = must_take(runs)
    assert running.id == small.id, "the shortest"
    assert must_take(runs).id == first.id, "40 + 50 of 101 bytes are promised"
    assert take(runs) is None
    jobs.accept(other)
    assert must_take(runs).id == other.id, "another node has its own room"
    assert jobs.position(second.id) == 0
    # The promise holds while the state waits, and ends when decoding begins.
    runs.finish_prefill(running, {}, "decode")
    assert take(runs) is None
    client.delete("tandem:wake:prefill")
    decoding = must_take(runs, "decode")
    assert client.exists("tandem:wake:prefill"), "the prefill worker is told"
    assert must_take(runs).id == second.id
    runs.finish(decoding, Result())


def test_a_state_larger_than_the_room_goes_alone(jobs: Jobs, runs: Runs) -> None:
    runs.publish_budget("local", limit=100, fixed=10, per_token=1.0)
    jobs.accept(new_job(tokens=5000))
    job = must_take(runs)
    jobs.accept(new_job(tokens=5))
    assert take(runs) is None
    runs.fail(job, "x", "y")
    must_take(runs)


@pytest.mark.parametrize("how", ["fail", "cancelled", "hand_back", "reclaim", "finish"])
def test_a_promise_ends_with_its_job(client: redis.Redis, jobs: Jobs, runs: Runs, how: str) -> None:
    runs.publish_budget("local", limit=100, fixed=10, per_token=1.0)
    new = new_job(tokens=20)
    jobs.accept(new)
    job = must_take(runs)
    assert client.zscore("tandem:promised:local", new.id) == 30
    match how:
        case "fail":
            runs.fail(job, "x", "y")
        case "reclaim":
            runs.reclaim(job, dead=True)
        case "finish":
            runs.finish_prefill(job, {}, "decode")
            assert client.exists("tandem:promised:local")
            runs.finish(must_take(runs, "decode"), Result())
        case _:
            getattr(runs, how)(job)
    assert not client.exists("tandem:promised:local")
    if jobs.get(new.id).status == "queued":
        jobs.cancel(new.id)
    assert_idle(client)


def test_stray_promises_are_freed(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    runs.publish_budget("local", limit=100, fixed=10, per_token=1.0)
    kept = new_job(tokens=20)
    jobs.accept(kept)
    must_take(runs)
    client.zadd("tandem:promised:local", {"resp_" + "0" * 32: 70})
    assert dict(Reclaimer(client).release_promises()) == {"released": 1}
    assert client.zrange("tandem:promised:local", 0, -1) == [kept.id.encode()]


def test_a_node_that_went_away_limits_nothing(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    runs.publish_budget("local", limit=10, fixed=10, per_token=1.0)
    assert 0 < client.ttl("tandem:budget:local") <= 1200
    client.delete("tandem:budget:local")
    for _ in range(3):
        jobs.accept(new_job())
    assert [take(runs) is not None for _ in range(3)] == [True] * 3


def test_the_forecast_follows_the_rule(jobs: Jobs, runs: Runs) -> None:
    running = new_job(tokens=10_000)
    jobs.accept(running)
    job = must_take(runs)
    runs.renew("prefill", "w", {"birth": "x"}, [(running.id, job.run, 4000)])
    long, short = new_job(tokens=3000), new_job(tokens=1000)
    jobs.accept(long)
    jobs.accept(short)
    forecast = jobs.forecast()
    assert [forecast[new.id].place for new in (short, long)] == [0, 1]
    assert forecast[short.id].start == pytest.approx(6.0)
    assert forecast[long.id].start == pytest.approx(7.0)
    assert jobs.predicted_wait(2000) == pytest.approx(7.0)
    assert jobs.predicted_wait(100) == pytest.approx(6.0)
    assert running.id not in forecast
    assert jobs.position(running.id) is None


def test_interactive_jobs_are_refused_rather_than_kept_waiting(client: redis.Redis) -> None:
    client.set("tandem:rate:prefill", 1000)
    jobs = Jobs(client, JobsConfig(max_wait_seconds=5, max_waiting=3))
    for _ in range(2):
        jobs.accept(new_job(tokens=4000, background=True))
    urgent = new_job(tokens=9000, priority="interactive")
    with pytest.raises(QueueFull, match="predicted wait is 8 s") as caught:
        jobs.accept(urgent)
    assert caught.value.retry_after == pytest.approx(3.0, abs=0.5)
    jobs.accept(new_job(tokens=500, priority="interactive"))
    with pytest.raises(QueueFull, match="3 jobs wait"):
        jobs.accept(new_job(background=True))
    assert len(jobs.list()) == 3
