"""The worker loops as real processes: the whole way, killed and frozen at every named point."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from jobs_kit import (
    Hold,
    Server,
    Worker,
    answer,
    assert_idle,
    eventually,
    is_stopped,
    new_job,
    oracle,
    started,
)
from rq.worker import BaseWorker

from scheduler import events, scripts
from scheduler.jobs import Jobs
from scheduler.queue import rq_queue
from scheduler.record import Job, NewJob, Stage, Status
from scheduler.redis_client import connect

#: Full counts instead of a sample.
SOAK = bool(os.environ.get("TANDEM_SOAK"))

#: Where a worker may die, and which one that is.
POINTS = [
    ("prefill", "before_take"),
    ("prefill", "after_take"),
    ("prefill", "mid_prefill"),
    ("prefill", "prefilled"),
    ("prefill", "after_handing_off"),
    ("prefill", "mid_hand_off"),
    ("prefill", "before_finish_prefill"),
    ("prefill", "after_finish_prefill"),
    ("decode", "before_take"),
    ("decode", "after_take"),
    ("decode", "mid_decode"),
    ("decode", "before_commit"),
    ("decode", "before_finish"),
    ("decode", "after_finish"),
]


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


@pytest.fixture
def stack(redis_url: str, tmp_path: Path) -> Iterator[Any]:
    """Starts workers; kills what is left of them afterwards."""
    yield from started(redis_url, lock_dir=str(tmp_path))


def reaches(jobs: Jobs, resp: str, *states: Status, seconds: float = 60.0) -> Job:
    """The job once it is in one of `states`."""

    def look() -> Job | None:
        job = jobs.get(resp)
        return job if job.status in states else None

    found: Job = eventually(look, f"{resp} does not reach {states}", seconds)
    return found


def check_answer(client: redis.Redis, jobs: Jobs, new: NewJob, seconds: float = 120.0) -> Job:
    job = jobs.wait(new.id, seconds)
    assert job.status == "completed", job.error
    assert answer(client, new.id) == oracle(new)
    return job


def test_many_jobs_through_two_workers(client: redis.Redis, jobs: Jobs, stack: Any) -> None:
    prefill, decode = stack("prefill"), stack("decode", slots=3)
    news = [new_job(answer=k % 5 + 1, tokens=20 + k) for k in range(20)]
    for new in news:
        jobs.accept(new)
    pids = set()
    for new in news:
        job = check_answer(client, jobs, new)
        assert job.handoff is not None
        assert job.handoff["path"] == "tcp"
        assert job.prefilled_tokens == job.prompt_tokens - 1
        assert job.output is not None
        pids.add(job.output["pid"])
    assert pids == {decode.process.pid}, "all in the one process that holds the model"
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)
    names = {worker.name.rsplit("-", 2)[0]: worker for worker in BaseWorker.all(client)}
    assert set(names) == {"prefill-local", "decode-local"}
    eventually(
        lambda: all(
            client.hget(worker.key, "state") == b"idle" for worker in BaseWorker.all(client)
        ),
        "workers are not shown as idle",
    )
    assert prefill.stop() == 0
    assert decode.stop() == 0
    assert BaseWorker.all(client) == []


@pytest.mark.parametrize(("role", "point"), POINTS if SOAK else POINTS[1::2])
def test_killed_at_a_point_the_job_ends_once(
    client: redis.Redis, jobs: Jobs, stack: Any, role: str, point: str
) -> None:
    options: dict[str, Any] = {"step_s": 0.005}
    other = stack("decode" if role == "prefill" else "prefill", **options)
    new = new_job(conversation="conv_a", lock=True, answer=8)
    jobs.accept(new)
    nth = 5 if point == "mid_decode" else 1
    victim = stack(role, point=point, nth=nth, **options)
    assert victim.process.wait(90) == -signal.SIGKILL
    # The successor takes the lock of its dead predecessor, so it takes back the job at boot.
    stack(role, **options)
    job = check_answer(client, jobs, new)
    assert job.attempts <= 2
    assert other.process.poll() is None
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_a_job_survives_that_redis_goes_away_when_it_has_just_been_taken(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    stack("prefill")
    new = new_job(answer=8)
    jobs.accept(new)
    said = Hold(tmp_path, "mid_decode", 5)
    victim = stack("decode", **said.spec)
    said.reached()
    eventually(lambda: jobs.get(new.id).first_token_at, "it has said nothing")
    victim.kill()
    stack("decode", away_at_replay=True)
    check_answer(client, jobs, new)
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


@pytest.mark.parametrize(
    ("stage", "part"), [("prefill", "request"), ("decode", "handoff"), ("decode", "prompt")]
)
def test_a_damaged_record_costs_its_own_job_alone(
    client: redis.Redis, jobs: Jobs, stack: Any, stage: Stage, part: str
) -> None:
    bad, good = new_job(stage=stage, tokens=20), new_job(stage=stage)
    for new in (bad, good):
        jobs.accept(new)
    if part == "prompt":
        client.setrange(f"tandem:prompt:{bad.id}", 8, b"\x63")
    else:
        client.hset(f"tandem:job:{bad.id}", part, b"\xc1\xff")
    stack("prefill")
    stack("decode")
    check_answer(client, jobs, good)
    ended = jobs.wait(bad.id, 60.0)
    assert ended.status == "failed"
    assert ended.error is not None
    assert f"is damaged ({part})" in ended.error["message"]
    assert {job.id for job in jobs.list()} == {bad.id, good.id}
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


FREEZING = [
    ("prefill", "before_finish_prefill"),
    ("decode", "mid_decode"),
    ("prefill", "mid_prefill"),
    ("decode", "before_finish"),
]


@pytest.mark.parametrize(("role", "point"), FREEZING if SOAK else FREEZING[:2])
def test_frozen_past_its_lease_a_worker_cannot_finish(
    client: redis.Redis, jobs: Jobs, stack: Any, role: str, point: str
) -> None:
    options: dict[str, Any] = {"step_s": 0.005}
    stack("decode" if role == "prefill" else "prefill", **options)
    new = new_job(answer=8)
    jobs.accept(new)
    nth = 2 if point == "mid_decode" else 1
    frozen = stack(role, point=point, nth=nth, act="stop", lease=3, **options)
    eventually(lambda: is_stopped(frozen.process.pid), "it does not freeze")
    before = jobs.get(new.id)
    # Another machine's worker of the same queue: it must wait for the lease.
    with Worker(role, frozen_url(client), **options):
        job = check_answer(client, jobs, new)
        log = events.read(client, new.id)
        frozen.send(signal.SIGCONT)
        assert job.run != before.run
        assert frozen.stop() == 0
        assert events.read(client, new.id) == log
        assert jobs.get(new.id) == job
    assert_idle(client)


def frozen_url(client: redis.Redis) -> str:
    return f"unix://{client.connection_pool.connection_kwargs['path']}"


def test_a_job_that_kills_its_worker_each_time_fails_clearly(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    new = new_job()
    jobs.accept(new)
    for _ in range(2):
        worker = stack("prefill", point="mid_prefill", max_attempts=2)
        assert worker.process.wait(90) == -signal.SIGKILL
    stack("prefill", max_attempts=2)
    job = jobs.wait(new.id, 60)
    assert job.status == "failed"
    assert job.error is not None
    assert job.error["code"] == "worker_lost"
    assert_idle(client)


@pytest.mark.parametrize("where", ["prefill", "tail", "add", "decode"])
def test_an_engine_error_concerns_its_own_job_only(
    client: redis.Redis, jobs: Jobs, stack: Any, where: str
) -> None:
    stack("prefill", log="CRITICAL")
    stack("decode", step_s=0.005, log="CRITICAL")
    bad = new_job(answer=3, request={"fail": where})
    good = [new_job(answer=20) for _ in range(3)]
    for new in (good[0], bad, *good[1:]):
        jobs.accept(new)
    for new in good:
        check_answer(client, jobs, new)
    job = jobs.wait(bad.id, 60)
    if where == "tail":
        assert job.status == "completed", "the decode node prefills by itself"
        assert job.handoff is not None
        assert job.handoff["path"] == "none"
    else:
        assert job.status == "failed"
        assert job.error is not None
        assert "secret detail" not in job.error["message"]
        assert events.read(client, bad.id)[-1].data["type"] == "response.failed"
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_a_decode_that_asks_for_it_gets_another_prefill(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    stack("prefill")
    stack("decode")
    new = new_job(request={"send_back": True})
    jobs.accept(new)
    check_answer(client, jobs, new)
    assert client.hget(f"tandem:job:{new.id}", "returns") == b"1"


@pytest.mark.parametrize("state", ["prefilling", "handing_off", "decoding"])
def test_cancel_acts_at_the_next_chunk_or_step(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path, state: Status
) -> None:
    # It stays in its state until it has been cancelled; an answer is long enough by itself.
    hold = Hold(tmp_path, "mid_hand_off" if state == "handing_off" else "mid_prefill", 2)
    if state == "handing_off":
        hold.spec["nth"] = 1
    stack("prefill", **({} if state == "decoding" else hold.spec), chunk_s=0.05)
    stack("decode", step_s=0.02)
    new, next_one = (new_job(tokens=40, answer=n) for n in (100_000, 3))
    jobs.accept(new)
    jobs.accept(next_one)
    reaches(jobs, new.id, state)
    if state == "decoding":
        eventually(lambda: jobs.get(new.id).first_token_at, "no token")
    else:
        hold.reached()
    jobs.cancel(new.id)
    hold.release()
    job = jobs.wait(new.id, 60)
    assert (job.status, job.error) == ("cancelled", None)
    log = events.read(client, new.id, count=1_000_000)
    assert log[-1].data["status"] == "cancelled"
    check_answer(client, jobs, next_one)
    assert events.read(client, new.id, count=1_000_000) == log, "no further tokens"
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)
    for queue in ("prefill", "decode"):
        assert rq_queue(queue, client).failed_job_registry.count == 0


def test_a_burst_of_cancels_leaves_a_working_queue(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    stack("prefill", chunk_s=0.001)
    stack("decode", step_s=0.001)
    news = [new_job(answer=10, tokens=30) for _ in range(100)]
    for new in news:
        jobs.accept(new)
    for new in news[5:]:
        jobs.cancel(new.id)
    for new in news[:5]:
        job = jobs.wait(new.id, 60)
        assert job.status == "completed"
        assert answer(client, new.id) == oracle(new)
    for new in news[5:]:
        assert jobs.wait(new.id, 60).status in ("cancelled", "completed")
        answer(client, new.id)
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_sigterm_finishes_what_runs(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    # Each is told to stop while it runs something: the second prompt, and both answers.
    second, goes_on = Hold(tmp_path, "mid_prefill", 5), tmp_path / "go"
    prefill = stack("prefill", **second.spec)
    news = [new_job(answer=150, request={"until": str(goes_on)}) for _ in range(2)]
    for new in news:
        jobs.accept(new)
    second.reached()
    assert jobs.get(news[1].id).status == "prefilling"
    prefill.send(signal.SIGTERM)
    second.release()
    assert prefill.process.wait(90) == 0
    assert jobs.get(news[1].id).stage == "decode"
    decode = stack("decode", step_s=0.005)
    for new in news:
        eventually(lambda new=new: jobs.get(new.id).first_token_at, "it says nothing")
    decode.send(signal.SIGTERM)
    goes_on.touch()
    assert decode.process.wait(90) == 0
    for new in news:
        check_answer(client, jobs, new)
    assert_idle(client)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_after_its_grace_a_worker_hands_back(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path, role: str
) -> None:
    slow = {"chunk_s": 0.1, "step_s": 0.05, "drain": 0}
    worker = stack(role, **slow)
    goes_on = tmp_path / "go"  # until then an answer has not ended, however late the stop comes
    new = new_job(
        stage=role,
        tokens=5000 if role == "prefill" else 40,
        answer=200,
        request={"until": str(goes_on)},
    )
    jobs.accept(new)
    reaches(jobs, new.id, "prefilling" if role == "prefill" else "decoding")
    assert worker.stop() == 0
    job = jobs.get(new.id)
    assert (job.status, job.attempts) == ("queued", 0)
    assert not client.exists("tandem:leases")
    assert jobs.position(new.id) == 0
    goes_on.touch()
    stack(role)
    if role == "decode":
        check_answer(client, jobs, new)
    else:
        reaches(jobs, new.id, "handing_off")


def test_a_second_signal_hands_back_at_once(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    chunk = Hold(tmp_path, "mid_prefill")
    worker = stack("prefill", drain=600, **chunk.spec)
    new = new_job(tokens=40)
    jobs.accept(new)
    chunk.reached()
    worker.send(signal.SIGTERM)

    def handed_back() -> bool:
        # The same signal within half a second is taken for an echo of the first.
        time.sleep(0.6)
        if jobs.get(new.id).status == "prefilling":
            worker.send(signal.SIGTERM)
        return jobs.get(new.id).status == "queued"

    eventually(handed_back, "it is not handed back")
    assert jobs.get(new.id).attempts == 0
    chunk.release()
    assert worker.process.wait(90) == 0


def test_a_hand_off_that_takes_too_long_is_given_back(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    tail = Hold(tmp_path, "mid_hand_off")
    worker = stack("prefill", drain=0, **tail.spec)
    new = new_job()
    jobs.accept(new)
    tail.reached()
    assert jobs.get(new.id).status == "handing_off"
    worker.send(signal.SIGTERM)
    assert reaches(jobs, new.id, "queued").attempts == 0
    tail.release()
    assert worker.process.wait(90) == 0
    assert jobs.get(new.id).status == "queued", "what came of it later counts for nothing"
    stack("prefill")
    reaches(jobs, new.id, "handing_off")


def test_several_nodes_share_the_work(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    firsts = [Hold(tmp_path, "mid_prefill") for _ in range(2)]
    for node, first in zip(("m5", "m6"), firsts, strict=True):
        stack("prefill", node=node, chunk_s=0.02, **first.spec)
    for node in ("m3", "m4"):
        stack("decode", node=node)
    news = [new_job(node=("m3", "m4")[k % 2]) for k in range(12)]
    for new in news:
        jobs.accept(new)
    for first in firsts:  # one that starts late takes its share as well
        first.reached()
    for first in firsts:
        first.release()
    ran: dict[str, set[Any]] = {"m3": set(), "m4": set()}
    for new in news:
        job = check_answer(client, jobs, new)
        assert job.output is not None
        ran[job.node].add(job.output["pid"])
    assert len(ran["m3"]) == len(ran["m4"]) == 1
    assert ran["m3"] != ran["m4"], "each conversation at its home"
    prefilled = {client.hget(f"tandem:job:{new.id}", "p_worker") for new in news}
    assert len({str(name).rsplit("-", 2)[0] for name in prefilled}) == 2, "both took a share"
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_two_workers_of_one_node_and_role_are_refused(stack: Any, jobs: Jobs) -> None:
    first = stack("prefill")
    new = new_job()
    jobs.accept(new)
    reaches(jobs, new.id, "handing_off")
    second = stack("prefill", quiet=True)
    _, stderr = second.process.communicate(timeout=90)
    assert second.process.returncode == 1
    assert b"another process serves prefill-local" in stderr
    assert first.process.poll() is None


def test_redis_killed_mid_run_loses_nothing(durable_redis: Server, tmp_path: Path) -> None:
    url = durable_redis.url
    client = connect(url)
    jobs = Jobs(client)
    options: dict[str, Any] = {"lock_dir": str(tmp_path), "log": "CRITICAL", "step_s": 0.01}
    prompt, said = Hold(tmp_path, "mid_prefill", 6 * 2 + 3), Hold(tmp_path, "mid_decode", 5)
    with (
        Worker("prefill", url, **options, **prompt.spec),
        Worker("decode", url, **options, **said.spec) as decode,
    ):
        news = [new_job(answer=100, tokens=60) for _ in range(4)]
        for new in news:
            jobs.accept(new)
        said.reached()
        prompt.reached()
        for new in news[:2]:  # their hand-offs end behind the next prompts, in any order
            reaches(jobs, new.id, "decoding")
        assert jobs.get(news[2].id).status == "prefilling"
        durable_redis.kill()
        prompt.release()
        said.release()
        time.sleep(1.0)  # an outage has to last; nothing is being waited for
        durable_redis.start()
        for new in news:
            job = check_answer(client, jobs, new)
            assert job.attempts == 1, "workers kept what they ran"
        # The listeners are back: a cancel reaches a running job.
        long = new_job(answer=100_000)
        jobs.accept(long)
        reaches(jobs, long.id, "decoding")
        jobs.cancel(long.id)
        assert jobs.wait(long.id, 60).status == "cancelled"
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
        known = [scripts.digest(name) for name in scripts.names()]
        eventually(lambda: all(client.script_exists(*known)), "the new server lacks scripts")
        assert decode.stop() == 0
    assert_idle(client)
    client.close()


def test_a_full_redis_delays_and_loses_nothing(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    jobs = Jobs(client)
    options: dict[str, Any] = {"log": "CRITICAL", "step_s": 0.01, "chunk_s": 0.02}
    said = Hold(tmp_path, "mid_decode", 5)
    with (
        Worker("prefill", redis_url, **options),
        Worker("decode", redis_url, **options, **said.spec),
    ):
        news = [new_job(answer=60, tokens=60) for _ in range(4)]
        for new in news:
            jobs.accept(new)
        said.reached()
        client.config_set("maxmemory", 1)
        said.release()
        try:
            time.sleep(1.0)  # it has to last; nothing is being waited for
            assert not all(jobs.get(new.id).ended for new in news)
        finally:
            client.config_set("maxmemory", 0)
        for new in news:
            check_answer(client, jobs, new)
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def test_what_was_accepted_survives_redis_alone(durable_redis: Server) -> None:
    client = connect(durable_redis.url)
    jobs = Jobs(client)
    news = [new_job() for _ in range(20)]
    for new in news:
        jobs.accept(new)
    durable_redis.kill()
    durable_redis.start()
    assert [jobs.position(new.id) for new in news] == list(range(20))
    client.close()
