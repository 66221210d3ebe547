"""The fenced steps of a run, and that RQ's own classes agree with what they leave."""

from __future__ import annotations

import dataclasses
import time
from typing import cast

import pytest
import redis
from jobs_kit import answer, assert_idle, new_job
from rq.job import JobStatus
from rq.worker import BaseWorker

from scheduler import events
from scheduler.config import JobsConfig
from scheduler.decode_loop import DecodeEngine, DecodeLoop
from scheduler.jobs import Jobs
from scheduler.nodes import Node
from scheduler.queue import rq_queue
from scheduler.reclaim import Reclaimer
from scheduler.record import Job, NewJob, Result
from scheduler.runs import Runs
from scheduler.serializer import pack
from scheduler.worker import LoopWorker

HOLDER = "prefill:local"


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


@pytest.fixture
def runs(client: redis.Redis) -> Runs:
    # A lease that outlasts any stall of a test: one whose lease is to run out takes it away.
    return Runs(client, JobsConfig(lease_seconds=600, max_attempts=2))


def take(runs: Runs, queue: str = "prefill", worker: str = "w1", holder: str = HOLDER) -> Job:
    job = runs.take(queue, worker, holder)
    assert job is not None
    return job


def delta(token: int) -> bytes:
    return pack({"type": "response.output_text.delta", "delta": f"{token} ", "ids": [token]})


def test_a_job_goes_through_both_stages(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    new = new_job(conversation="conv_a", lock=True)
    jobs.accept(new)
    first = take(runs)
    assert (first.status, first.attempts, first.prompt_ids) == ("prefilling", 1, new.prompt_ids)
    prefill, decode = rq_queue("prefill", client), rq_queue("decode", client)
    assert prefill.started_job_registry.get_job_ids() == [f"{new.id}-p"]
    assert runs.renew("prefill", "w1", {"birth": "x"}, [(new.id, first.run, 20)]) == ["ok"]
    assert jobs.get(new.id).prefilled_tokens == 20
    assert runs.handing_off(first, 39) == "ok"
    assert jobs.get(new.id).status == "handing_off"
    facts = {"bytes": 7, "path": "tcp"}
    assert runs.finish_prefill(first, facts, "decode", 39) == "ok"
    assert runs.finish_prefill(first, facts, "decode", 39) == "ok", "sent twice"
    assert prefill.finished_job_registry.get_job_ids() == [f"{new.id}-p"]
    assert decode.job_ids == [f"{new.id}-d"]
    second = take(runs, "decode", "w2", "decode:local")
    assert (second.status, second.handoff, second.attempts) == ("decoding", facts, 1)
    assert second.prompt_ids == new.prompt_ids
    assert runs.append(second, 3, [delta(5), delta(6)], True) == "ok"
    assert jobs.get(new.id).first_token_at is not None
    result = Result(output={"text": "5 6 "}, usage={"output_tokens": 2}, computed_tokens=40)
    assert runs.finish(second, result, 5) == "ok"
    assert runs.finish(second, result, 5) == "done", "sent twice"
    job = jobs.get(new.id)
    assert (job.status, job.output, job.computed_tokens) == ("completed", {"text": "5 6 "}, 40)
    assert list(job.times) == [
        "queued",
        "prefilling",
        "handing_off",
        "decoding",
        "completed",
    ]
    assert list(job.times.values()) == sorted(job.times.values())
    assert answer(client, new.id) == [5, 6]
    assert decode.finished_job_registry.get_job_ids() == [f"{new.id}-d"]
    shown = decode.fetch_job(f"{new.id}-d")
    assert shown is not None
    assert shown.get_status() == JobStatus.FINISHED
    assert_idle(client)


def test_taking_twice_with_one_run_takes_one_job(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    for _ in range(2):
        jobs.accept(new_job())
    first, again = (runs.take("prefill", "w1", HOLDER, run="f" * 32) for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.id == again.id
    assert rq_queue("prefill", client).count == 1


def test_a_run_that_lost_its_job_changes_nothing(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    new = new_job(stage="decode")
    jobs.accept(new)
    old = take(runs, "decode")
    runs.append(old, 3, [delta(1)], True)
    assert runs.reclaim(old, dead=True) == "requeued"
    fresh = take(runs, "decode", "w2")
    assert (fresh.attempts, fresh.events) == (2, 4)
    before = client.hgetall(f"tandem:job:{new.id}")
    assert runs.append(old, 4, [delta(2)], True) == "lost"
    assert runs.finish(old, Result()) == "lost"
    assert runs.fail(old, "x", "y") == "lost"
    assert runs.cancelled(old) == "lost"
    assert runs.hand_back(old) == "lost"
    assert runs.send_back(old) == "lost"
    assert runs.handing_off(old) == "lost"
    assert runs.finish_prefill(old, {}, "decode") == "lost"
    assert runs.renew("decode", "w1", {"birth": "x"}, [(new.id, old.run, 9)]) == ["lost"]
    assert client.hgetall(f"tandem:job:{new.id}") == before
    assert runs.append(fresh, 4, [delta(2)], True) == "ok"
    assert runs.finish(fresh, Result(), 5) == "ok"
    assert answer(client, new.id) == [1, 2]
    assert_idle(client)


def test_events_sent_twice_or_too_far_ahead(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    new = new_job(stage="decode")
    jobs.accept(new)
    job = take(runs, "decode")
    assert runs.append(job, 3, [delta(1), delta(2)], True) == "ok"
    assert runs.append(job, 3, [delta(1), delta(2)], True) == "ok"
    assert runs.append(job, 4, [delta(2), delta(3)], True) == "ok"
    assert runs.append(job, 9, [delta(9)], True) == "behind"
    assert runs.finish(job, Result(), 9) == "behind"
    assert runs.finish(job, Result(), 6) == "ok"
    assert runs.append(job, 6, [delta(4)], True) == "done"
    assert answer(client, new.id) == [1, 2, 3]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_leases_expire_and_attempts_are_bounded(
    client: redis.Redis, jobs: Jobs, runs: Runs, stage: str
) -> None:
    new = new_job(stage=stage, conversation="conv_a", lock=True)
    jobs.accept(new)
    reclaimer = Reclaimer(client, runs.settings)
    take(runs, stage)
    assert not reclaimer.expired()
    client.zadd("tandem:leases", {new.id: 1.0})
    assert dict(reclaimer.expired()) == {"requeued": 1}
    assert jobs.get(new.id).status == "queued"
    assert rq_queue(stage, client).job_ids == [f"{new.id}-{stage[0]}"]
    second = take(runs, stage, "w2")
    assert second.attempts == 2
    client.zadd("tandem:leases", {new.id: 1.0})
    assert dict(reclaimer.expired()) == {"failed": 1}
    job = jobs.get(new.id)
    assert job.status == "failed"
    assert job.error is not None
    assert "died or froze 2 times" in job.error["message"]
    assert answer(client, new.id) == []
    assert rq_queue(stage, client).failed_job_registry.get_job_ids() == [f"{new.id}-{stage[0]}"]
    assert_idle(client)


def test_boot_takes_back_only_what_the_predecessor_had(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    mine, other = new_job(), new_job()
    jobs.accept(mine)
    jobs.accept(other)
    take(runs, holder="prefill:local")
    take(runs, holder="prefill:m5")
    assert dict(Reclaimer(client, runs.settings).at_boot("prefill:local")) == {"requeued": 1}
    assert rq_queue("prefill", client).job_ids == [f"{mine.id}-p"]


def test_a_damaged_record_holds_up_no_boot(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    for _ in range(2):
        jobs.accept(new_job())
        client.hset(f"tandem:job:{take(runs, holder='prefill:local').id}", "request", b"\xc1")
    assert dict(Reclaimer(client, runs.settings).at_boot("prefill:local")) == {"requeued": 2}


def test_no_reclaim_in_the_first_lease_after_an_outage(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    new = new_job()
    jobs.accept(new)
    take(runs)
    client.zadd("tandem:leases", {new.id: 1.0})
    reclaimer = Reclaimer(client, runs.settings)
    reclaimer.outage()
    assert not reclaimer.expired()
    assert jobs.get(new.id).status == "prefilling"


def test_a_waiting_job_that_rq_lost_comes_back(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    kept, lost = new_job(), new_job()
    jobs.accept(kept)
    jobs.accept(lost)
    queue = rq_queue("prefill", client)
    shown = queue.fetch_job(f"{lost.id}-p")
    assert shown is not None
    shown.delete()
    assert queue.job_ids == [f"{kept.id}-p"]
    assert dict(Reclaimer(client, runs.settings).reconcile()) == {"requeued": 1}
    assert sorted(queue.job_ids) == sorted(f"{new.id}-p" for new in (kept, lost))
    assert queue.fetch_job(f"{lost.id}-p") is not None


def test_what_is_not_a_job_of_ours_is_never_run(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    queue = rq_queue("prefill", client)
    evil = queue.enqueue("os.system", "true", job_id="evil")
    ended = new_job()
    jobs.accept(ended)
    jobs.cancel(ended.id)
    client.rpush("rq:queue:prefill", f"{ended.id}-p", "nonsense", f"{ended.id}-d")
    good = new_job()
    jobs.accept(good)
    assert take(runs).id == good.id
    assert runs.take("prefill", "w1", HOLDER) is None
    assert evil.get_status() == JobStatus.FAILED
    assert jobs.get(ended.id).status == "cancelled"
    assert len(events.read(client, ended.id)) == 3


def test_a_late_heartbeat_brings_no_worker_back(
    client: redis.Redis, redis_url: str, runs: Runs
) -> None:
    worker = LoopWorker(redis_url, "prefill")
    worker.register_birth()  # type: ignore[no-untyped-call]  # RQ has no annotations here
    worker._renew(runs, [])
    assert [one.name for one in BaseWorker.all(client)] == [worker.name]
    assert client.ttl(worker.key) > 600
    worker.register_death()  # type: ignore[no-untyped-call]  # as above
    worker._renew(runs, [])
    assert BaseWorker.all(client) == []
    assert client.ttl(worker.key) <= 60


@pytest.mark.parametrize(
    "how", ["finish_prefill", "hand_back", "send_back", "reclaim", "cancelled"]
)
def test_a_flagged_job_ends_cancelled_whatever_its_worker_does(
    client: redis.Redis, jobs: Jobs, runs: Runs, how: str
) -> None:
    new = new_job(conversation="conv_a", lock=True)
    jobs.accept(new)
    job = take(runs)
    assert jobs.cancel(new.id) == "prefilling"
    assert runs.renew("prefill", "w1", {"birth": "x"}, [(new.id, job.run, 1)]) == ["cancel"]
    match how:
        case "finish_prefill":
            assert runs.finish_prefill(job, {}, "decode") == "cancel"
        case "reclaim":
            assert runs.reclaim(job, dead=True) == "cancelled"
        case "cancelled":
            assert runs.cancelled(job) == "ok"
        case _:
            assert getattr(runs, how)(job) == "cancelled"
    assert jobs.get(new.id).status == "cancelled"
    assert answer(client, new.id) == []
    assert_idle(client)


def test_an_end_that_races_a_cancel_stays(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    new = new_job(stage="decode")
    jobs.accept(new)
    job = take(runs, "decode")
    jobs.cancel(new.id)
    assert runs.finish(job, Result(), 3) == "ok"
    assert jobs.cancel(new.id) == "completed"
    assert answer(client, new.id) == []


def test_handing_back_costs_no_attempt(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    first, second = new_job(), new_job()
    jobs.accept(first)
    jobs.accept(second)
    for _ in range(5):
        job = take(runs)
        assert (job.id, job.attempts) == (first.id, 1), "it waits in front"
        assert runs.hand_back(job) == "requeued"


def test_a_decode_whose_state_is_gone_is_prefilled_again(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    new = new_job()
    jobs.accept(new)
    for turn in range(3):
        runs.finish_prefill(take(runs), {"bytes": 1}, "decode")
        decode = take(runs, "decode", holder="decode:local")
        if turn == 0:
            runs.append(decode, 3, [delta(1)], True)
        assert runs.send_back(decode) == ("requeued" if turn < 2 else "failed")
        assert jobs.get(new.id).stage == ("prefill" if turn < 2 else "decode")
    assert answer(client, new.id) == [1]
    assert_idle(client)


def test_rq_clean_up_of_an_expired_lease_does_not_matter(
    client: redis.Redis, jobs: Jobs, runs: Runs
) -> None:
    """A dashboard that counts the started jobs runs RQ's own clean-up."""
    new: NewJob = new_job(stage="decode")
    jobs.accept(new)
    job = take(runs, "decode")
    queue = rq_queue("decode", client)
    client.zadd("rq:wip:decode", {f"{new.id}-d:{job.run}": 1.0})
    assert queue.started_job_registry.count == 0
    assert queue.failed_job_registry.get_job_ids() == [f"{new.id}-d"]
    assert runs.renew("decode", "w1", {"birth": "x"}, [(new.id, job.run, -1)]) == ["ok"]
    assert queue.started_job_registry.get_job_ids() == [f"{new.id}-d"]
    assert queue.failed_job_registry.count == 0
    assert runs.finish(job, Result(), 3) == "ok"
    assert queue.finished_job_registry.get_job_ids() == [f"{new.id}-d"]
    assert_idle(client)


def test_a_waiting_prefill_is_taken_over(client: redis.Redis, jobs: Jobs, runs: Runs) -> None:
    first, second, other = new_job(), new_job(), new_job(node="m4")
    for new in (first, second, other):
        jobs.accept(new)
    running = take(runs)
    assert running.id == first.id
    assert runs.take_over("local", 0) == 0
    assert runs.take_over("local", 5) == 1, "not what runs, nor another node's"
    assert runs.take_over("local", 5) == 0
    prefill, decode = rq_queue("prefill", client), rq_queue("decode", client)
    assert prefill.job_ids == [f"{other.id}-p"]
    assert decode.job_ids == [f"{second.id}-d"]
    moved = take(runs, "decode", "w2", "decode:local")
    assert (moved.id, moved.status, moved.handoff) == (second.id, "prefilling", None)
    assert moved.prompt_ids == second.prompt_ids
    assert runs.finish(moved, Result("completed", output=[]), 0) == "ok"
    assert jobs.get(second.id).status == "completed"
    assert runs.finish_prefill(running, {"path": "tcp"}, "decode", 39) == "ok"


class _Roomy:
    """As much of a decode engine as waits for work."""

    def free(self) -> int:
        return 4


def test_a_prompt_is_taken_over_at_once_where_no_prefill_node_is_known(
    redis_url: str, client: redis.Redis, jobs: Jobs
) -> None:
    """The look that comes four times a lease, here every 150 s, is not waited for."""
    settings = JobsConfig(lease_seconds=600)
    loop = DecodeLoop(redis_url, cast(DecodeEngine, _Roomy()), settings=settings)
    runs = Runs(client, settings)
    loop._admit()  # it has room

    def accepted() -> str:
        jobs.accept(new := new_job())
        loop._await_work(client, runs)
        return jobs.get(new.id).stage

    loop.also_reclaim(client)
    assert accepted() == "prefill", "a short absence is waited for"
    assert client.llen("tandem:wake:prefill") == 1
    client.delete("tandem:wake:prefill")
    loop._alone_since = time.monotonic() - 601.0
    assert accepted() == "decode"
    client.delete("tandem:wake:decode")
    node = Node("prefill", "m5", state="starting")
    client.set(node.key, pack(dataclasses.asdict(node)))
    assert accepted() == "prefill", "it has come since"
    assert client.llen("tandem:wake:prefill") == 1, "what woke the wrong one wakes it"
    assert accepted() == "prefill"
    assert client.llen("tandem:wake:prefill") == 1, "it is left alone from then on"
    loop.connection.close()
