"""An answer that leaves its decode node at some token and goes on at another, over a real link."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from decode_kit import Node as DecodeKit
from decode_kit import asking, make_job, replay_of
from redis_kit import eventually
from test_late_engine import FORMS, ids

from engine.model import Model
from scheduler.cli import main
from scheduler.homes import Homes, key_of
from scheduler.leaving import Stays, facts_of
from scheduler.nodes import Node, Nodes, Presence
from scheduler.record import Job
from scheduler.runs import Runs
from store.errors import StoreError, StoreUnavailable
from store.remote import Remote
from store.rpc import StoreClient
from store.serving import Server, serve
from store.store import Store
from transport.errors import LinkError
from transport.receiver import Receiver
from worker_decode.moving import Moving, clear_strays, copy_records

SECRET = b"s" * 32
LENGTH = 64
SEAMS = range(1, LENGTH) if os.environ.get("TANDEM_SOAK") else [1, 23, 63]
TALK = "conv_" + "7" * 32


class Pair:
    """Decode node m3, which is to stop, and m4, which takes over."""

    def __init__(self, url: str, client: redis.Redis, model: Model, words: Any) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="tm-"))
        self.client = client
        self.leaving = DecodeKit(model, words, self.dir / "3", node="m3")
        self.other = DecodeKit(model, words, self.dir / "4", node="m4")
        self.receiver = Receiver("127.0.0.1", 0, SECRET, self.other.inbox, 10.0)
        self.rpc: list[Server] = []
        self.presence: list[Presence] = []
        host, port = self.receiver.address
        for name, kit in (("m3", self.leaving), ("m4", self.other)):
            rpc = serve(kit.store, self.dir / name)
            remote = rpc.offer(Remote("127.0.0.1", 0, SECRET))
            self.rpc.append(rpc)
            entry = Node(
                "decode", name, state="ready" if name == "m4" else "draining",
                fingerprint=model.fingerprint.hex(), link=f"{host}:{port}",
                secret=SECRET.hex(), rpc=str(remote),
            )  # fmt: skip
            self.presence.append(Presence(url, entry).start())
        eventually(lambda: len(Nodes(client).list("decode")) == 2, "the nodes are not published")
        self.mover = Moving(
            self.leaving.config, model, self.leaving.store, Nodes(client), Runs(client),
            self.leaving.engine.forget, self.leaving.engine.settle,
        )  # fmt: skip
        self.leaving.engine._mover = self.mover

    def close(self) -> None:
        self.mover.close()
        for presence in self.presence:
            presence.stop()
        self.receiver.close()
        for rpc in self.rpc:
            rpc.close()
        for kit in (self.leaving, self.other):
            kit.close()
        shutil.rmtree(self.dir)

    def move(self, job: Job, seam: int) -> dict[str, Any]:
        """Run a job with a move after `seam` tokens; the hand-off's facts."""
        kit, heir = self.leaving, self.mover.heir()
        assert heir == "m4"
        run = kit.execution(job)
        kit.engine.add(run, job)
        while len(kit.said(job)) < seam:
            assert kit.engine.step() == []
        self.mover.prepare(job, heir)
        tail = kit.engine.leave(run, heir)
        assert tail is not None
        assert kit.engine.facts()["rows"] == 0
        facts = facts_of(job, heir, tail())
        self.go_on(job, facts)
        return facts

    def go_on(self, job: Job, facts: dict[str, Any]) -> dict[str, Any]:
        """The other node takes the job; the path it took."""
        self.other.events[job.id] = self.leaving.events.get(job.id, [])
        again = make_job(
            job.prompt_ids, ident=job.id, request=job.request, handoff=facts, node="m4",
            previous=job.previous, conversation=job.conversation,
        )  # fmt: skip
        finished = self.other.answer(again, replay_of(self.other.events[job.id]))
        assert finished.result is not None
        return dict(finished.result.path)


@pytest.fixture
def pair(redis_url: str, client: redis.Redis, loaded: Model, words: Any) -> Iterator[Pair]:
    made = Pair(redis_url, client, loaded, words)
    yield made
    made.close()


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


def first_turn(pair: Pair) -> tuple[Job, list[int]]:
    pair.leaving.store.create_conversation(TALK, "@ann", {"title": "sky"}, created=5.0)
    job = make_job(ids(), request=asking(6), conversation=TALK, owner="@ann")
    pair.leaving.answer(job)
    return job, [*job.prompt_ids, *pair.leaving.said(job)]


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
    assert Homes(pair.client).of(TALK) == ""
    assert pair.leaving.store.conversation_turns(TALK) == [first.id]
    assert pair.mover.move(TALK, "m4")["turns"] == 1


@pytest.mark.parametrize("what", ["accepted", "lives", "renamed"])
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
        if what == "renamed":
            pair.leaving.store.update_conversation(TALK, metadata={"title": "sea"})
        return switch(self, *given)

    monkeypatch.setattr(Homes, "switch", late)
    if what != "renamed":
        with pytest.raises(StoreError, match="busy"):
            pair.mover.move(TALK, "m4")
        assert homes.of(TALK) == "m3"
        assert pair.leaving.store.get_conversation(TALK) is not None
        return
    pair.mover.move(TALK, "m4")
    record = pair.other.store.get_conversation(TALK)
    assert record is not None
    assert record["metadata"] == {"title": "sea"}


def test_a_node_is_drained_from_the_command_line(
    pair: Pair, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.rpc[0].add("move_conversation", pair.mover.move)
    told_new: list[bool] = []
    pair.rpc[0].add("take_new", lambda yes: told_new.append(yes))
    idents = [f"conv_{k:032x}" for k in range(3)]
    for ident in idents:
        job = make_job(ids(), request=asking(2), conversation=ident)
        pair.leaving.answer(job)
    pair.leaving.settle()
    busy = idents[1]
    pair.client.sadd(f"tandem:at:{busy}", "resp_1")
    pair.client.hset("tandem:job:resp_1", "status", "decoding")
    config = pair.dir / "tandem.toml"
    config.write_text(f'data_dir = "{pair.dir}/d"\n[redis]\nurl = "{redis_url}"\n')

    def tandem(*words: str) -> tuple[int, str]:
        status = main(["node", *words, "--config", str(config)])
        told = capsys.readouterr()
        return status, told.out + told.err

    status, told = tandem("drain", "m3")
    assert status == 1
    assert f"{busy} stays: {busy} is busy" in told
    assert "2 conversations moved, 1 stayed" in told
    assert {one["id"] for one in pair.other.store.list_conversations()} >= {idents[0], idents[2]}
    assert [one["id"] for one in pair.leaving.store.list_conversations()] == [busy]
    pair.client.delete(f"tandem:at:{busy}")
    status, told = tandem("move", busy, "--to", "m4")
    assert status == 0
    assert f"{busy}: m3 -> m4, 1 turns, 1 states" in told
    assert tandem("move", "conv_x", "--to", "m4")[0] != 0
    assert tandem("drain", "m3") == (0, "0 conversations moved, 0 stayed\n")
    assert told_new == [False, False]
    assert tandem("drain", "m3", "--undo") == (0, "m3 takes new ones\n")
    assert told_new[-1] is True
    pair.presence[1].update(state="draining")
    eventually(lambda: pair.mover._nodes.get("decode", "m4").state == "draining", "")  # type: ignore[union-attr]  # it lives
    status, told = tandem("drain", "m3")
    assert status != 0
    assert "no other decode node" in told
    assert len(told_new) == 3


def test_what_comes_in_is_bounded(pair: Pair) -> None:
    with closing(StoreClient(pair.dir / "m4")) as there:
        for size in (0, -5, 1 << 60):
            with pytest.raises(StoreError, match="no room"):
                there.call("import_open", nbytes=size)
        name = there.call("import_open", nbytes=10)
        with pytest.raises(StoreError, match="longer"):
            there.call("import_write", name=name, data=b"x" * 11)
        there.call("import_write", name=name, data=b"x" * 9)
        with pytest.raises(StoreError, match="shorter"):
            there.call("import_end", name=name)
        there.call("import_write", name=name, data=b"x")
        with pytest.raises(StoreError, match="undamaged bundle"):
            there.call("import_end", name=name)
        there.call("import_close", name=name)
        names = [there.call("import_open", nbytes=1) for _ in range(4)]
        with pytest.raises(StoreError, match="try again later"):
            there.call("import_open", nbytes=1)
        for one in names:
            there.call("import_close", name=one)
        assert list((pair.other.store.environment.path / "imports").iterdir()) == []


def test_copies_that_a_move_has_left_go_at_the_next_start(pair: Pair) -> None:
    first, _ = first_turn(pair)
    pair.mover.prepare(first, "m4")
    nodes, homes = Nodes(pair.client), Homes(pair.client)
    homes.begin(TALK, "m3")
    store = pair.leaving.store
    assert clear_strays(store, homes, nodes, "m3", lambda turns: None) == 0
    other = pair.other.store
    assert clear_strays(other, homes, nodes, "m4", lambda turns: None) == 0, "on its way there"
    assert other.conversation_turns(TALK) == [first.id]
    homes.release(TALK)
    assert clear_strays(pair.other.store, homes, nodes, "m4", lambda turns: None) == 1
    assert pair.other.store.get_conversation(TALK) is None
    homes.begin(TALK, "m4")
    assert clear_strays(store, homes, nodes, "m3", lambda turns: None) == 0, "the only copy"
    pair.mover.prepare(first, "m4")
    gone: list[str] = []
    assert clear_strays(store, homes, nodes, "m3", gone.extend) == 1
    assert gone == [first.id]
    assert store.get_conversation(TALK) is None
    assert homes.claim(TALK, "m4"), "nothing holds it any more"
    assert homes.clearing(TALK, "m4")
    assert not homes.claim(TALK, "m3")
    with pytest.raises(Stays, match="old copy"):
        pair.mover.prepare(first, "m4")
    homes.release(TALK)
    pair.client.delete(key_of(TALK))


def test_what_is_renamed_while_its_answer_leaves_has_its_new_name(pair: Pair) -> None:
    first, past = first_turn(pair)
    job = make_job(
        [*past, *ids(20)], request=asking(4), previous=first.id, conversation=TALK, owner="@ann"
    )
    pair.move(job, 2)
    pair.leaving.store.update_conversation(TALK, metadata={"title": "sea"})
    Homes(pair.client).begin(TALK, "m4")
    pair.mover.left(job)
    assert pair.leaving.store.get_conversation(TALK) is None
    record = pair.other.store.get_conversation(TALK)
    assert record is not None
    assert (record["metadata"], record["head"]) == ({"title": "sea"}, job.id)


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
    pair.client.zadd("tandem:jobs:decoding", {branch.id: 1})
    record = {"conversation": branch.conversation, "previous": first.id}
    pair.client.hset(f"tandem:job:{branch.id}", mapping=record)
    with pytest.raises(StoreError, match="busy"):
        pair.mover.move(TALK, "m4")
    with pytest.raises(Stays, match="branches"):
        pair.mover.prepare(make_job(ids(), previous=first.id, conversation=TALK), "m4")
    pair.mover.prepare(branch, "m4")
    while not (ended := pair.leaving.engine.step()):
        pass
    assert ended[0].error is None
    assert ended[0].commit is not None
    ended[0].commit()
    assert pair.leaving.said(branch) == pair.leaving.oracle(branch)
    pair.client.zrem("tandem:jobs:decoding", branch.id)
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
