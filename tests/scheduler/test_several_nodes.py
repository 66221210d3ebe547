"""Two prefill workers and two decode nodes on one Redis: homes, departures, deaths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from chaos_points import write_pid
from jobs_kit import (
    Hold,
    Worker,
    completed,
    eventually,
    new_job,
    nothing_left,
)

from scheduler.jobs import Jobs
from scheduler.record import NewJob

Start = Callable[..., Worker]


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a worker of a role on a node; all are killed in the end."""
    with ExitStack() as stack:

        def make(role: str, node: str, **options: Any) -> Worker:
            made = Worker(role, redis_url, node=node, lock_dir=str(tmp_path), **options)
            return stack.enter_context(made)

        yield make


def holder(client: redis.Redis, new: NewJob) -> str:
    return (client.hget(f"tandem:job:{new.id}", "holder") or b"").decode()


def expire(client: redis.Redis, new: NewJob) -> None:
    """The lease of whoever ran a job runs out: of one that is well it must not, whatever stalls,
    so that it is too long to be waited for."""
    client.zadd("tandem:leases", {new.id: 1.0}, xx=True)


def test_every_turn_goes_to_the_home_of_its_conversation(
    client: redis.Redis, jobs: Jobs, start: Start
) -> None:
    for node in ("m5", "m6"):
        start("prefill", node)
    homes = {start("decode", node).process.pid: node for node in ("m3", "m4")}
    # New conversations by way of either prefill node, and turns that begin at their home.
    news = [
        new_job(node=("m3", "m4")[k % 2], stage=("prefill", "decode")[k // 2 % 2])
        for k in range(12)
    ]
    for new in news:
        jobs.accept(new)
    for new in news:
        job = completed(client, jobs, new)
        assert job.output is not None
        assert homes[job.output["pid"]] == job.node == new.node
        assert job.queue == f"decode-{new.node}"
    nothing_left(client)


def test_a_prefill_node_that_leaves_is_drained(
    client: redis.Redis, jobs: Jobs, start: Start
) -> None:
    leaving, _ = start("prefill", "m5", chunk_s=0.02), start("decode", "m3")
    news = [new_job(node="m3", tokens=200) for _ in range(6)]
    for new in news:
        jobs.accept(new)
    eventually(lambda: any(jobs.get(new.id).prefilled_tokens for new in news), "nothing runs")
    leaving.send(15)
    start("prefill", "m6", chunk_s=0.02)
    for new in news:
        assert completed(client, jobs, new).attempts_by_stage["prefill"] == 1, (
            "none was begun twice"
        )
    assert leaving.stop() == 0
    nothing_left(client)


def test_what_a_dead_prefill_node_ran_goes_to_the_other(
    client: redis.Redis, jobs: Jobs, start: Start, tmp_path: Path
) -> None:
    write_pid(tmp_path / "limit", 100)
    dead = start("prefill", "m5", limit=str(tmp_path / "limit"))
    start("decode", "m3")
    new = new_job(node="m3", tokens=400)
    jobs.accept(new)
    eventually(lambda: jobs.get(new.id).prefilled_tokens, "it does not begin")
    assert holder(client, new) == "prefill:m5"
    start("prefill", "m6")
    dead.kill()
    expire(client, new)
    job = completed(client, jobs, new)
    assert job.attempts_by_stage["prefill"] == 2
    assert client.hget(f"tandem:job:{new.id}", "p_worker").startswith(b"prefill-m6-")
    nothing_left(client)


def test_a_dead_decode_node_keeps_its_jobs_and_no_others(
    client: redis.Redis, jobs: Jobs, start: Start, tmp_path: Path
) -> None:
    """Its conversations are there: their turns wait for it, while the other node goes on."""
    start("prefill", "m5")
    dead, _ = start("decode", "m3", step_s=0.01), start("decode", "m4")
    goes_on = tmp_path / "go"  # not before it has died
    homed = new_job(node="m3", answer=200, request={"until": str(goes_on)})
    jobs.accept(homed)
    eventually(lambda: jobs.get(homed.id).first_token_at, "it does not decode")
    dead.kill()
    expire(client, homed)
    goes_on.touch()
    other = new_job(node="m4")
    jobs.accept(other)
    completed(client, jobs, other)
    eventually(lambda: jobs.get(homed.id).status == "queued", "its lease does not run out")
    assert jobs.get(homed.id).queue == "decode-m3"
    start("decode", "m3")
    job = completed(client, jobs, homed)
    assert job.attempts_by_stage == {"prefill": 1, "decode": 2}
    nothing_left(client)


def test_a_decode_node_that_leaves_ends_what_it_runs(
    client: redis.Redis, jobs: Jobs, start: Start, tmp_path: Path
) -> None:
    start("prefill", "m5")
    said = Hold(tmp_path, "mid_decode", 5)
    leaving, _ = start("decode", "m3", slots=1, **said.spec), start("decode", "m4")
    news = [new_job(node="m3", answer=40) for _ in range(2)]
    for new in news:
        jobs.accept(new)
    said.reached()
    leaving.send(15)
    said.release()
    assert leaving.process.wait(90) == 0
    ended = [new for new in news if jobs.get(new.id).ended]
    assert len(ended) == 1, "the row that ran was finished, the other one waits"
    start("decode", "m3")
    for new in news:
        assert completed(client, jobs, new).attempts_by_stage["decode"] == 1
    nothing_left(client)
