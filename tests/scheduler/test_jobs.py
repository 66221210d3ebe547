"""Accepting, cancelling and listing jobs; what RQ sees of them."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import redis
from jobs_kit import assert_idle, new_job
from rq import Queue

from scheduler import events
from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.queue import rq_queue
from scheduler.record import (
    ConversationBusy,
    IdempotencyConflict,
    JobError,
    JobNotFound,
    NewJob,
    Result,
    response_id,
)
from scheduler.runs import Runs


def test_accepted_job_is_recorded_queued_and_told(client: redis.Redis) -> None:
    jobs = Jobs(client)
    new = new_job(tokens=12, owner="ada", held_tokens=5, request={"secret": "prompt text"})
    assert not jobs.accept(new).duplicate
    job = jobs.get(new.id, prompt=True)
    assert (job.status, job.stage, job.queue, job.owner) == ("queued", "prefill", "prefill", "ada")
    assert (job.prompt_tokens, job.new_tokens) == (12, 7)
    assert job.prompt_ids == list(new.prompt_ids) == jobs.prompt_ids(new.id)
    assert job.request == new.request
    assert [e.data["type"] for e in events.read(client, new.id)] == [
        "response.created",
        "response.queued",
    ]
    assert jobs.counts()["queued"] == 1
    assert [listed.id for listed in jobs.list()] == [new.id]


def test_rq_sees_a_queued_job_without_the_prompt(client: redis.Redis) -> None:
    new = new_job(tokens=12, request={"secret": "prompt text"})
    Jobs(client).accept(new)
    queue = rq_queue("prefill", client)
    assert queue.job_ids == [f"{new.id}-p"]
    job = queue.fetch_job(f"{new.id}-p")
    assert job is not None
    assert (job.func_name, list(job.args), job.timeout) == ("tandem.prefill", [new.id], -1)
    assert job.description == f"{new.id} 12 tokens"
    assert job.is_queued
    assert b"prompt text" not in b"".join(client.hgetall(job.key).values())
    assert {q.name for q in Queue.all(connection=client)} == {"prefill"}


def test_a_resumed_turn_starts_at_its_decode_node(client: redis.Redis) -> None:
    jobs = Jobs(client)
    here, there = new_job(stage="decode"), new_job(stage="decode", node="m3")
    jobs.accept(here)
    jobs.accept(there)
    assert rq_queue("decode", client).job_ids == [f"{here.id}-d"]
    assert rq_queue("decode-m3", client).job_ids == [f"{there.id}-d"]


def test_same_key_is_the_same_job_and_another_body_a_conflict(client: redis.Redis) -> None:
    jobs = Jobs(client)
    resp = response_id("ada", "key-1")
    assert resp == response_id("ada", "key-1") != response_id("bob", "key-1")
    assert response_id("a", "bc") != response_id("ab", "c")
    first = new_job(id=resp, digest="d1")
    assert not jobs.accept(first).duplicate
    assert jobs.accept(first).duplicate
    with pytest.raises(IdempotencyConflict):
        jobs.accept(new_job(id=resp, digest="d2"))
    assert rq_queue("prefill", client).job_ids == [f"{resp}-p"]
    assert len(events.read(client, resp)) == 2


def test_concurrent_submissions_under_one_key_make_one_job(
    client: redis.Redis, redis_url: str
) -> None:
    jobs, resp = Jobs(client), response_id("ada", "race")
    bodies = [new_job(id=resp, digest=f"d{k % 2}") for k in range(16)]
    outcomes: list[str] = []

    def submit(new: NewJob) -> None:
        try:
            outcomes.append("duplicate" if jobs.accept(new).duplicate else new.digest)
        except IdempotencyConflict:
            outcomes.append("conflict")

    threads = [threading.Thread(target=submit, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes).count("conflict") == 8
    assert outcomes.count("duplicate") == 7
    assert rq_queue("prefill", client).count == 1


def test_a_conversation_has_one_live_turn(client: redis.Redis) -> None:
    jobs = Jobs(client)
    first = new_job(conversation="conv_a", lock=True)
    jobs.accept(first)
    with pytest.raises(ConversationBusy) as caught:
        jobs.accept(new_job(conversation="conv_a", lock=True))
    assert caught.value.holder == first.id
    jobs.accept(new_job(conversation="conv_b", lock=True))
    branch = new_job(conversation="conv_a")
    jobs.accept(branch)
    jobs.cancel(first.id)
    jobs.accept(new_job(conversation="conv_a", lock=True))


def test_cancelling_a_queued_job_ends_it_at_once(client: redis.Redis) -> None:
    jobs = Jobs(client)
    new = new_job(conversation="conv_a", lock=True)
    jobs.accept(new)
    assert jobs.cancel(new.id) == "cancelled"
    assert jobs.cancel(new.id) == "cancelled"
    job = jobs.get(new.id)
    assert (job.status, job.reason, job.error) == ("cancelled", "cancelled", None)
    log = events.read(client, new.id)
    assert log[-1].data == {
        "type": "response.incomplete",
        "status": "cancelled",
        "reason": "cancelled",
    }
    assert Runs(client).take("prefill", "w", "prefill:local") is None
    queue = rq_queue("prefill", client)
    assert queue.count == 0
    shown = queue.fetch_job(f"{new.id}-p")
    assert shown is not None
    assert shown.is_canceled
    assert_idle(client)


def test_ended_jobs_expire_and_live_ones_do_not(client: redis.Redis) -> None:
    jobs = Jobs(client)
    live, ended = new_job(), new_job()
    jobs.accept(live)
    jobs.accept(ended)
    jobs.cancel(ended.id)
    for kind in ("job", "events", "prompt"):
        assert client.ttl(f"tandem:{kind}:{live.id}") == -1
        assert 0 < client.ttl(f"tandem:{kind}:{ended.id}") <= 7 * 86_400
    assert 0 < client.ttl(f"rq:job:{ended.id}-p") <= 86_400


def test_unknown_jobs_and_bad_arguments_are_told_apart(client: redis.Redis) -> None:
    jobs = Jobs(client)
    for call in (jobs.get, jobs.cancel, jobs.prompt_ids, jobs.position):
        with pytest.raises(JobNotFound):
            call(response_id())
    with pytest.raises(JobError, match="response id"):
        jobs.accept(new_job(id="../x"))
    with pytest.raises(JobError, match="prompt"):
        jobs.accept(new_job(prompt_ids=[]))
    with pytest.raises(JobError, match="held_tokens"):
        jobs.accept(new_job(tokens=4, held_tokens=4))
    with pytest.raises(JobError, match="conversation"):
        jobs.accept(new_job(lock=True))
    assert client.dbsize() == 0


def test_positions_follow_the_queue(client: redis.Redis) -> None:
    jobs = Jobs(client)
    news = [new_job() for _ in range(3)]
    for new in news:
        jobs.accept(new)
    assert [jobs.position(new.id) for new in news] == [0, 1, 2]
    Runs(client).take("prefill", "w", "prefill:local")
    assert [jobs.position(new.id) for new in news] == [None, 0, 1]


def test_a_full_redis_refuses_and_leaves_nothing(client: redis.Redis) -> None:
    jobs = Jobs(client)
    jobs.accept(new_job())
    keys = client.dbsize()
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(JobError, match="memory"):
            jobs.accept(new_job())
        assert client.dbsize() == keys
        assert len(jobs.list()) == 1
    finally:
        client.config_set("maxmemory", 0)
    jobs.accept(new_job())


def test_a_list_shows_the_newest_without_their_answers(client: redis.Redis) -> None:
    jobs, runs = Jobs(client), Runs(client)
    ids = []
    for _ in range(6):
        new = new_job(stage="decode")
        jobs.accept(new)
        ids.append(new.id)
    for _ in range(3):
        job = runs.take("decode", "w", "decode:local")
        assert job is not None
        runs.finish(job, Result(output={"text": "x"}, usage={"output_tokens": 6}))
    assert [job.id for job in jobs.list(limit=4)] == ids[:1:-1]
    done = jobs.list(("completed",))
    assert len(done) == 3
    assert [job.output for job in done] == [None] * 3
    assert jobs.list(limit=10) == [
        dataclasses.replace(jobs.get(resp), output=None) for resp in reversed(ids)
    ]


def test_a_prompt_is_kept_for_less_long_than_its_answer(client: redis.Redis) -> None:
    jobs, runs = Jobs(client, JobsConfig(result_days=2)), Runs(client, JobsConfig(result_days=2))
    new = new_job(stage="decode")
    jobs.accept(new)
    job = runs.take("decode", "w", "decode:local")
    assert job is not None
    assert client.ttl(f"tandem:prompt:{new.id}") == -1, "while it runs it stays"
    runs.finish(job, Result())
    assert 3500 < client.ttl(f"tandem:prompt:{new.id}") <= 3600
    for name in ("job", "events"):
        assert client.ttl(f"tandem:{name}:{new.id}") > 86_400
