"""Which job is next: the rule, at the pick, at chunk boundaries and among very many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from chaos_points import write_pid
from jobs_kit import Worker, answer, assert_idle, eventually, new_job, oracle

from scheduler import policy, scripts
from scheduler.bench import waiting as bench_waiting
from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.runs import Runs

SETTINGS = JobsConfig()


@pytest.fixture
def jobs(client: redis.Redis) -> Iterator[Jobs]:
    client.set("tandem:rate:prefill", 1000)
    return Jobs(client)


def order(client: redis.Redis, holder: str = "prefill:local", queue: str = "prefill") -> list[str]:
    """Ids in the order in which one worker would take them, all at this moment."""
    taken = []
    while job := Runs(client).take(queue, "w", holder):
        taken.append(job.id)
    return taken


def age(client: redis.Redis, resp: str, seconds: float) -> None:
    """Make a waiting job older."""
    created = float(client.hget(f"tandem:job:{resp}", "created_at") or 0)
    client.hset(f"tandem:job:{resp}", "created_at", created - seconds)
    for index in ("due",):
        client.zincrby(f"tandem:{index}:prefill", -seconds, resp)


def accept(jobs: Jobs, tokens: int, **changes: Any) -> str:
    new = new_job(tokens=tokens, **changes)
    jobs.accept(new)
    return new.id


def test_short_work_first_then_what_has_waited(client: redis.Redis, jobs: Jobs) -> None:
    long, short, middle = (accept(jobs, n) for n in (9000, 100, 3000))
    aged = accept(jobs, 9500)
    age(client, aged, 200.0)  # a minute more, for a test that is held up, changes no place
    overdue, more_overdue = accept(jobs, 20_000), accept(jobs, 500)
    age(client, overdue, 450.0)
    age(client, more_overdue, 500.0)
    assert order(client) == [more_overdue, overdue, short, middle, aged, long]


def test_what_counts_is_what_is_left_to_compute(client: redis.Redis, jobs: Jobs) -> None:
    held = accept(jobs, 60_000, held_tokens=59_900, stage="decode")
    plain = accept(jobs, 1000, stage="decode")
    assert order(client, queue="decode") == [held, plain]
    # A prefill worker computes the whole prompt, whatever a decode node holds of it.
    held = accept(jobs, 60_000, held_tokens=59_900)
    plain = accept(jobs, 1000)
    assert jobs.forecast("prefill")[held].start == pytest.approx(1.0)
    assert order(client) == [plain, held]


def test_what_decode_sends_back_is_as_long_as_its_prompt(client: redis.Redis, jobs: Jobs) -> None:
    sent = accept(jobs, 5000, held_tokens=4990, stage="decode")
    job = Runs(client).take("decode", "w", "decode:local")
    assert job is not None
    assert Runs(client).send_back(job) == "requeued"
    short, long = accept(jobs, 1000), accept(jobs, 9000)
    assert order(client) == [short, sent, long]


def test_a_parked_prefix_counts_for_the_worker_that_has_it(client: redis.Redis, jobs: Jobs) -> None:
    parked = accept(jobs, 50_000)
    job = Runs(client).take("prefill", "w", "prefill:m5")
    assert job is not None
    plain = accept(jobs, 1000)
    Runs(client).hand_back(job, holder="prefill:m5", parked=49_500)
    other = accept(jobs, 2000)
    assert order(client, "prefill:elsewhere")[0] == plain
    for resp in (parked, plain, other):
        jobs.cancel(resp)
    parked = accept(jobs, 50_000)
    job = Runs(client).take("prefill", "w", "prefill:m5")
    assert job is not None
    plain = accept(jobs, 1000)
    Runs(client).hand_back(job, holder="prefill:m5", parked=49_500)
    assert order(client, "prefill:m5") == [parked, plain]


def test_classes_weigh_and_never_starve(client: redis.Redis, jobs: Jobs) -> None:
    batch = accept(jobs, 1000, priority="batch")
    normal = accept(jobs, 1500)
    interactive = accept(jobs, 2000, priority="interactive")
    assert order(client) == [interactive, normal, batch]
    old = accept(jobs, 1000, priority="batch")
    age(client, old, 4 * SETTINGS.horizon_seconds)
    normal = accept(jobs, 10)
    assert order(client) == [old, normal]


def test_a_deadline_comes_first_when_it_is_near(client: redis.Redis, jobs: Jobs) -> None:
    short = accept(jobs, 50)
    near = accept(jobs, 10_000, deadline=9.9)
    far = accept(jobs, 10_000, deadline=10_000.0)
    age(client, near, 5.0)
    assert order(client) == [near, short, far]


def test_a_flood_of_one_owner_does_not_shut_out_another(client: redis.Redis, jobs: Jobs) -> None:
    flood = [accept(jobs, 1000, owner="flood") for _ in range(30)]
    for resp in flood:
        age(client, resp, 100.0)
    modest = accept(jobs, 2500, owner="modest")
    place = order(client).index(modest)
    assert place < 6, "it waits for a few of the other's jobs, not for thirty"


def test_a_job_is_only_parked_for_a_much_better_one(client: redis.Redis, jobs: Jobs) -> None:
    runs = Runs(client)
    accept(jobs, 40_000)
    job = runs.take("prefill", "w", "prefill:local")
    assert job is not None

    def better(prefilled: int) -> bool:
        return runs.look_ahead(job, "prefill", "prefill:local", prefilled).better

    assert not better(8192), "nobody waits"
    accept(jobs, 30_000)
    assert not better(8192), "as much work as is left here"
    short = accept(jobs, 500)
    assert better(8192)
    assert not better(39_600), "nearly done"
    jobs.cancel(short)
    age(client, job.id, 500.0)
    accept(jobs, 10)
    assert not better(8192), "what is overdue itself is not parked"


def test_a_short_interactive_job_is_seen_at_the_boundary(client: redis.Redis, jobs: Jobs) -> None:
    runs = Runs(client)
    running = accept(jobs, 40_000, priority="interactive")
    job = runs.take("prefill", "w", "prefill:local")
    assert job is not None
    assert job.id == running

    def waits(prefilled: int) -> bool:
        return runs.look_ahead(job, "prefill", "prefill:local", prefilled).interactive

    accept(jobs, 100)
    accept(jobs, 100, priority="batch")
    long = accept(jobs, 50_000, priority="interactive")
    assert not waits(8192), "none is interactive and short"
    short = accept(jobs, 30_000, priority="interactive")
    assert waits(8192)
    assert not waits(20_000), "it is longer than what is left"
    jobs.cancel(short)
    assert not waits(8192)
    age(client, running, 1000.0)
    short = accept(jobs, 10, priority="interactive")
    assert waits(8192), "also where the running job is overdue and will not be parked"
    for resp in (long, short):
        jobs.cancel(resp)


def test_pick_list_and_cancel_among_very_many(client: redis.Redis) -> None:
    """What it costs is measured by `tandem bench queue`."""
    report = bench_waiting.run(client, 10_000 if os.environ.get("TANDEM_SOAK") else 2000)
    print(report)
    assert report["bytes_per_job"] - report["prompt_bytes_per_job"] < 10_000


def test_a_long_prefill_is_parked_and_nothing_is_computed_twice(
    client: redis.Redis, redis_url: str, jobs: Jobs, tmp_path: Path
) -> None:
    client.set("tandem:rate:prefill", 200)
    limit = tmp_path / "limit"
    write_pid(limit, 50)  # no further, until the short one has come and gone
    with (
        Worker("prefill", redis_url, chunk_s=0.01, parks=2, limit=str(limit)),
        Worker("decode", redis_url),
    ):
        long = new_job(tokens=401)
        jobs.accept(long)
        eventually(lambda: jobs.get(long.id).prefilled_tokens >= 50, "the long one does not begin")
        short = new_job(tokens=21)
        jobs.accept(short)
        first = jobs.wait(short.id, 60)
        assert not jobs.get(long.id).ended
        write_pid(limit, 1000)
        second = jobs.wait(long.id, 60)
        for new, job in ((short, first), (long, second)):
            assert job.status == "completed"
            assert answer(client, new.id) == oracle(new)
        assert second.handoff is not None
        assert second.handoff["chunks"] == 40, "400 tokens in chunks of 10, each computed once"
        assert second.attempts == 1
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_vanished_records_do_not_block_the_queue(client: redis.Redis, jobs: Jobs) -> None:
    gone = [accept(jobs, 10) for _ in range(80)]
    client.delete(*(f"tandem:job:{resp}" for resp in gone))
    kept = accept(jobs, 5000)
    taken = [Runs(client).take("prefill", "w", "prefill:local") for _ in range(4)]
    assert [job.id for job in taken if job] == [kept]
    assert client.zcard("tandem:size:prefill") == 0


def test_every_script_loads(client: redis.Redis) -> None:
    names = "accept append better cancel finish handing_off prefilled release renew restore take"
    for name in (*names.split(), "simulate"):
        assert client.script_load(scripts.source(name)) == scripts.digest(name)
    assert policy.arguments(SETTINGS)["weights"]["normal"] == 1.0
