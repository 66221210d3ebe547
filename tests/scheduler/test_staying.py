"""Answers that are begun on the prefill node: one log, one end, whoever dies on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from jobs_kit import Hold, answer, assert_idle, eventually, is_stopped, new_job, oracle, started

from scheduler import staying
from scheduler.jobs import Jobs
from scheduler.record import Job, NewJob
from scheduler.staying import Choice, Staying, choose

SOAK = bool(os.environ.get("TANDEM_SOAK"))
#: Where a worker may die between the first token and the end of an answer that moves.
POINTS = [
    ("prefill", "mid_late"),
    ("prefill", "after_handing_off"),
    ("prefill", "mid_hand_off"),
    ("prefill", "before_finish_prefill"),
    ("prefill", "after_finish_prefill"),
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
    yield from started(redis_url, lock_dir=str(tmp_path), late=True)


def check(client: redis.Redis, jobs: Jobs, new: NewJob) -> Job:
    job = jobs.wait(new.id, 120)
    assert job.status == "completed", job.error
    assert answer(client, new.id) == oracle(new)
    return job


def late(job: Job) -> int:
    assert job.handoff is not None
    return int(job.handoff["late"])


def test_a_lone_answer_is_said_where_its_prompt_was_computed(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    stack("prefill"), stack("decode")
    new = new_job(answer=12, tokens=40)
    jobs.accept(new)
    job = check(client, jobs, new)
    assert late(job) == 12
    assert job.prefilled_tokens == 39
    assert_idle(client)
    rate = client.get("tandem:rate:prefill")
    assert rate is None, "39 tokens are too few to be measured"


def test_the_measured_rate_is_that_of_the_prefill(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    stack("prefill", step_s=0.05), stack("decode")
    new = new_job(answer=20, tokens=400)
    jobs.accept(new)
    job = check(client, jobs, new)
    assert late(job) == 20
    rate = float(client.get("tandem:rate:prefill") or 0)
    assert job.first_token_at is not None
    before = job.first_token_at - job.times["prefilling"]  # with the first step of decoding
    assert rate > 399 / before, "a second of decoding was taken for prefill"


def test_who_comes_next_does_not_wait_for_the_answer(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    saying = Hold(tmp_path, "mid_late", 4)  # until the short one is there
    stack("prefill", step_s=0.02, **saying.spec), stack("decode", step_s=0.001)
    # Once it has moved, the long answer goes on only when the short one has ended.
    goes_on = tmp_path / "go"
    long = new_job(answer=500, tokens=30, request={"until": str(goes_on)})
    short = new_job(answer=3, tokens=30)
    jobs.accept(long)
    saying.reached()
    eventually(lambda: jobs.get(long.id).first_token_at, "it does not begin")
    jobs.accept(short)
    saying.release()
    check(client, jobs, short)
    assert not jobs.get(long.id).ended
    goes_on.touch()
    assert 0 < late(check(client, jobs, long)) < 500
    assert_idle(client)


def test_a_worker_that_is_to_stop_hands_the_answer_off(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    saying = Hold(tmp_path, "mid_late", 4)  # until it is told to stop
    prefill = stack("prefill", step_s=0.02, **saying.spec)
    stack("decode")
    new = new_job(answer=500, tokens=30)
    jobs.accept(new)
    saying.reached()
    eventually(lambda: jobs.get(new.id).first_token_at, "it does not begin")
    prefill.send(signal.SIGTERM)
    saying.release()
    assert prefill.process.wait(120) == 0
    job = check(client, jobs, new)
    assert 0 < late(job) < 500
    assert job.attempts == 1


def test_a_cancelled_answer_ends_once(client: redis.Redis, jobs: Jobs, stack: Any) -> None:
    stack("prefill", step_s=0.02), stack("decode")
    new = new_job(answer=100_000, tokens=30)
    jobs.accept(new)
    eventually(lambda: jobs.get(new.id).first_token_at, "it does not begin")
    jobs.cancel(new.id)
    assert jobs.wait(new.id, 60).status == "cancelled"
    again = new_job(answer=2, tokens=30)
    jobs.accept(again)
    check(client, jobs, again)
    assert_idle(client)


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("role", "point"), POINTS)
def test_killed_while_an_answer_moves(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path, role: str, point: str
) -> None:
    options: dict[str, Any] = {"step_s": 0.005}
    slow = {"prefill": {"step_s": 0.05}, "decode": options}  # it has not ended when more comes
    other = "decode" if role == "prefill" else "prefill"
    plan: dict[str, Any] = {"point": point}
    plan["nth"] = {"mid_decode": 4, "after_handing_off": 2}.get(point, 1)
    # Where it is saying the answer it dies only when something of that is written, and where the
    # decode node dies it says no more before it has a reason to move.
    held = role == "decode" or point == "mid_late"
    saying = Hold(tmp_path, "mid_late", 4) if held else None
    kept = stack(other, **(saying.spec if saying and other == "prefill" else {}), **slow[other])
    victim = stack(role, **(saying.spec if saying and role == "prefill" else plan), **slow[role])
    new = new_job(answer=120, tokens=40)
    jobs.accept(new)
    if saying:
        saying.reached()
    eventually(lambda: jobs.get(new.id).first_token_at, "it does not begin")
    more = new_job(answer=2, tokens=30)
    jobs.accept(more)  # so that it moves in the middle
    if role == "decode" and saying:
        saying.release()
    elif saying:
        victim.kill()
    assert victim.process.wait(90) == -signal.SIGKILL
    stack(role, **options)
    check(client, jobs, new)
    check(client, jobs, more)
    assert kept.process.poll() is None
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("point", ["mid_late", "mid_hand_off", "before_finish_prefill"])
def test_frozen_while_an_answer_moves(
    client: redis.Redis, jobs: Jobs, stack: Any, point: str
) -> None:
    """The frozen one wakes up when another has told all of it: nothing is told twice."""
    options: dict[str, Any] = {"step_s": 0.005}
    stack("decode", **options)
    # What was said shortly before may not be written yet, and is told by the next run then.
    nth = 40 if point == "mid_late" else 1
    frozen = stack("prefill", point=point, nth=nth, act="stop", lease=3, **options)
    new = new_job(answer=60, tokens=40)
    jobs.accept(new)
    eventually(lambda: is_stopped(frozen.process.pid), "it does not freeze")
    stack("prefill", node="other", **options)
    job = check(client, jobs, new)
    os.kill(frozen.process.pid, signal.SIGCONT)
    more = new_job(answer=3, tokens=30)
    jobs.accept(more)
    check(client, jobs, more)
    assert jobs.get(new.id).events == job.events
    assert_idle(client)


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stay", "reason"),
    [
        (("late", 0, 47.0, 37.0), True, "47 tokens/s here, 37 there"),
        (("late", 0, 37.0, 37.0), True, "37 tokens/s here"),
        (("late", 0, 20.0, 37.0), False, "20 tokens/s here, 37 there"),
        (("late", 2, 47.0, 37.0), False, "2 waiting"),
        (("late", 0, 0.0, 37.0), False, "tandem calibrate"),
        (("late", 0, 47.0, 0.0), False, "tandem calibrate"),
        (("prompt", 0, 47.0, 37.0), False, "prompt"),
    ],
)
def test_the_choice(arguments: Any, stay: bool, reason: str) -> None:
    choice = choose(*arguments)
    assert choice.stay is stay
    assert reason in choice.reason


def test_redis_away_ends_no_answer_and_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "LOOK", 0.0)
    away = False

    def waiting() -> int:
        if away:
            raise redis.ConnectionError("gone")
        return 0

    begun: list[int] = []
    stay = Staying(lambda: None, waiting, lambda n: Choice(not n, ""), lambda: begun.append(1))
    assert stay()
    away = True
    assert stay()
    stay.leave("asked")
    assert not stay()
    assert not stay()
    assert begun == [1]
    other = Staying(lambda: None, waiting, lambda n: Choice(not n, ""), lambda: begun.append(2))
    assert not other()
    away = False
    assert not other(), "what left does not come back"
    assert begun == [1]
