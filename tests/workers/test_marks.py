"""Inside a prompt states are kept from which an edited or repeated last message goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from api_node import ApiNode
from decode_kit import Node, asking, deliver, make_job, state_of, tiny
from pair_kit import Pair
from redis_kit import eventually
from tiny_models import prompt

from engine.model import Model
from engine.names import SEEN
from scheduler.execution import Finished
from scheduler.record import Job, JobError
from store import pages
from store.errors import StoreError
from store.states import INSIDE
from worker_decode.marks import LEAST_TOKENS, MOST_SNAPSHOT, Marks, marks_of, pays

HISTORY = prompt(420, seed=5)
LONG = prompt(400, seed=6)


@pytest.fixture(scope="module", params=["llama", "qwen3_next", "falcon_h1"])
def kind(request: pytest.FixtureRequest) -> Model:
    """Rows alone; delta-rule layers beside attention; scans and attention in one layer."""
    model = tiny(request.param)
    per_block = 48 * model.layout.row_bytes + 1200
    model.__dict__["layout"] = replace(model.layout, value_bytes=per_block)
    assert model.layout.block_tokens in (16, 32, 48)
    return model


@pytest.fixture
def node(kind: Model, words: Any, tmp_path: Path) -> Iterator[Node]:
    made = serving(Node(kind, words, tmp_path))
    yield made
    made.close()


def serving(node: Node) -> Node:
    layout = node.model.layout
    node.store.serve(node.model.fingerprint, layout.block_tokens, rows_alone=layout.rows_alone)
    return node


def asked(before: list[int], message: list[int], **more: Any) -> Job:
    """A prompt of no stored conversation: what was said before, and a last message."""
    request = asking(4, prompt={"last": len(before)})
    return make_job([*before, *message], request=request, conversation="conv_" + "a" * 32, **more)


def answered(node: Node, job: Job) -> tuple[str, int]:
    """Path and tokens computed; the answer is the oracle's."""
    finished = node.answer(job)
    assert finished.result is not None
    assert node.said(job) == node.oracle(job)
    return finished.result.path["path"], finished.result.computed_tokens


def kept(node: Node) -> list[int]:
    """Positions of the states inside prompts, in order."""
    with node.store.environment.read() as txn:
        return sorted(state.tokens for state in node.store.states.named(txn, INSIDE))


def await_kept(node: Node, count: int) -> list[int]:
    eventually(lambda: len(kept(node)) == count, f"{count} states are not kept")
    return kept(node)


def test_the_last_message_is_edited_and_sent_again(node: Node) -> None:
    """Also before the conversation has left memory, and without a word of what it is."""
    first = asked(HISTORY, prompt(40, seed=11))
    assert answered(node, first) == ("cold", 460)
    (cut,) = await_kept(node, 1)
    assert cut == 420 - 420 % node.model.layout.block_tokens
    edited = asked(HISTORY, prompt(25, seed=12))
    assert answered(node, edited) == ("restored", 445 - cut)
    again = make_job(first.prompt_ids, request=asking(4))
    assert answered(node, again) == ("restored", 460 - cut)
    assert node.said(again) == node.said(first)
    assert node.store.stats()["inside_prompts_hits"] == 2
    node.settle()
    assert node.store.check().clean


def test_an_answer_to_a_long_message_is_asked_for_again(node: Node) -> None:
    first = asked([], LONG)
    assert answered(node, first) == ("cold", 400)
    if node.model.layout.rows_alone:
        node.settle()  # an end of a forward within the stored rows will do
    else:
        assert await_kept(node, 1) == [399]
    again = make_job(first.prompt_ids, request=asking(4))
    path, computed = answered(node, again)
    assert path == "restored"
    assert node.said(again) == node.said(first)
    if node.model.layout.rows_alone:
        assert computed < 400
    else:
        assert computed == 1
    node.settle()
    assert node.store.check().clean


@pytest.mark.rotate(3)
def test_a_long_message_of_a_later_turn_is_sent_again(node: Node) -> None:
    one = make_job(prompt(60, seed=2), request=asking(4))
    assert answered(node, one) == ("cold", 60)
    ids = [*node.store.turn_ids(one.id), *LONG]
    two = make_job(ids, previous=one.id, request=asking(4))
    assert answered(node, two)[1] == 401
    hybrid = not node.model.layout.rows_alone
    if hybrid:
        assert await_kept(node, 1) == [len(ids) - 1]
    again = make_job(ids, previous=one.id, request=asking(4))
    path, computed = answered(node, again)
    assert (path, computed) == ("restored", 1) if hybrid else computed <= 401
    assert node.said(again) == node.said(two)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lost_record_of_the_turn_before_ends_no_row(
    words: Any, tmp_path: Path, arrives: bool
) -> None:
    """Whose prompt a state is inside cannot be told then: it is not kept, and all else goes on."""
    model = tiny("qwen3_next")
    node = serving(Node(model, words, tmp_path))
    try:
        one = make_job(prompt(60, seed=2), request=asking(4))
        assert answered(node, one) == ("cold", 60)
        ids = [*node.store.turn_ids(one.id), *LONG]
        two = make_job(ids, previous=one.id, request=asking(4))
        assert marks_of(two, model.layout, 4).end == len(ids) - 1
        if arrives:
            deliver(node.inbox, model, two.id, state_of(model, ids))
        store = node.store
        store.environment.write(
            lambda txn: pages.delete(store.environment, txn, b"t" + one.id.encode())
        )
        slots = node.engine.free()
        finished = node.run(node.execution(two))
        assert finished.error is None
        assert len(node.said(two)) == 4
        assert node.engine.free() == slots
        assert kept(node) == []
        assert finished.commit is not None
        with pytest.raises(StoreError, match="lost its record"):
            finished.commit()
    finally:
        node.close()


@pytest.mark.rotate(3)
def test_states_inside_a_prompt_come_over_the_link(
    kind: Model, words: Any, tmp_path: Path, redis_url: str, client: redis.Redis
) -> None:
    pair = Pair(redis_url, client, kind, words, tmp_path)
    node = serving(pair.node)
    try:
        first = asked(HISTORY, LONG)
        facts = dict(pair.prefill(first)())
        again = asked(HISTORY, LONG, ident=first.id, handoff=facts)
        assert answered(node, again) == ("cold", 820)
        hybrid = not kind.layout.rows_alone
        # Before the last message, at the end, and between the beginning and the message one
        # where its rows are as many bytes as a snapshot; see `test_places`.
        places = await_kept(node, len(marks_of(first, kind.layout, 4).every))
        cut = 420 - 420 % kind.layout.block_tokens
        assert cut in places
        assert (819 in places) is hybrid
        assert answered(node, asked(HISTORY, prompt(30, seed=13))) == ("restored", 450 - cut)
        repeated = make_job(first.prompt_ids, request=asking(4))
        path, computed = answered(node, repeated)
        assert path == "restored"
        assert computed == 1 if hybrid else computed <= 820 - cut
        node.settle()
        assert node.store.check().clean
        assert node.store.delete_conversation(first.conversation or "")
        eventually(lambda: node.engine.idle() is False, "it does not come to rest")
        assert kept(node) == []
        assert node.store.check().clean
    finally:
        pair.close()


def test_whoever_goes_back_further_finds_a_lattice(words: Any, tmp_path: Path) -> None:
    model = tiny("lfm2")  # a snapshot of two tokens' rows
    layout = replace(model.layout, value_bytes=48 * model.layout.row_bytes + 1200)
    model.__dict__["layout"] = layout
    node = serving(Node(model, words, tmp_path))
    try:
        whole = prompt(1300, seed=8)
        first = asked(whole, prompt(20, seed=9))
        answered(node, first)
        marks = marks_of(first, layout, 4)
        assert len(marks.inside) == 4
        assert marks.end == 0
        assert await_kept(node, 4) == list(marks.inside)
        cut = marks.inside[1]
        branch = make_job([*whole[: cut + 10], *prompt(30, seed=10)], request=asking(4))
        assert answered(node, branch) == ("restored", 40)
    finally:
        node.close()


@pytest.mark.rotate(3)
def test_a_client_that_edits_its_last_message_pays_for_that_alone(
    kind: Model, model_path: Path, redis_url: str
) -> None:
    """Over HTTP, by a client that sends all of its messages each time."""
    said = [
        {"role": "user", "content": "When does the train to the sea leave? " * 30},
        {"role": "assistant", "content": "At seven, from the first platform. " * 30},
    ]
    with ApiNode(redis_url, kind, model_path) as stack:
        client = stack.client()

        def ask(text: str) -> Any:
            messages = [*said, {"role": "user", "content": text}]
            return stack.workers.serve(
                lambda: client.chat.completions.create(
                    model="default", messages=messages, max_tokens=4, temperature=0
                )
            )

        first = ask("And where to?")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        block = kind.layout.block_tokens
        least = first.usage.prompt_tokens - block - 30
        eventually(
            lambda: max(kept(stack.node), default=0) >= least, "its last message is not found"
        )
        cut = max(kept(stack.node))
        for text in ("Why at seven?", "And where to?"):
            answer = ask(text)
            assert answer.usage.prompt_tokens_details.cached_tokens == cut
            assert answer.usage.prompt_tokens - cut < block + 30
            same = answer.choices[0].message.content == first.choices[0].message.content
            assert same or text != "And where to?"


def test_nothing_is_kept_where_it_is_not_wanted(kind: Model, words: Any, tmp_path: Path) -> None:
    node = serving(Node(kind, words, tmp_path, store={"snapshots": 0}))
    try:
        answered(node, asked(HISTORY, prompt(40, seed=11)))
        request = {**asking(4, prompt={"last": 420}), "store": False}
        node.run(node.execution(make_job([*HISTORY, *LONG], request=request)))
        node.settle()
        assert kept(node) == []
    finally:
        node.close()


def test_places(kind: Model) -> None:
    layout = kind.layout
    block = layout.block_tokens
    cut = 420 - 420 % block
    assert marks_of(asked(HISTORY, LONG), layout, 0) == Marks()
    assert marks_of(asked(HISTORY, LONG), layout, 1).every == (cut,)
    assert marks_of(asked([], LONG[:LEAST_TOKENS]), layout, 4) == Marks()
    assert marks_of(asked([*HISTORY, SEEN], LONG), layout, 4) == Marks()
    private = make_job([*HISTORY, *LONG], request={**asking(4), "store": False})
    assert marks_of(private, layout, 4) == Marks()
    # What is held has a state already.
    assert marks_of(asked(HISTORY, LONG), layout, 4, held=cut).before == ()
    for wrong in (None, "420", -5, 10**9, True):
        job = make_job([*HISTORY, *LONG[:40]], request=asking(4, prompt={"last": wrong}))
        assert all(0 < mark < 460 and mark % block == 0 for mark in marks_of(job, layout, 4).before)
    for most in range(6):
        for length in (300, 700, 2000, 6000):
            job = asked(prompt(length), prompt(300))
            marks = marks_of(job, layout, most)
            places = [0, *marks.every]
            assert len(marks.every) <= most
            if layout.rows_alone:
                assert len(marks.every) <= 1
            for before, place in zip(places, marks.every, strict=False):
                # A whole number of blocks may take up to a block from a gap.
                assert pays(layout, max(0, before - block), place)
                snapshot = layout.state_bytes(place) - layout.rows_bytes(0, place)
                assert snapshot <= MOST_SNAPSHOT * layout.rows_bytes(max(0, before - block), place)


@pytest.mark.parametrize("end", ["cancelled", "failed", "deleted"])
def test_what_is_kept_inside_a_prompt_goes_with_a_turn_that_is_not(
    words: Any, tmp_path: Path, end: str
) -> None:
    """Also where its conversation is deleted while the state waits for the disk."""
    node = serving(Node(tiny("qwen3_next"), words, tmp_path))
    saver, gate, done = node.engine.kept.saver, threading.Event(), threading.Event()
    try:
        job = asked([], LONG)
        if end == "failed":  # its conversation is not there when it ends
            job.request["params"]["about"] = {"new_conversation": False}
        if end == "deleted":
            saver.do(lambda: gate.wait(60) and None)
        execution = node.execution(job)
        node.engine.add(execution, job)
        while not node.said(job):
            node.engine.step()
        if end != "deleted":
            assert await_kept(node, 1) == [399]
            assert node.store.check().clean, "it may be kept yet"
        if end == "cancelled":
            node.engine.cancel(execution)
        else:
            finished = ended(node)
            assert finished.commit is not None
            if end == "failed":
                with pytest.raises(JobError, match="was deleted while this turn ran"):
                    finished.commit()
            else:
                finished.commit()
                assert node.store.delete_conversation(job.conversation or "")
        gate.set()
        node.engine.idle()
        saver.do(done.set)
        assert done.wait(60)
        assert kept(node) == []
        assert node.store.check().clean
    finally:
        gate.set()
        node.close()


def ended(node: Node) -> Finished:
    """Step until a row ends."""
    while True:
        for finished in node.engine.step():
            return finished
