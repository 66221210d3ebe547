"""Reports from people who ran job queues and such servers before, as tests.

The case, what went wrong there, and what stands for it here (in this module where none is named):

- Q01: a prefill's failure was overwritten by decode results of the same step. Here: one process
  each; `test_loops::test_an_engine_error_concerns_its_own_job_only`,
  `engine/test_decode::test_a_failing_row_ends_alone`.
- Q02: cancel raced completion. Here: `test_interleavings`.
- Q03: two equal, nearly cached requests at once. Here: `test_equal_requests_at_the_same_moment`.
- Q04: sampler filed under a neighbour's row. Here:
  `engine/test_decode::test_seeded_rows_do_not_depend_on_their_neighbours`,
  `workers/test_answer_forms::test_a_schema_is_followed`.
- Q05: sampling settings leaked between requests of a batch. Here: as Q04, and
  `workers/test_answer_forms::test_bias_and_penalties_reach_the_sampler`.
- Q06: odd token limits. Here: `test_odd_token_limits`: all refused but null; one token is
  one token, `engine/test_decode::test_one_token_needs_one_forward`.
- Q07: a job stayed "started" after its worker or Redis died. Here: `test_chaos`,
  `test_loops::test_redis_killed_mid_run_loses_nothing`.
- Q09: a cancelled job ran all the same. Here:
  `test_loops::test_cancel_acts_at_the_next_chunk_or_step`,
  `test_runs::test_a_flagged_job_ends_cancelled_whatever_its_worker_does`.
- Q10: one ID, two payloads. Here:
  `test_jobs::test_concurrent_submissions_under_one_key_make_one_job`.
- Q11: death between dequeueing and registering. Here: both are one atomic step; the points
  `after_take_*` of `test_chaos`.
- Q12: workers deaf after a Redis outage. Here: `test_cancel_is_heard_after_an_outage`.
- Q13: a deliberate stop was reported as a crash. Here: `test_a_cancel_is_not_a_failure`.
- Q14: a burst of cancels left orphans. Here:
  `test_loops::test_a_burst_of_cancels_leaves_a_working_queue`.
- Q15: a full cache and concurrent load locked each other out. Here:
  `workers/test_full_memory`.

- L01: growing the map of a shared store. Here: cannot apply: one process owns the store, and its
  map has its full size from the start; `store/test_store_environment::test_one_owner`.
- L02: a full map. Here: `store/test_store_states::test_a_state_that_cannot_fit_is_refused_*`,
  `workers/test_decode_engine::test_a_state_that_cannot_be_saved_stays_while_there_is_room`.
- L03: fork after opening the store. Here: cannot apply: our RQ workers never fork (`test_loops`
  runs their jobs in the process itself).
- L04: a write-mapped store on a full disk. Here: never write-mapped,
  `store/test_store_environment::test_engine_flags_and_modes`.
- L05: a killed reader pinned pages. Here: only the owner reads; stale readers are cleared when it
  opens, `store/test_store_kill`.
- L06: opened anew for every operation. Here: `store/test_store_environment::test_one_owner`;
  others ask the owner, `store/test_store_rpc`.
- L07: the newest entries were dropped at shutdown. Here:
  `workers/test_decode_engine::test_draining_saves_what_is_in_memory`.
- L09: an idle save that needed traffic. Here: `e2e/test_demo`: silence, SIGKILL, resume.
- L10: half ready for ever. Here: `test_stack::test_a_model_that_cannot_be_loaded`,
  `workers/test_handoff::test_another_model_is_not_computed_for`, and `test_nodes`: waiting for a
  node ends, and says in which state it is.
- L11: after a kill the others spin. Here: `test_what_waits_for_a_lost_peer_is_quiet`,
  `test_supervisor::test_the_delay_doubles_to_its_limit_and_is_forgotten`.
- L13: small slices kept large buffers alive. Here: `engine/test_leak`,
  `workers/test_saver::test_nothing_keeps_a_copy_once_it_is_written`.
- L14: registries listed vanished jobs; a full Redis. Here:
  `test_jobs::test_a_full_redis_refuses_and_leaves_nothing`,
  `test_policy::test_vanished_records_do_not_block_the_queue`, `test_dashboard`.
- L15: one of two stores restarted empty. Here: `test_redis_emptied_under_a_full_store`; the
  reverse is `workers/test_starts::test_a_previous_turn_that_is_not_stored`.
- L16: unloading an idle model. Here: cannot apply: the model is never unloaded.
- L17: a restart with a smaller cap deleted data. Here: opening evicts nothing; room is made when a
  new state needs it, oldest first (`store/test_store_states`); `tandem store evict` tells.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from api_stack import Stack
from jobs_kit import Server, Worker, answer, assert_idle, eventually, new_job, oracle

from scheduler.jobs import Jobs
from scheduler.redis_client import connect

PAIRS = 100 if os.environ.get("TANDEM_SOAK") else 20


@pytest.fixture(scope="module")
def shared(_redis_process: Server) -> Iterator[Stack]:
    """For the last tests here: its workers take whatever is in this Redis."""
    with Stack(_redis_process.url) as stack:
        yield stack


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


def test_equal_requests_at_the_same_moment(
    client: redis.Redis, redis_url: str, jobs: Jobs, tmp_path: Path
) -> None:
    with (
        Worker("prefill", redis_url, lock_dir=str(tmp_path)),
        Worker("decode", redis_url, lock_dir=str(tmp_path), slots=2),
    ):
        for round_ in range(PAIRS):
            stage = "decode" if round_ % 2 else "prefill"
            pair = [
                new_job(tokens=64, answer=1, held_tokens=63, stage=stage, digest="d", owner="ada")
                for _ in range(2)
            ]
            both = threading.Barrier(2)

            def submit(number: int, pair: list = pair, both: threading.Barrier = both) -> None:
                both.wait()
                jobs.accept(pair[number])

            threads = [threading.Thread(target=submit, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for new in pair:
                assert jobs.wait(new.id, 60).status == "completed"
                assert answer(client, new.id) == oracle(new)
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
        assert_idle(client)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_cancel_is_heard_after_an_outage(
    durable_redis: Server, tmp_path: Path, role: str, busy: bool
) -> None:
    """Redis is killed and started while a worker has nothing to do, or runs a job."""
    slow = {"chunk_s": 0.02} if role == "prefill" else {"step_s": 0.02}
    url = durable_redis.url
    running = "prefilling" if role == "prefill" else "decoding"
    with connect(url) as client, Worker(role, url, lock_dir=str(tmp_path), **slow) as worker:
        jobs = Jobs(client)
        # Minutes of work: it ends soon only because the worker hears.
        new = new_job(tokens=100_000, answer=10_000, stage=role)
        if busy:
            jobs.accept(new)
            eventually(lambda: jobs.get(new.id).first_token_at or jobs.get(new.id).prefilled_tokens,
                       "it does not run")  # fmt: skip
        else:
            eventually(lambda: client.smembers("rq:workers"), "the worker does not register")
        durable_redis.kill()
        durable_redis.start()
        if not busy:
            jobs.accept(new)
            eventually(lambda: jobs.get(new.id).run, "it is not taken")
        assert jobs.cancel(new.id) != "completed"
        assert jobs.wait(new.id, 60).status == "cancelled", running
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
        assert worker.process.poll() is None


def test_a_cancel_is_not_a_failure(client: redis.Redis, redis_url: str, jobs: Jobs) -> None:
    with Worker("decode", redis_url, step_s=0.02):
        new = new_job(answer=10_000, stage="decode")
        jobs.accept(new)
        eventually(lambda: jobs.get(new.id).first_token_at, "it does not run")
        jobs.cancel(new.id)
        job = jobs.wait(new.id, 60)
        assert (job.status, job.error, job.attempts) == ("cancelled", None, 1)
        assert client.zcard("rq:failed:decode") == 0
        assert client.zscore("rq:canceled:decode", f"{new.id}-d") is not None
        assert client.hget(f"rq:job:{new.id}-d", "exc_info") is None
        names = client.smembers("rq:workers:decode")
        assert [client.hget(name, "failed_job_count") for name in names] == [None]
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
        assert client.llen("rq:queue:decode") == 0, "it is not tried again"


@pytest.mark.rotate(3)
def test_what_waits_for_a_lost_peer_is_quiet(
    client: redis.Redis, redis_url: str, jobs: Jobs
) -> None:
    """The prefill worker is gone and a job waits for it: decode asks Redis a little, not more."""
    with (
        Worker("prefill", redis_url, chunk_s=0.05, lease=3) as prefill,
        Worker("decode", redis_url, lease=3),
    ):
        first = new_job(tokens=10_000)
        jobs.accept(first)
        eventually(lambda: jobs.get(first.id).prefilled_tokens, "it does not begin")
        prefill.kill()
        eventually(lambda: jobs.get(first.id).status == "queued", "it is not taken back")
        keys = client.dbsize()
        asked = int(client.info("stats")["total_commands_processed"])
        # Counted for so many heartbeats, so that a slow machine changes nothing.
        (name,) = client.smembers("rq:workers:decode")
        beats = looks = 0

        def beaten() -> bool:
            """Whether the worker's entry was renewed six times: it is given a time to live again
            after each time that it was left without one."""
            nonlocal beats, looks
            looks += 1
            if client.pttl(name) > 0:
                looks, beats = looks + 1, beats + 1
                client.persist(name)
            return beats > 6

        eventually(beaten, "no heartbeat", 120)
        asked = int(client.info("stats")["total_commands_processed"]) - asked - looks
        assert asked / 6 < 200
        assert client.dbsize() <= keys + 2
        assert client.memory_usage(f"tandem:job:{first.id}") < 4000
        with Worker("prefill", redis_url):
            assert jobs.wait(first.id, 60).status == "completed"


@pytest.mark.parametrize("limit", [0, -1, 1.5, "5", True, 10**12])
def test_odd_token_limits(shared: Stack, limit: Any) -> None:
    body = {"model": "default", "input": "Hello", "max_output_tokens": limit}
    answer = httpx.post(f"{shared.url}/v1/responses", json=body, timeout=120)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_output_tokens"
    body["max_output_tokens"] = 100
    answer = httpx.post(f"{shared.url}/v1/responses", json=body, timeout=120)
    assert answer.json()["status"] == "completed"


def test_redis_emptied_under_a_full_store(shared: Stack) -> None:
    """Conversations are the store's: they go on when Redis has lost everything."""
    with shared.client() as official, connect(shared.config.redis_url) as client:
        first = official.responses.create(model="default", input="Hello")
        client.flushall()
        again = official.responses.retrieve(first.id)
        assert (again.status, again.output_text) == ("completed", first.output_text)
        second = official.responses.create(
            model="default", input="And now?", previous_response_id=first.id
        )
        assert second.status == "completed"
        assert second.conversation == first.conversation
