"""A long new turn: the state goes to the prefill node, and only what is new comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from decode_kit import LONG, Node, asking, contents, make_job, replay_of
from redis_kit import eventually
from tiny_models import prompt

from engine.model import Model
from scheduler import nodes as registry
from scheduler.config import LinkConfig
from scheduler.execution import Execution, Finished
from scheduler.nodes import Nodes, Presence
from scheduler.record import Job
from scheduler.redis_client import connect
from scheduler.runs import Cancelled, Preempted
from scheduler.staying import Choice, Staying
from store.codec.header import CodecError
from transport.errors import LinkError
from transport.receiver import Receiver
from transport.sink import Loan
from worker_decode.marks import marks_of
from worker_decode.states import Copy
from worker_prefill.engine import Engine
from worker_prefill.handoff import Links
from worker_prefill.late import Late
from worker_prefill.parked import Parked

SECRET = b"s" * 32
CHUNK = 64
FIRST = 300
NEW = 200


class Pair:
    """A decode node behind a receiver, and the prefill node's engine and links."""

    def __init__(self, url: str, model: Model, words: Any, path: Path) -> None:
        self.model = model
        self.node = Node(model, words, path)
        self.receiver = Receiver(
            "127.0.0.1", 0, SECRET, self.node.inbox, LONG, lender=self.node.lending
        )
        host, port = self.receiver.address
        entry = registry.Node(
            "decode", "local", state="ready", link=f"{host}:{port}", secret=SECRET.hex()
        )
        self.presence = Presence(url, entry, LONG).start()
        self.client = connect(url)
        self.links = Links(Nodes(self.client), LinkConfig(deadline_seconds=LONG), "m5")
        eventually(lambda: self._is_there(), "the decode node is not published")
        self.engine = Engine(model, self.links, CHUNK, Parked(4, 1 << 30, 600.0))
        self._stop = threading.Event()
        self._copier = threading.Thread(target=self._copy)
        self._copier.start()

    def _is_there(self) -> bool:
        return Nodes(self.client).get("decode", "local") is not None

    def _copy(self) -> None:
        # What the decode worker's own thread does between two steps. The test's thread is in the
        # prefill engine then, so nobody else touches the states.
        while not self._stop.wait(0.01):
            self.node.lending.serve(self.node.engine.kept.hot, self.node.engine.kept.behind)

    def close(self) -> None:
        self._stop.set()
        self._copier.join()
        self.presence.stop()
        self.links.close()
        self.receiver.close()
        assert self.receiver.stats()["transfers"] == 0
        assert len(self.links._loans) == 0
        behind = sum(left.nbytes for left in self.node.engine.kept.behind._left.values())
        assert self.node.memory.used == self.node.engine.kept.hot.nbytes + behind
        self.node.close()
        self.client.close()

    def first_turn(self) -> tuple[Job, list[int]]:
        """An answered first turn, and all of the conversation's token ids."""
        job = make_job(prompt(FIRST), request=asking(8))
        self.node.answer(job)
        return job, [*job.prompt_ids, *self.node.said(job)]

    def next_turn(self, first: Job, ids: list[int], new: int = NEW, **more: Any) -> Job:
        """A job that the prefill node is to extend."""
        more = {"previous": first.id, "held_tokens": len(ids) - 1, **more}
        return make_job([*ids, *prompt(new, seed=5)], request=asking(8), extend="prefill", **more)

    def extend(
        self, job: Job, check: Callable[[int], bool] = lambda position: False
    ) -> tuple[Job, dict[str, Any]]:
        """The prefill stage of a job: the job as the decode node takes it, and the facts."""
        try:
            tail = self.engine.prefill(Execution(job), job, check)
            facts = dict(tail())
        except (LinkError, CodecError) as error:
            facts = {"path": "none", "error": str(error)}
        again = make_job(
            job.prompt_ids, ident=job.id, request=job.request, previous=job.previous,
            held_tokens=job.held_tokens, extend=job.extend, handoff=facts,
        )  # fmt: skip
        return again, facts

    def finish(self, job: Job) -> Finished:
        """The decode stage; the answer must be that of one process alone."""
        finished = self.node.answer(job)
        assert self.node.said(job) == self.node.oracle(job)
        return finished


@contextmanager
def small_blocks(model: Model) -> Iterator[None]:
    """Blocks of few tokens, as those of a real model are beside its conversations."""
    whole = model.layout
    model.layout = dataclasses.replace(whole, value_bytes=1)
    yield
    model.layout = whole


@pytest.fixture
def pair(redis_url: str, model: Model, words: Any, tmp_path: Path) -> Iterator[Pair]:
    with small_blocks(model), contextlib.closing(Pair(redis_url, model, words, tmp_path)) as made:
        yield made


@pytest.fixture
def plain(redis_url: str, llama: Model, words: Any, tmp_path: Path) -> Iterator[Pair]:
    with small_blocks(llama), contextlib.closing(Pair(redis_url, llama, words, tmp_path)) as made:
        yield made


def path_of(finished: Finished) -> dict[str, Any]:
    assert finished.result is not None
    return dict(finished.result.path)


@pytest.mark.parametrize("place", ["hot", "stored"])
def test_only_new_rows_and_the_snapshot_come_back(pair: Pair, place: str) -> None:
    first, ids = pair.first_turn()
    if place == "stored":
        pair.node.settle()
    job, facts = pair.extend(pair.next_turn(first, ids))
    held = len(ids) - 1
    block = pair.model.layout.block_tokens
    assert facts["borrowed"]["tokens"] == held
    assert facts["computed_tokens"] == NEW
    assert facts["start"] == held - held % block > 0
    # Less than the whole by the rows that the decode node has, but for what a snapshot grows.
    whole = facts["borrowed"]["bytes"] + pair.model.layout.rows_bytes(held, held + NEW)
    assert facts["bytes"] <= whole - pair.model.layout.rows_bytes(0, facts["start"]) // 2
    finished = pair.finish(job)
    assert finished.result is not None
    assert path_of(finished)["path"] == "extended"
    assert finished.result.usage["cached_tokens"] == held
    assert finished.result.computed_tokens == NEW + 1
    # The conversation goes on from what was joined, here or there.
    third = [*job.prompt_ids, *pair.node.said(job)]
    again, facts = pair.extend(pair.next_turn(job, third, new=70))
    assert facts["borrowed"]["tokens"] == len(third) - 1
    pair.finish(again)


def test_a_long_turn_that_is_asked_again_was_kept_at_its_end(pair: Pair) -> None:
    """Where its state cannot be cut back; otherwise an end of a forward will do."""
    layout, store = pair.model.layout, pair.node.store
    store.serve(pair.model.fingerprint, layout.block_tokens, rows_alone=layout.rows_alone)
    first, ids = pair.first_turn()
    job, _ = pair.extend(pair.next_turn(first, ids, new=400))
    assert path_of(pair.finish(job))["path"] == "extended"
    end = job.prompt_tokens - 1
    pays = marks_of(job, layout, 4, len(ids) - 1).end == end
    assert pays == (not layout.rows_alone)
    if pays:
        eventually(lambda: store.longest_prefix(job.prompt_ids, "", end - 1), "it is not kept")
        again = make_job(job.prompt_ids, previous=first.id, request=asking(8))
        finished = pair.finish(again)
        assert finished.result is not None
        assert (path_of(finished)["path"], finished.result.computed_tokens) == ("restored", 1)
        assert pair.node.said(again) == pair.node.said(job)


def test_a_state_that_is_gone_is_computed_from_its_start(plain: Pair) -> None:
    first, ids = plain.first_turn()
    plain.node.engine.forget([first.id])
    plain.node.engine.idle()
    job, facts = plain.extend(plain.next_turn(first, ids))
    assert "borrowed" not in facts
    assert facts["computed_tokens"] == len(job.prompt_ids) - 1
    assert path_of(plain.finish(job))["path"] == "cold"


def test_a_branch_of_a_turn_that_has_gone_on_is_extended_too(plain: Pair) -> None:
    first, ids = plain.first_turn()
    on = make_job([*ids, *prompt(40, seed=6)], request=asking(4), previous=first.id)
    plain.finish(on)
    job, facts = plain.extend(plain.next_turn(first, ids))
    assert facts["borrowed"]["tokens"] == len(ids) - 1
    assert path_of(plain.finish(job))["path"] == "extended"


@pytest.mark.parametrize("place", ["hot", "stored"])
def test_rows_that_went_meanwhile_are_computed_again(plain: Pair, place: str) -> None:
    first, ids = plain.first_turn()
    if place == "stored":
        plain.node.settle()
    job, _ = plain.extend(plain.next_turn(first, ids))
    plain.node.engine.forget([first.id])
    plain.node.engine.idle()
    conversation = "conv_" + first.id.removeprefix("resp_")
    if place == "stored":
        plain.node.store.evict_states(1 << 40) if hasattr(
            plain.node.store, "evict_states"
        ) else None
        plain.node.store.delete_conversation(conversation)
    finished = plain.node.run(plain.node.execution(job))
    assert path_of(finished)["path"] == "recomputed"
    assert any("not here any more" in note for note in path_of(finished)["notes"])


def test_a_state_of_less_than_a_block_comes_back_whole(plain: Pair) -> None:
    plain.model.layout = dataclasses.replace(plain.model.layout, value_bytes=1 << 24)
    first, ids = plain.first_turn()
    job, facts = plain.extend(plain.next_turn(first, ids))
    assert "start" not in facts
    assert facts["borrowed"]["tokens"] == len(ids) - 1
    finished = plain.finish(job)
    assert path_of(finished)["path"] == "extended"
    assert finished.result is not None
    assert finished.result.usage["cached_tokens"] == len(ids) - 1
    assert finished.result.computed_tokens == NEW + 1


@pytest.mark.parametrize("seam", [0, 3])
def test_an_answer_that_is_begun_there_comes_back_as_well(
    plain: Pair, seam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.staying.LOOK", 0.0)
    first, ids = plain.first_turn()
    job = plain.next_turn(first, ids)
    engine = Engine(
        plain.model, plain.links, CHUNK, late=Late(plain.model, plain.node.engine._tokenizer, 8)
    )
    run = plain.node.execution(job)
    stay = Staying(
        lambda: None, lambda: int(len(plain.node.said(job)) >= seam),
        lambda waiting: Choice(not waiting, ""), lambda: None,
    )  # fmt: skip
    facts = dict(engine.begin(run, job, lambda position: False, stay)())
    assert len(plain.node.said(job)) == seam
    again = make_job(
        job.prompt_ids, ident=job.id, request=job.request, previous=job.previous,
        held_tokens=job.held_tokens, extend=job.extend, handoff=facts,
    )  # fmt: skip
    finished = plain.node.answer(again, replay_of(plain.node.events[job.id]))
    assert plain.node.said(again) == plain.node.oracle(again)
    assert path_of(finished)["path"] == "extended"
    assert finished.result is not None
    assert finished.result.computed_tokens == NEW + 1


def test_a_state_is_copied_between_steps(plain: Pair) -> None:
    first, _ = plain.first_turn()
    held = plain.node.engine.kept.hot.get(first.id)
    assert held is not None
    at_once, slowly = Copy(plain.model, held), Copy(plain.model, held)
    assert at_once.more(1 << 30)
    steps = 1
    while not slowly.more(1):
        steps += 1
    assert steps == -(-len(held.ids) // plain.model.layout.block_tokens)
    assert contents(slowly.pieces) == contents(at_once.pieces)


def breaks(pair: Pair, at: int, how: Callable[[], None]) -> None:
    """Have something happen before piece `at` of a loan leaves."""
    lend = pair.node.lending.lend

    class Broken:
        def __init__(self, ask: Any) -> None:
            self.inner = lend(ask)

        def __enter__(self) -> Loan:
            loan = self.inner.__enter__()
            return Loan(loan.tokens, loan.nbytes, loan.block_tokens, self.pieces(loan))

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)

        def pieces(self, loan: Loan) -> Iterator[Any]:
            for index, piece in enumerate(loan.pieces):
                if index == at:
                    how()
                yield piece

    pair.node.lending.lend = Broken  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("times", [1, 2])
def test_a_link_that_breaks_in_a_loan_is_formed_anew_once(plain: Pair, times: int) -> None:
    first, ids = plain.first_turn()
    left = [times]

    def cut() -> None:
        left[0] -= 1
        if left[0] >= 0:
            plain.links.link("local").drop()

    breaks(plain, 1, cut)
    job, facts = plain.extend(plain.next_turn(first, ids))
    assert facts["path"] == ("tcp" if times == 1 else "none")
    assert path_of(plain.finish(job))["path"] == ("extended" if times == 1 else "hot")


def test_a_link_that_breaks_on_the_way_back_is_tried_again(plain: Pair) -> None:
    first, ids = plain.first_turn()

    def cut(position: int) -> bool:
        if position > len(ids):
            plain.links.link("local").drop()
        return False

    job, facts = plain.extend(plain.next_turn(first, ids), cut)
    assert facts["attempts"] > 1
    assert path_of(plain.finish(job))["path"] == "extended"


def test_a_decode_node_without_memory_keeps_the_turn(plain: Pair) -> None:
    first, ids = plain.first_turn()
    plain.node.lending._patience = 0.2
    plain.node.memory.take(plain.node.memory.limit)
    job, facts = plain.extend(plain.next_turn(first, ids))
    plain.node.memory.release(plain.node.memory.limit)
    assert "no memory to lend" in facts["error"]
    assert path_of(plain.finish(job))["path"] == "hot"


def test_a_loan_that_is_damaged_is_not_used(plain: Pair) -> None:
    first, ids = plain.first_turn()
    other = [*ids[:40], *prompt(len(ids) - 40, seed=8)]  # as if the turn were another's
    wanted = plain.next_turn(first, other)
    job, facts = plain.extend(wanted)
    assert "other token ids" in facts["error"]
    finished = plain.node.run(plain.node.execution(job))
    assert path_of(finished)["path"] == "recomputed"


def test_a_cancelled_wait_ends_at_once(plain: Pair) -> None:
    first, ids = plain.first_turn()
    job = plain.next_turn(first, ids)
    execution = Execution(job)
    breaks(plain, 0, execution.mark_cancelled)
    gate = threading.Event()
    breaks(plain, 1, lambda: (gate.wait(LONG), None)[1])
    with pytest.raises(Cancelled):
        plain.engine.prefill(execution, job, lambda position: False)
    gate.set()
    eventually(lambda: plain.receiver.stats()["threads"] <= 4, "the loan goes on")


def test_a_preempted_extension_goes_on_from_its_chunk(plain: Pair) -> None:
    first, ids = plain.first_turn()
    job = plain.next_turn(first, ids)

    def stop(position: int) -> bool:
        if position > len(ids):
            raise Preempted
        return False

    with pytest.raises(Preempted):
        plain.engine.prefill(Execution(job), job, stop)
    job, facts = plain.extend(job)
    assert "borrowed" not in facts  # it was lent once, and the decode node still has it
    assert facts["start"] == (len(ids) - 1) - (len(ids) - 1) % plain.model.layout.block_tokens
    assert facts["computed_tokens"] < NEW
    assert path_of(plain.finish(job))["path"] == "extended"


def test_control_messages_and_asks_are_few(plain: Pair, client: redis.Redis) -> None:
    first, ids = plain.first_turn()
    link = plain.links.link("local")
    before = client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
    job, _ = plain.extend(plain.next_turn(first, ids))
    after = client.info("commandstats")["cmdstat_get"]["calls"]
    assert link._sender is not None
    assert link._sender.control_bytes < 64 << 10
    assert after - before <= 4
    plain.finish(job)
