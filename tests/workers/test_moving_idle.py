"""An idle conversation that goes to another decode node, and what happens to it meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from decode_kit import LONG, asking, make_job
from moving_kit import TALK, Pair, first_turn
from redis_kit import eventually
from test_late_engine import ids

from scheduler.homes import Homes, key_of
from scheduler.jobs import Jobs
from scheduler.leaving import Stays
from scheduler.record import HomeMoved, NewJob, response_id
from store.errors import StoreError, StoreUnavailable
from store.rpc import StoreClient
from store.store import Store
from worker_decode.moving import copy_records


@pytest.mark.parametrize("place", ["hot", "stored"])
def test_an_idle_conversation_moves_with_its_state(pair: Pair, place: str) -> None:
    first, past = first_turn(pair)
    if place == "stored":
        pair.leaving.settle()
    pair.leaving.store.update_conversation(TALK, pinned=True, add_items=[{"id": "x"}])
    pair.mover._save = lambda turn: pair.leaving.settle()
    done = pair.mover.move(TALK, "m4")
    assert (done["from"], done["to"], done["turns"], done["states"]) == ("m3", "m4", 1, 1)
    assert Homes(pair.client).of(TALK) == "m4"
    assert pair.leaving.store.get_conversation(TALK) is None
    record = pair.other.store.get_conversation(TALK)
    assert record is not None
    assert (record["pinned"], record["added"], record["items"]) == (True, 1, [{"id": "x"}])
    assert record["saved"] == len(past) - 1
    job = make_job([*past, *ids(30)], request=asking(8), previous=first.id, conversation=TALK)
    finished = pair.other.answer(job)
    assert finished.result is not None
    assert finished.result.path["path"] == "restored"
    assert finished.result.usage["cached_tokens"] == len(past) - 1
    assert pair.other.said(job) == pair.other.oracle(job)
    with pytest.raises(StoreError, match="not at home"):
        pair.mover.move(TALK, "m4")
    with pytest.raises(StoreError, match="not another one"):
        pair.mover.move(TALK, "m3")


def test_a_conversation_goes_there_and_back(pair: Pair) -> None:
    first, past = first_turn(pair)
    pair.leaving.settle()
    pair.mover.move(TALK, "m4")
    job = make_job([*past, *ids(30)], request=asking(8), previous=first.id, conversation=TALK)
    pair.other.answer(job)
    there = pair.other.store
    with closing(StoreClient(pair.dir / "m3")) as back:
        copy_records(there, back, TALK, job.id, lambda other: None)
    assert pair.leaving.store.turn_ids(job.id) == there.turn_ids(job.id)
    assert pair.leaving.store.conversation_turns(TALK) == [first.id, job.id]


@pytest.mark.parametrize("step", ["import_open", "import_write", "import_end", "put_turn"])
def test_a_move_that_breaks_leaves_everything_at_home(
    pair: Pair, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = first_turn(pair)
    pair.leaving.settle()
    call = StoreClient.call

    def broken(self: StoreClient, method: str, **arguments: Any) -> Any:
        if method == step:
            raise StoreUnavailable("the other node died")
        return call(self, method, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "call", broken)
        with pytest.raises(StoreUnavailable):
            pair.mover.move(TALK, "m4")
    assert Homes(pair.client).of(TALK) == "m3"
    assert pair.leaving.store.conversation_turns(TALK) == [first.id]
    assert pair.mover.move(TALK, "m4")["turns"] == 1


@pytest.mark.parametrize("what", ["accepted", "lives"])
def test_what_happens_while_a_conversation_moves_is_heeded(
    pair: Pair, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_turn(pair)
    pair.leaving.settle()
    homes = Homes(pair.client)
    homes.begin(TALK, "m3")
    switch = Homes.switch

    def late(self: Homes, *given: Any) -> bool:
        if what == "accepted":
            pair.client.hincrby(key_of(TALK), "n", 1)  # and it has ended since
        if what == "lives":
            pair.client.sadd(f"tandem:at:{TALK}", "resp_1")
            pair.client.hset("tandem:job:resp_1", "status", "decoding")
        return switch(self, *given)

    monkeypatch.setattr(Homes, "switch", late)
    with pytest.raises(StoreError, match="busy"):
        pair.mover.move(TALK, "m4")
    assert homes.of(TALK) == "m3"
    assert pair.leaving.store.get_conversation(TALK) is not None


@pytest.mark.parametrize("point", ["copied", "compared", "switched"])
def test_a_change_that_comes_while_the_home_changes_is_not_lost(
    pair: Pair, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last comparison, after it, and just before the old copy goes."""
    first_turn(pair)
    pair.leaving.settle()
    stores, renamed = pair.stores(), Future[Any]()
    seals, switch, forget = pair.mover.seals, Homes.switch, pair.mover._forget

    def rename() -> None:
        try:
            renamed.set_result(stores.update_conversation(TALK, metadata={"title": "sea"}))
        except Exception as error:
            renamed.set_exception(error)

    def come() -> None:
        threading.Thread(target=rename, daemon=True).start()
        eventually(lambda: seals.waiting or renamed.done(), "the change does not come")

    def copied(there: StoreClient, ident: str, previous: str | None = None) -> Any:
        known = copy(there, ident, previous)
        if not renamed.done():
            come()
            renamed.result(LONG)
        return known

    def compared(self: Homes, *given: Any) -> bool:
        come()
        return switch(self, *given)

    def switched(turns: Any) -> None:
        come()
        forget(turns)

    copy = pair.mover._copy
    if point == "copied":
        monkeypatch.setattr(pair.mover, "_copy", copied)
    if point == "compared":
        monkeypatch.setattr(Homes, "switch", compared)
    if point == "switched":
        monkeypatch.setattr(pair.mover, "_forget", switched)
    assert pair.mover.move(TALK, "m4")["to"] == "m4"
    assert renamed.result(LONG)["metadata"] == {"title": "sea"}
    assert pair.leaving.store.get_conversation(TALK) is None
    record = pair.other.store.get_conversation(TALK)
    assert record is not None
    assert record["metadata"] == {"title": "sea"}
    stores.close()


@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_a_branch_that_is_accepted_as_the_home_changes_keeps_its_past(
    pair: Pair, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, past = first_turn(pair)
    pair.leaving.settle()
    jobs, homes, switch = Jobs(pair.client), Homes(pair.client), Homes.switch
    homes.begin(TALK, "m3")
    branch = NewJob(
        response_id(), "tiny", asking(4), [*past, *ids(9)], owner="@ann", node="m3",
        stage="decode", conversation="conv_" + "8" * 32, previous=first.id, home="",
        past=TALK, past_home="m3",
    )  # fmt: skip

    def late(self: Homes, *given: Any) -> bool:
        moved = when == "after it" and switch(self, *given)
        if moved:
            with pytest.raises(HomeMoved):
                jobs.accept(branch)
            return True
        jobs.accept(branch)
        return switch(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Homes, "switch", late)
        if when == "after it":
            pair.mover.move(TALK, "m4")
            return
        with pytest.raises(StoreError, match="busy"):
            pair.mover.move(TALK, "m4")
    with pytest.raises(Stays, match="branch"):
        pair.mover.prepare(make_job(ids(), previous=first.id, conversation=TALK), "m4")
    assert homes.of(TALK) == "m3"
    assert pair.leaving.store.get_turn(first.id) is not None
    jobs.cancel(branch.id)
    assert pair.mover.move(TALK, "m4")["to"] == "m4"


@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_what_is_deleted_while_it_moves_does_not_come_back(
    pair: Pair, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_turn(pair)
    pair.leaving.settle()
    homes = Homes(pair.client)
    homes.begin(TALK, "m3")
    switch = Homes.switch

    def late(self: Homes, *given: Any) -> bool:
        moved = when == "after it" and switch(self, *given)
        pair.leaving.store.delete_conversation(TALK)
        homes.forget(TALK)
        return moved or switch(self, *given)

    monkeypatch.setattr(Homes, "switch", late)
    with pytest.raises(StoreError, match="was deleted"):
        pair.mover.move(TALK, "m4")
    assert pair.other.store.get_conversation(TALK) is None
    assert homes.of(TALK) == ""


def test_a_past_stays_while_an_answer_that_branches_from_it_is_said(pair: Pair) -> None:
    first, past = first_turn(pair)
    pair.leaving.settle()
    branch = make_job(
        [*past, *ids(20)], request=asking(4), previous=first.id, conversation="conv_" + "8" * 32
    )
    run = pair.leaving.execution(branch)
    pair.leaving.engine.add(run, branch)
    pair.client.sadd(f"tandem:at:{TALK}", branch.id)
    pair.client.hset(f"tandem:job:{branch.id}", "status", "decoding")
    with pytest.raises(StoreError, match="busy"):
        pair.mover.move(TALK, "m4")
    with pytest.raises(Stays, match="branch"):
        pair.mover.prepare(make_job(ids(), previous=first.id, conversation=TALK), "m4")
    pair.mover.prepare(branch, "m4")
    while not (ended := pair.leaving.engine.step()):
        pass
    assert ended[0].error is None
    assert ended[0].commit is not None
    ended[0].commit()
    assert pair.leaving.said(branch) == pair.leaving.oracle(branch)
    pair.client.srem(f"tandem:at:{TALK}", branch.id)
    assert pair.mover.move(TALK, "m4")["to"] == "m4"


def test_two_conversations_move_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    first_turn(pair)
    second = "conv_" + "9" * 32
    pair.leaving.answer(make_job(ids(), request=asking(2), conversation=second))
    pair.leaving.settle()
    export, moved = Store.export_conversation, []

    def during(self: Store, ident: str, path: Path) -> Any:
        made = export(self, ident, path)
        if ident == TALK:
            moved.append(pair.mover.move(second, "m4")["turns"])
        return made

    monkeypatch.setattr(Store, "export_conversation", during)
    assert pair.mover.move(TALK, "m4")["turns"] == 1
    assert moved == [1]
