"""Conversations that begin with one long preamble compute it once and store it once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from decode_kit import Node, asking, make_job, tiny
from pair_kit import Pair
from redis_kit import eventually
from tiny_models import prompt

from engine.model import Model
from scheduler.execution import Execution
from scheduler.record import Job
from scheduler.runs import Cancelled, Preempted
from store.objects import ROWS
from store.states import PREAMBLE as NAMED
from worker_decode.marks import cut_of

SOAK = bool(os.environ.get("TANDEM_SOAK"))
LONG = 20_000 if SOAK else 350
PREAMBLE = prompt(350, seed=3)
CONVERSATIONS = 10


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def kind(request: pytest.FixtureRequest) -> Model:
    """A model whose state is rows alone, and one that cannot be cut back; small blocks."""
    model = tiny(request.param)
    model.context_length = 32_768
    per_block = 48 * model.layout.row_bytes + 1000
    model.__dict__["layout"] = replace(model.layout, value_bytes=per_block)
    assert model.layout.block_tokens in (32, 48)
    return model


@pytest.fixture
def pair(
    kind: Model, words: Any, tmp_path: Path, redis_url: str, client: redis.Redis
) -> Iterator[Pair]:
    # Ten whole states of the long preamble in memory, and one in the store.
    room = 16 if SOAK else 1
    made = Pair(redis_url, client, kind, words, tmp_path, gigabytes=room)
    yield made
    made.close()


def begun(
    number: int,
    preamble: Sequence[int] = PREAMBLE,
    *,
    handoff: Mapping[str, Any] | None = None,
    ident: str | None = None,
    **more: Any,
) -> Job:
    """A first turn: the preamble, and a question of its own."""
    ids = [*preamble, *prompt(40, seed=100 + number)]
    request = asking(5, prompt={"preamble": len(preamble)})
    return make_job(ids, ident=ident, handoff=handoff, request=request, **more)


def computed(node: Node, job: Job, *, check: bool = True) -> tuple[str, int]:
    """The path an answer took and the tokens computed for it; it is the oracle's."""
    finished = node.answer(job)
    assert finished.result is not None
    if check:
        assert node.said(job) == node.oracle(job)
    return finished.result.path["path"], finished.result.computed_tokens


def blocks_within(node: Node, tokens: int) -> int:
    """How many stored blocks lie within the first `tokens` positions."""
    store = node.store
    with store.environment.read() as txn:
        records = [
            store.blocks.get(txn, bytes(key))
            for key in txn.cursor(db=store.environment.blk).iternext(keys=True, values=False)
        ]
    return sum(r is not None and r.kind == ROWS and r.stop <= tokens for r in records)


def found(node: Node, ids: Sequence[int], owner: str = "") -> int:
    node.store.serve(
        node.model.fingerprint,
        node.model.layout.block_tokens,
        rows_alone=node.model.layout.rows_alone,
    )
    prefix = node.store.longest_prefix(ids, owner)
    return 0 if prefix is None else prefix.tokens


def test_ten_that_come_together_compute_and_store_it_once(pair: Pair) -> None:
    """All are prefilled before any is decoded: the prefill node goes on from what it has.

    20,000 tokens with the soak. Each answer that is compared costs a prefill of all of them, so
    that one is compared there.
    """
    compared = (9,) if SOAK else (1, 9, 77)
    preamble = prompt(LONG, seed=3)
    node, block = pair.node, pair.node.model.layout.block_tokens
    jobs = [begun(number, preamble) for number in range(CONVERSATIONS)]
    cut = cut_of(jobs[0], node.model.layout)
    assert LONG - block < cut <= LONG
    assert found(node, jobs[0].prompt_ids) == 0
    length = jobs[0].prompt_tokens
    facts = [dict(pair.prefill(job)()) for job in jobs]
    assert [each["computed_tokens"] for each in facts] == [length - 1, *[length - 1 - cut] * 9]
    assert [each.get("shared", 0) for each in facts] == [0, *[cut] * 9]
    for number, (job, told) in enumerate(zip(jobs, facts, strict=True)):
        again = begun(number, preamble, handoff=told, ident=job.id)
        expected = ("cold", length - (cut if number else 0))
        assert computed(node, again, check=number in compared) == expected
    node.settle()
    assert blocks_within(node, cut) == cut // block
    stats = node.store.stats()
    assert stats["states"] == CONVERSATIONS + 1
    assert node.store.check().clean
    # One that comes later is known to the store, and decoded at once.
    late = begun(77, preamble)
    assert found(node, late.prompt_ids) >= cut
    assert computed(node, late, check=77 in compared) == ("restored", length - cut)
    node.settle()
    assert blocks_within(node, cut) == cut // block


def stopped(pair: Pair, job: Job, past: int, why: type[Exception]) -> None:
    """Prefill a job until a chunk has ended at or beyond a position, where it is stopped."""

    def check(position: int) -> bool:
        if position >= past:
            raise why
        return False

    with pytest.raises(why):
        pair.engine.prefill(Execution(job), job, check)


def handed(pair: Pair, job: Job) -> dict[str, Any]:
    """Prefill a job and bring its turn to its end; what its hand-off says."""
    facts = dict(pair.prefill(job)())
    assert facts["path"] == "tcp"
    again = make_job(job.prompt_ids, ident=job.id, handoff=facts, request=dict(job.request))
    pair.node.answer(again)
    return facts


@pytest.mark.parametrize("why", [Preempted, Cancelled])
def test_a_prompt_that_stops_after_its_preamble_does_not_take_it_along(
    pair: Pair, why: type[Exception]
) -> None:
    """Whoever goes on from what is parked brings the preamble's state, and nobody a second time."""
    node = pair.node
    first, second, third = (begun(number) for number in range(3))
    length, cut = first.prompt_tokens, cut_of(first, node.model.layout)
    found(node, first.prompt_ids)  # says which model is served
    stopped(pair, first, cut + 1 if why is Cancelled else cut, why)
    if why is Preempted:
        told = [handed(pair, job) for job in (first, second, third)]
        turns = 3
    else:  # its client has gone; another one asks what begins alike
        told = [handed(pair, job) for job in (second, third)]
        turns = 2
    assert [facts["computed_tokens"] for facts in told] == [length - 1 - cut] * turns
    node.settle()
    assert node.store.stats()["states"] == turns + 1
    assert blocks_within(node, cut) == cut // node.model.layout.block_tokens
    late = begun(9)
    assert found(node, late.prompt_ids) >= cut
    assert computed(node, late) == ("restored", length - cut)
    more = told[0]["bytes"] - told[1]["bytes"]
    layout = node.model.layout
    assert more >= layout.state_bytes(cut) - layout.rows_bytes(0, cut)
    if turns == 3:
        assert told[1]["bytes"] == told[2]["bytes"]
    assert node.store.check().clean


def test_without_a_prefill_node_it_is_kept_as_it_is_computed(pair: Pair) -> None:
    node = pair.node
    first = begun(0)
    found(node, first.prompt_ids)  # says which model is served
    length, cut = first.prompt_tokens, cut_of(first, node.model.layout)
    assert computed(node, first) == ("cold", length)
    eventually(lambda: found(node, begun(1).prompt_ids) == cut, "the preamble is not stored")
    assert computed(node, begun(1)) == ("restored", length - cut)
    node.settle()
    assert blocks_within(node, cut) == cut // node.model.layout.block_tokens


def test_other_owners_compute_their_own(pair: Pair) -> None:
    node = pair.node
    mine, theirs = begun(0, owner="anna"), begun(1, owner="bert")
    found(node, mine.prompt_ids)
    length, cut = mine.prompt_tokens, cut_of(mine, node.model.layout)
    facts = dict(pair.prefill(mine)())
    assert dict(pair.prefill(theirs)())["computed_tokens"] == length - 1
    node.answer(begun(0, owner="anna", handoff=facts, ident=mine.id))
    node.inbox.discard(theirs.id)
    eventually(lambda: found(node, mine.prompt_ids, "anna") == cut, "the preamble is not stored")
    assert found(node, theirs.prompt_ids, "bert") == 0
    assert computed(node, theirs) == ("cold", length)
    assert computed(node, begun(2, owner="anna")) == ("restored", length - cut)


def test_what_is_not_to_be_stored_leaves_no_preamble(pair: Pair) -> None:
    node = pair.node
    request = asking(5, prompt={"preamble": len(PREAMBLE)}, store=False)
    job = make_job(begun(0).prompt_ids, request=request)
    found(node, job.prompt_ids)
    node.run(node.execution(job))
    node.settle()
    assert node.store.stats()["objects"] == 0


def given_up(node: Node, job: Job) -> None:
    """Run a job until its preamble is stored, and let its client go."""
    cut = cut_of(job, node.model.layout)
    run = node.execution(job)
    node.engine.add(run, job)
    while not node.said(job):
        node.engine.step()
    eventually(lambda: found(node, job.prompt_ids) == cut, "the preamble is not stored")
    node.engine.cancel(run)


def saved(node: Node) -> None:
    """Until the saver has done what it was given."""
    done = threading.Event()
    node.engine.kept.saver.do(done.set)
    assert done.wait(60)


def conversations(node: Node) -> list[str]:
    """Those that the stored preambles belong to."""
    with node.store.environment.read() as txn:
        return [state.conversation for state in node.store.states.named(txn, NAMED)]


def objects(node: Node) -> int:
    node.engine.idle()
    return int(node.store.stats()["objects"])


def test_a_preamble_of_a_turn_that_nobody_keeps_goes_with_it(
    kind: Model, words: Any, tmp_path: Path
) -> None:
    node = Node(kind, words, tmp_path, jobs={"parked_seconds": 0})
    try:
        given_up(node, begun(0))
        eventually(lambda: objects(node) == 0, "the preamble stays")
        assert node.store.check().clean
    finally:
        node.close()


Timed = tuple[Node, list[float]]
"""A node, and the time by which its preambles are given up, for a test to move on."""


def by_hand(node: Node) -> list[float]:
    now = [0.0]
    node.engine._sharing.loose.clock = lambda: now[0]
    return now


@pytest.fixture
def timed(kind: Model, words: Any, tmp_path: Path) -> Iterator[Timed]:
    node = Node(kind, words, tmp_path)
    try:
        yield node, by_hand(node)
    finally:
        node.close()


@pytest.mark.parametrize("again", [0, 1])
def test_a_preamble_stays_for_a_turn_that_is_kept(timed: Timed, again: int) -> None:
    """Of the same client, that asks once more, or of another that says the same first."""
    node, now = timed
    first, second = begun(0), begun(again)
    length, cut = first.prompt_tokens, cut_of(first, node.model.layout)
    given_up(node, first)
    node.engine.idle()
    assert node.store.check().clean
    assert computed(node, second) == ("restored", length - cut)
    now[0] = 1e6
    node.settle()
    saved(node)
    assert node.store.drop_state(second.id)
    assert node.store.check().clean
    assert found(node, begun(2).prompt_ids) == cut
    assert conversations(node) == [""]


def test_a_preamble_stays_where_a_later_run_of_its_turn_is_kept(timed: Timed) -> None:
    """The run that brought it is known to be lost only when the next one is under way."""
    node, now = timed
    first = begun(0)
    given_up(node, first)
    node.engine.idle()
    node.engine._sharing.ended(first.id, kept=True)
    node.engine.idle()
    now[0] = 1e6
    node.engine.idle()
    saved(node)
    assert found(node, first.prompt_ids) == cut_of(first, node.model.layout)
    assert conversations(node) == [""]


def test_a_preamble_that_others_still_use_waits_for_their_end(timed: Timed) -> None:
    node, now = timed
    first, second = begun(0), begun(1)
    cut = cut_of(first, node.model.layout)
    given_up(node, first)
    run = node.execution(second)
    node.engine.add(run, second)
    now[0] = 1e6
    node.engine.idle()
    saved(node)
    assert found(node, second.prompt_ids) == cut, "the other one begins with it"
    node.engine.cancel(run)
    node.engine.idle()
    now[0] = 2e6
    eventually(lambda: objects(node) == 0, "the preamble stays")


@pytest.mark.parametrize("drained", [False, True])
def test_a_preamble_stays_for_a_turn_that_the_prefill_node_began_with_it(
    pair: Pair, drained: bool
) -> None:
    """It began where the preamble is parked, so that this one has no state that says so."""
    node = pair.node
    now = by_hand(node)
    first, second = begun(0), begun(1)
    length, cut = first.prompt_tokens, cut_of(first, node.model.layout)
    found(node, first.prompt_ids)  # says which model is served
    facts = dict(pair.prefill(first)())
    told = dict(pair.prefill(second)())
    assert told["computed_tokens"] == length - 1 - cut
    asked = {**second.request, "params": {"max_output_tokens": 40}}  # it outlasts the other one
    again = make_job(second.prompt_ids, ident=second.id, handoff=told, request=asked)
    run = node.execution(again)
    node.engine.add(run, again)  # before the one that brings it
    given_up(node, make_job(first.prompt_ids, ident=first.id, handoff=facts, request=first.request))
    node.engine.idle()
    while not (ended := node.engine.step()):
        pass
    assert ended[0].commit is not None
    ended[0].commit()
    now[0] = 1e6
    node.engine._sharing.look_after(wait=drained)
    saved(node)
    assert conversations(node) == [""]
    node.settle()
    assert node.store.drop_state(second.id)
    assert found(node, begun(2).prompt_ids) == cut
    assert node.store.check().clean


def test_a_preamble_that_is_to_go_stays_for_a_turn_that_comes_before_it_goes(timed: Timed) -> None:
    node, now = timed
    saver, begins, goes_on = node.engine.kept.saver, threading.Event(), threading.Event()

    def slow() -> None:
        begins.set()
        goes_on.wait(60)

    try:
        first, second = begun(0), begun(1)
        given_up(node, first)
        node.engine.idle()
        saver.do(slow)
        assert begins.wait(60)
        while saver.room:
            saver.do(goes_on.is_set)
        now[0] = 1e6
        node.engine.idle()
        run = node.execution(second)
        node.engine.add(run, second)
        goes_on.set()
        saved(node)
        node.engine.idle()
        saved(node)
        while not (ended := node.engine.step()):
            pass
        assert ended[0].commit is not None
        ended[0].commit()
        node.settle()
        now[0] = 2e6
        node.engine.idle()
        saved(node)
        assert conversations(node) == [""]
    finally:
        goes_on.set()


def test_a_preamble_outlives_its_conversations_and_the_process(
    kind: Model, words: Any, tmp_path: Path
) -> None:
    node = Node(kind, words, tmp_path)
    first = begun(0)
    found(node, first.prompt_ids)
    length, cut = first.prompt_tokens, cut_of(first, kind.layout)
    computed(node, first)
    node.settle()
    assert node.store.drop_state(first.id)
    node.close()
    again = Node(kind, words, tmp_path)
    try:
        assert found(again, begun(1).prompt_ids) == cut
        assert computed(again, begun(1)) == ("restored", length - cut)
    finally:
        again.close()


def test_a_damaged_preamble_is_computed_again(pair: Pair) -> None:
    node = pair.node
    first = begun(0)
    found(node, first.prompt_ids)
    computed(node, first)
    node.settle()
    environment = node.store.environment

    def lose(txn: Any) -> None:
        for key, _ in list(txn.cursor(db=environment.pages)):
            if bytes(key[:1]) == b"h":
                txn.delete(bytes(key), db=environment.pages)

    environment.write(lose)
    job = begun(1)
    finished = node.answer(job)
    assert finished.result is not None
    assert finished.result.path["path"] == "cold"
    assert "a stored prefix is unusable" in finished.result.path["notes"][0]
    assert node.said(job) == node.oracle(job)
