"""An answer that leaves its decode node at some token and goes on at another, over a real link."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from decode_kit import LONG, asking, make_job
from moving_kit import TALK, Pair, first_turn
from redis_kit import eventually
from test_late_engine import FORMS, ids

from scheduler.homes import Homes
from scheduler.leaving import Stays, facts_of
from scheduler.record import Job
from transport.errors import LinkError

LENGTH = 64
SEAMS = range(1, LENGTH) if os.environ.get("TANDEM_SOAK") else [1, 23, 63]


@pytest.mark.parametrize("form", FORMS)
def test_the_log_is_that_of_an_answer_that_never_moved(pair: Pair, form: str) -> None:
    request = asking(LENGTH)
    request["params"] |= FORMS[form]
    alone = make_job(ids(), request=request)
    pair.leaving.answer(alone)
    said = pair.leaving.said(alone)
    if form == "greedy":
        assert said == pair.leaving.oracle(alone)
    for seam in [seam for seam in SEAMS if seam < len(said)]:
        job = make_job(ids(), request=request)
        facts = pair.move(job, seam)
        assert facts["moved"][0]["at_token"] == seam
        assert facts["path"] == "tcp"
        assert pair.other.said(job) == said
        assert [_plain(e, job) for e in pair.other.events[job.id]] == [
            _plain(e, alone) for e in pair.leaving.events[alone.id]
        ]
        first = pair.leaving.store.get_turn(alone.id)
        second = pair.other.store.get_turn(job.id)
        assert first is not None
        assert second is not None
        assert (first.output_ids, first.schedule) == (second.output_ids, second.schedule)
        assert (first.finish, first.usage) == (second.finish, second.usage)


def _plain(event: dict[str, Any], job: Job) -> str:
    return repr(event).replace(job.id.removeprefix("resp_"), "ID")


@pytest.mark.parametrize("place", ["hot", "stored"])
def test_the_conversation_goes_with_its_answer(pair: Pair, place: str) -> None:
    first, past = first_turn(pair)
    if place == "stored":
        pair.leaving.settle()
    request = asking(12)
    job = make_job(
        [*past, *ids(40)], request=request, previous=first.id, conversation=TALK, owner="@ann"
    )
    pair.move(job, 5)
    assert pair.other.said(job) == pair.other.oracle(job)
    turn = pair.other.store.get_turn(job.id)
    assert turn is not None
    assert turn.usage["cached_tokens"] == len(past) - 1
    assert pair.other.store.turn_ids(job.id)[: len(past)] == past
    record = pair.other.store.get_conversation(TALK)
    assert record is not None
    assert (record["owner"], record["metadata"], record["created"]) == ("@ann", {"title": "sky"}, 5)
    assert record["head"] == job.id
    pair.mover.left(job)
    assert pair.leaving.store.get_conversation(TALK) is None
    assert pair.leaving.store.get_turn(first.id) is None
    pair.leaving.engine.drain()
    assert pair.leaving.engine.facts()["hot"] == 0
    third = make_job(
        [*pair.other.store.turn_ids(job.id), *ids(9)], request=asking(5), previous=job.id,
        conversation=TALK, owner="@ann",
    )  # fmt: skip
    finished = pair.other.answer(third)
    assert finished.result is not None
    assert finished.result.path["path"] == "hot"
    assert pair.other.said(third) == pair.other.oracle(third)


def test_an_answer_that_has_not_begun_takes_what_is_there_along(pair: Pair) -> None:
    first, past = first_turn(pair)
    job = make_job([*past, *ids(60)], request=asking(8), previous=first.id, conversation=TALK)
    facts = pair.move(job, 0)
    assert facts["moved"][0]["at_token"] == 0
    assert pair.other.said(job) == pair.other.oracle(job)
    turn = pair.other.store.get_turn(job.id)
    assert turn is not None
    assert turn.usage["cached_tokens"] == len(past) - 1


def test_a_state_that_does_not_arrive_is_computed_from_the_ids(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, past = first_turn(pair)
    job = make_job([*past, *ids(40)], request=asking(12), previous=first.id, conversation=TALK)
    run = pair.leaving.execution(job)
    pair.leaving.engine.add(run, job)
    while len(pair.leaving.said(job)) < 5:
        pair.leaving.engine.step()
    pair.mover.prepare(job, "m4")
    pair.receiver.close()
    tail = pair.leaving.engine.leave(run, "m4")
    assert tail is not None
    monkeypatch.setattr("worker_prefill.handoff.ATTEMPTS", 1)
    with pytest.raises(LinkError):
        tail()
    path = pair.go_on(job, facts_of(job, "m4", {"path": "none", "error": "the link failed"}))
    assert path["path"] == "recomputed"
    assert pair.other.said(job) == pair.other.oracle(job)


def test_records_may_be_copied_again_and_branches_keep_their_past(pair: Pair) -> None:
    first, past = first_turn(pair)
    branch = "conv_" + "8" * 32
    job = make_job([*past, *ids(20)], request=asking(4), previous=first.id, conversation=branch)
    pair.leaving.answer(job)
    pair.leaving.store.update_conversation(
        branch, metadata={"a": "b"}, pinned=True, add_items=[{"id": "x"}]
    )
    for _ in range(2):
        pair.mover.prepare(job, "m4")
    record = pair.other.store.get_conversation(branch)
    ours = pair.leaving.store.get_conversation(branch)
    assert record is not None
    assert ours is not None
    assert {k: v for k, v in record.items() if k not in ("saved", "bytes")} == {
        k: v for k, v in ours.items() if k not in ("saved", "bytes")
    }
    assert Homes(pair.client).of(TALK) == "m3", "what it comes from stays at home"
    pair.mover.left(job)
    assert pair.leaving.store.get_conversation(branch) is None
    assert pair.leaving.store.conversation_turns(TALK) == [first.id]
    pair.client.sadd(f"tandem:at:{branch}", job.id, "resp_other")
    with pytest.raises(Stays):
        pair.mover.prepare(make_job(ids(), conversation=branch, ident=job.id), "m4")


def test_what_is_renamed_while_its_answer_leaves_has_its_new_name(pair: Pair) -> None:
    first, past = first_turn(pair)
    job = make_job(
        [*past, *ids(20)], request=asking(4), previous=first.id, conversation=TALK, owner="@ann"
    )
    pair.move(job, 2)
    pair.leaving.store.update_conversation(TALK, metadata={"title": "sea"})
    stores, renamed = pair.stores(), Future[Any]()

    def rename() -> None:
        renamed.set_result(stores.update_conversation(TALK, metadata={"title": "deep"}))

    with pair.mover.still(job, "m4"):
        copied = pair.other.store.get_conversation(TALK)
        assert copied is not None
        assert copied["metadata"] == {"title": "sea"}
        threading.Thread(target=rename, daemon=True).start()
        eventually(lambda: pair.mover.seals.waiting, "the change does not come")
        Homes(pair.client).begin(TALK, "m4")
        pair.mover.left(job)
    assert renamed.result(LONG)["metadata"] == {"title": "deep"}
    stores.close()
    assert pair.leaving.store.get_conversation(TALK) is None
    record = pair.other.store.get_conversation(TALK)
    assert record is not None
    assert (record["metadata"], record["head"]) == ({"title": "deep"}, job.id)
