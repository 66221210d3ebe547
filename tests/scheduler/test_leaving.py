"""A decode node that is to stop hands its answers on: one log, one end, whoever dies on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from jobs_kit import (
    Hold,
    completed,
    eventually,
    is_stopped,
    new_job,
    nothing_left,
    started,
)

from scheduler.homes import Homes
from scheduler.jobs import Jobs
from scheduler.record import Job, NewJob

#: Where the leaving node may die, and the other one.
POINTS = [
    ("m3", "mid_prepare"),
    ("m3", "leaving"),
    ("m3", "mid_hand_over"),
    ("m3", "before_rehome"),
    ("m3", "after_rehome"),
    ("m3", "mid_left"),
    ("m4", "after_take"),
    ("m4", "mid_decode"),
    ("m4", "before_commit"),
    ("m4", "before_finish"),
    ("m4", "after_finish"),
]
TALK = "conv_" + "0" * 32


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


@pytest.fixture
def stack(redis_url: str, tmp_path: Path) -> Iterator[Any]:
    yield from started(redis_url, lock_dir=str(tmp_path))


@pytest.fixture
def goes_on(tmp_path: Path) -> Path:
    """The file until which answers that name it wait after some tokens: none of them has ended
    before it was sent on, however late its node is told to stop."""
    return tmp_path / "go"


def talk(**more: Any) -> NewJob:
    """A job of a conversation that is at home on m3, decoded there from its prompt on."""
    return new_job(**{"node": "m3", "stage": "decode", "conversation": TALK, "home": "", **more})


def waiting(goes_on: Path, **more: Any) -> NewJob:
    """Such a job whose answer goes on only when the file is there."""
    return talk(request={"until": str(goes_on), "at": 7, **more.pop("request", {})}, **more)


def begun(jobs: Jobs, new: NewJob) -> None:
    jobs.accept(new)
    eventually(lambda: jobs.get(new.id).first_token_at, "it does not begin")


def none_under_way(client: redis.Redis) -> None:
    nothing_left(client)
    assert list(client.scan_iter("tandem:at:*")) == []


def moved(job: Job) -> list[dict[str, Any]]:
    return list((job.handoff or {}).get("moved") or [])


def test_live_and_waiting_answers_go_on_at_the_other_node(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path
) -> None:
    leaving = stack("decode", node="m3", heir="m4", slots=2, step_s=0.01)
    news = [waiting(goes_on, answer=300, conversation=f"conv_{k:032x}") for k in range(5)]
    for new in news:
        jobs.accept(new)
    eventually(lambda: sum(jobs.get(n.id).first_token_at is not None for n in news) == 2, "")
    stack("decode", node="m4", step_s=0.001)
    assert leaving.stop() == 0
    goes_on.touch()
    for new in news:
        job = completed(client, jobs, new)
        assert [(one["from"], one["to"]) for one in moved(job)] == [("m3", "m4")]
        assert job.node == "m4"
        assert job.queue == "decode-m4"
        assert job.attempts == 1, "leaving is no failed attempt"
        assert Homes(client).of(str(new.conversation)) == "m4"
    assert any(0 < moved(jobs.get(new.id))[0]["at_token"] < 300 for new in news)
    none_under_way(client)


def test_without_another_node_it_drains_as_ever(
    client: redis.Redis, jobs: Jobs, stack: Any, tmp_path: Path
) -> None:
    said = Hold(tmp_path, "mid_decode", 5)
    leaving = stack("decode", node="m3", slots=1, step_s=0.01, **said.spec)
    live, waiting = talk(answer=60, home=None), talk(answer=5, home=None)
    begun(jobs, live)
    said.reached()
    jobs.accept(waiting)
    leaving.send(signal.SIGTERM)
    said.release()
    assert leaving.process.wait(90) == 0
    assert not moved(completed(client, jobs, live))
    assert jobs.get(waiting.id).status == "queued"
    stack("decode", node="m3")
    assert not moved(completed(client, jobs, waiting))
    none_under_way(client)


def test_a_state_that_cannot_be_sent_is_computed_there(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path
) -> None:
    leaving = stack("decode", node="m3", heir="m4", step_s=0.01, log="CRITICAL")
    new = waiting(goes_on, answer=300, request={"fail": "move"})
    begun(jobs, new)
    stack("decode", node="m4")
    assert leaving.stop() == 0
    goes_on.touch()
    job = completed(client, jobs, new)
    assert moved(job)[0]["path"] == "none"
    assert "link is down" in moved(job)[0]["error"]
    none_under_way(client)


def test_an_answer_does_not_go_to_a_node_that_is_gone(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    leaving = stack("decode", node="m3", heir="m4", step_s=0.01, log="CRITICAL")
    new = talk(answer=200, request={"fail": "gone"})
    begun(jobs, new)
    assert leaving.stop() == 0
    assert Homes(client).of(TALK) == "m3"
    if jobs.get(new.id).status == "queued":
        stack("decode", node="m3")
    job = completed(client, jobs, new)
    assert (job.node, moved(job)) == ("m3", [])
    none_under_way(client)


def test_records_that_cannot_be_copied_keep_the_answer_here(
    client: redis.Redis, jobs: Jobs, stack: Any
) -> None:
    leaving = stack("decode", node="m3", heir="m4", step_s=0.01)
    new = talk(answer=60, request={"fail": "prepare"})
    begun(jobs, new)
    assert leaving.stop() == 0
    assert not moved(completed(client, jobs, new))
    assert Homes(client).of(TALK) == "m3"
    none_under_way(client)


def test_a_conversation_with_two_live_answers_stays_whole(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path
) -> None:
    leaving = stack("decode", node="m3", heir="m4", step_s=0.02, drain=1)
    first, second = waiting(goes_on, answer=400), waiting(goes_on, answer=400, home="m3")
    begun(jobs, first), begun(jobs, second)
    leaving.stop()
    for new in (first, second):
        assert jobs.get(new.id).node == "m3"
    assert Homes(client).of(TALK) == "m3"
    goes_on.touch()
    stack("decode", node="m3")
    for new in (first, second):
        completed(client, jobs, new)
    none_under_way(client)


def test_a_cancelled_answer_ends_once_while_it_leaves(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path
) -> None:
    leaving = stack("decode", node="m3", heir="m4", step_s=0.01, point="mid_hand_over", act="stop")
    new = waiting(goes_on, answer=300)
    begun(jobs, new)
    leaving.send(signal.SIGTERM)
    eventually(lambda: is_stopped(leaving.process.pid), "it does not freeze")
    jobs.cancel(new.id)
    leaving.send(signal.SIGCONT)
    assert leaving.process.wait(90) == 0
    assert jobs.wait(new.id, 60).status == "cancelled"
    none_under_way(client)


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("node", "point"), POINTS)
def test_killed_while_an_answer_leaves(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path, node: str, point: str
) -> None:
    def plan(name: str) -> dict[str, Any]:
        return {"node": name, **({"point": point, "nth": 3 if point == "mid_decode" else 1}
                                 if name == node else {})}  # fmt: skip

    leaving = stack("decode", heir="m4", step_s=0.01, **plan("m3"))
    new = waiting(goes_on, answer=200)
    begun(jobs, new)
    other = stack("decode", step_s=0.001, **plan("m4"))
    leaving.send(signal.SIGTERM)
    victim = leaving if node == "m3" else other
    if node == "m4":
        eventually(lambda: jobs.get(new.id).node == "m4", "it does not leave")
        goes_on.touch()
    assert victim.process.wait(90) == -signal.SIGKILL
    goes_on.touch()
    if node == "m3":
        # Before the step its jobs wait for it, after it they are the other's.
        stack("decode", node="m3")
    else:
        stack("decode", node="m4")
    job = completed(client, jobs, new)
    assert bool(moved(job)) == (job.node == "m4") == (Homes(client).of(TALK) == "m4")
    none_under_way(client)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("point", ["mid_prepare", "mid_hand_over", "before_rehome", "after_rehome"])
def test_frozen_while_an_answer_leaves(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path, point: str
) -> None:
    """The frozen one wakes up when another run has told all of it: nothing is told twice."""
    frozen = stack("decode", node="m3", heir="m4", step_s=0.01, point=point, act="stop", lease=3)
    new = waiting(goes_on, answer=200)
    begun(jobs, new)
    stack("decode", node="m4")
    frozen.send(signal.SIGTERM)
    eventually(lambda: is_stopped(frozen.process.pid), "it does not freeze")
    goes_on.touch()
    if point == "after_rehome":
        job = completed(client, jobs, new)
        os.kill(frozen.process.pid, signal.SIGCONT)
    else:
        eventually(lambda: jobs.get(new.id).status == "queued", "its lease does not run out")
        os.kill(frozen.process.pid, signal.SIGCONT)
    frozen.process.wait(90)
    stack("decode", node="m3")
    job = completed(client, jobs, new)
    more = talk(answer=3, home=job.node, node=job.node)
    jobs.accept(more)
    completed(client, jobs, more)
    assert jobs.get(new.id).events == job.events
    none_under_way(client)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("point", ["after_take", "mid_decode", "before_finish"])
def test_the_taking_node_freezes(
    client: redis.Redis, jobs: Jobs, stack: Any, goes_on: Path, point: str
) -> None:
    """The answer waits for it with its lease gone; when it wakes it is told once, from its log."""
    leaving = stack("decode", node="m3", heir="m4", step_s=0.01)
    new = waiting(goes_on, answer=200)
    begun(jobs, new)
    frozen = stack("decode", node="m4", step_s=0.001, point=point, act="stop", lease=3)
    assert leaving.stop() == 0
    goes_on.touch()
    eventually(lambda: is_stopped(frozen.process.pid), "it does not freeze")
    stack("decode", node="m3")  # it looks after leases
    eventually(lambda: jobs.get(new.id).status == "queued", "its lease does not run out")
    assert jobs.get(new.id).queue == "decode-m4"
    os.kill(frozen.process.pid, signal.SIGCONT)
    job = completed(client, jobs, new)
    assert (job.node, len(moved(job))) == ("m4", 1)
    none_under_way(client)
