"""A turn that was gone on from can be gone on from again: branches, answers asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Node, asking, make_job
from redis_kit import eventually
from tiny_models import prompt

from engine.model import Model
from scheduler.record import Job
from store.store import Store


@pytest.fixture
def node(model: Model, words: Any, tmp_path: Path) -> Iterator[Node]:
    made = Node(model, words, tmp_path, store={"idle_seconds": 3600})
    yield made
    made.close()


def first(tokens: int = 5, length: int = 60) -> Job:
    return make_job(prompt(length), request=asking(tokens))


def after(node: Node, turn: Job, seed: int, tokens: int = 5, **request: Any) -> Job:
    ids = [*node.store.turn_ids(turn.id), *prompt(12, seed=seed)]
    return make_job(ids, previous=turn.id, request=asking(tokens, **request))


def answered(node: Node, job: Job) -> tuple[str, int]:
    """Path and tokens computed; the answer is the oracle's."""
    finished = node.answer(job)
    assert finished.result is not None
    if job.request.get("store", True):
        assert node.said(job) == node.oracle(job)
    return finished.result.path["path"], finished.result.computed_tokens


def idle(node: Node) -> None:
    """Until all is written, as after a quiet time; memory is empty then."""
    config = node.engine._config
    store = config.store.model_copy(update={"idle_seconds": 0.0})
    node.engine.kept._config = config.model_copy(update={"store": store})
    node.settle()
    saver = node.engine.kept.saver
    eventually(lambda: saver._nbytes == 0, "parents are not written")
    assert (node.engine.facts()["behind"], node.memory.used) == (0, 0)


@pytest.mark.rotate(2)
def test_a_parent_is_gone_on_from_again(node: Node) -> None:
    one = first()
    answered(node, one)
    for seed in (21, 22, 23):
        assert answered(node, after(node, one, seed)) == ("hot", 13)
    assert node.engine.facts()["behind"] == 1
    idle(node)
    assert node.store.check().clean


@pytest.mark.rotate(4)
def test_every_turn_of_a_conversation_can_be_gone_back_to(node: Node) -> None:
    turns = [first()]
    answered(node, turns[0])
    for seed in range(31, 35):
        turns.append(after(node, turns[-1], seed))
        assert answered(node, turns[-1]) == ("hot", 13)
    for turn in reversed(turns[:-1]):
        assert answered(node, after(node, turn, 41)) == ("hot", 13)
    idle(node)


@pytest.mark.rotate(2)
def test_two_branches_at_once(node: Node) -> None:
    one = first()
    answered(node, one)
    branches = [after(node, one, seed, tokens=9) for seed in (51, 52, 53)]
    executions = {job.id: node.execution(job) for job in branches}
    finished = []
    node.engine.add(executions[branches[0].id], branches[0])
    for job in branches[1:]:
        for _ in range(3):  # the one before has said something by then
            finished += node.engine.step()
        node.engine.add(executions[job.id], job)
    while len(finished) < 3:
        finished += node.engine.step()
    for each in finished:
        assert each.error is None
        assert each.result is not None
        assert each.result.path["path"] == "hot"
        assert each.commit is not None
        each.commit()
    for job in branches:
        assert node.said(job) == node.oracle(job)
    idle(node)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("way", ["cancelled", "not stored"])
def test_a_turn_that_is_given_up_leaves_its_parent(node: Node, way: str) -> None:
    one = first()
    answered(node, one)
    used = node.memory.used
    if way == "cancelled":
        job = after(node, one, 61, tokens=50)
        execution = node.execution(job)
        node.engine.add(execution, job)
        for _ in range(4):
            node.engine.step()
        node.engine.cancel(execution)
    else:
        answered(node, after(node, one, 61, store=False))
    assert (node.engine.facts()["behind"], node.engine.facts()["hot"]) == (0, 1)
    assert node.memory.used >= used
    assert answered(node, after(node, one, 62)) == ("hot", 13)
    idle(node)


@pytest.mark.rotate(4)
def test_what_is_behind_gives_way_first(node: Node) -> None:
    one = first()
    answered(node, one)
    two = after(node, one, 71)
    answered(node, two)
    held = node.engine.facts()
    assert (held["behind"], held["hot"]) == (1, 1)
    spare = node.memory.used - node.engine.kept.hot.nbytes
    node.memory.limit = node.memory.used - 1 if spare else node.memory.used
    node.engine.kept.next_look = 0.0
    node.engine.idle()
    assert node.engine.facts()["hot"] == 1
    assert node.memory.used == node.engine.kept.hot.nbytes
    assert answered(node, after(node, two, 72))[0] == "hot"


@pytest.mark.rotate(2)
def test_what_is_behind_is_found_in_the_store_later(node: Node) -> None:
    """Rows alone within the later turn's; otherwise where the snapshot was worth its bytes."""
    layout = node.model.layout
    node.store.serve(node.model.fingerprint, layout.block_tokens, rows_alone=layout.rows_alone)
    one = first(length=layout.block_tokens + 40 if layout.block_tokens < 700 else 60)
    answered(node, one)
    two = after(node, one, 81)
    answered(node, two)
    idle(node)
    eventually(lambda: node.store.find_state(two.id) is not None, "it is not saved")
    held = len(node.store.turn_ids(one.id)) - 1
    stored = node.store.find_state(one.id)
    if layout.rows_alone:
        assert stored is None
        path, computed = answered(node, after(node, one, 82))
        assert path in ("restored", "recomputed")
        if path == "restored":
            assert computed < 13 + layout.block_tokens
    elif stored is not None:
        assert stored.tokens == held
        assert answered(node, after(node, one, 82)) == ("restored", 13)
    assert node.store.check().clean


@pytest.mark.rotate(4)
def test_deleted_turns_are_not_kept_behind(node: Node) -> None:
    one = first()
    answered(node, one)
    two = after(node, one, 91)
    answered(node, two)
    node.engine.forget([one.id, two.id])
    node.engine.kept.next_look = 0.0
    node.engine.idle()
    assert (node.engine.facts()["behind"], node.memory.used) == (0, 0)


def test_the_saver_writes_parents_after_their_heir(
    words: Any, llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_decode.behind.MOST_SNAPSHOT", 1 << 20)
    from decode_kit import tiny

    made = Node(tiny("qwen3_next"), words, tmp_path, store={"idle_seconds": 3600})
    order: list[str] = []
    save = Store.save_state

    def noted(self: Store, turn_id: str, *rest: Any, **more: Any) -> Any:
        order.append(turn_id)
        return save(self, turn_id, *rest, **more)

    monkeypatch.setattr(Store, "save_state", noted)
    try:
        one = first()
        answered(made, one)
        two = after(made, one, 95)
        answered(made, two)
        idle(made)
        eventually(lambda: made.engine.idle() or made.store.find_state(one.id), "it is not saved")
        assert order == [two.id, one.id]
        assert answered(made, after(made, one, 96)) == ("restored", 13)
        assert made.store.check().clean
    finally:
        made.close()
