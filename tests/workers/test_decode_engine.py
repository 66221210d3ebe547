"""Whole conversations on a decode node's engine: answers, turns, states, retries, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Node, asking, deliver, make_job, offer, replay_of, state_of
from redis_kit import eventually

from engine.model import Model
from scheduler.ledger.clock import Clock
from scheduler.ledger.notes import Piece
from scheduler.record import Job, JobError
from store.errors import StoreError
from worker_decode.answers import sampling
from worker_decode.engine import COMPUTED_HERE
from worker_decode.turns import compose, conversation_of

SOAK = bool(os.environ.get("TANDEM_SOAK"))
LONG = 700  # more than one block of the tiny model


@pytest.fixture
def node(loaded: Model, words: Any, tmp_path: Path) -> Iterator[Node]:
    made = Node(loaded, words, tmp_path)
    yield made
    made.close()


def text_ids(length: int, seed: int = 3) -> list[int]:
    """Ordinary tokens of the tiny tokenizer, none of which ends an answer."""
    return [20 + (seed * 31 + i * 17 + i * i) % 380 for i in range(length)]


def first(tokens: int = 8, length: int = 40, **more: Any) -> Job:
    return make_job(text_ids(length), request=asking(tokens, **more))


def following(node: Node, job: Job, tokens: int = 8, more: int = 12, **request: Any) -> Job:
    """The next turn's job: the past exactly, then new tokens."""
    ids = [*node.store.turn_ids(job.id), *text_ids(more, seed=5)]
    return make_job(ids, previous=job.id, request=asking(tokens, **request))


def facts(finished: Any) -> dict[str, Any]:
    assert finished.result is not None
    return {**finished.result.path, "computed": finished.result.computed_tokens}


def quiet(node: Node, times: int = 3) -> None:
    """Let the engine look after its states a few times."""
    for _ in range(times):
        node.engine.kept.next_look = 0.0
        node.engine.idle()


# --- answers ------------------------------------------------------------------------------------


def test_an_answer_is_the_oracles_and_its_turn_is_durable(node: Node) -> None:
    job = first()
    finished = node.answer(job)
    assert finished.result is not None
    assert (finished.result.status, finished.result.reason) == ("incomplete", "length")
    assert node.said(job) == node.oracle(job)
    assert finished.result.usage == {"input_tokens": 40, "cached_tokens": 0, "output_tokens": 8}
    assert facts(finished)["computed"] == 40
    told = Piece.read("run", finished.execution.notes.packed(Clock()))
    assert told is not None
    assert ["state", "cold", COMPUTED_HERE] in told.data["forks"]
    assert "unpack" not in {span.stage for span in told.spans()}
    turn = node.store.get_turn(job.id)
    assert turn is not None
    assert (list(turn.prompt_ids), list(turn.output_ids)) == (job.prompt_ids, node.said(job))
    assert turn.conversation == "conv_" + job.id.removeprefix("resp_")
    assert turn.items[0] == {"role": "user", "content": "?"}
    said = turn.items[-1]
    assert said["content"][0]["text"] == "".join(e.get("delta", "") for e in node.events[job.id])
    assert said["id"] == "msg_" + job.id.removeprefix("resp_")
    kinds = [event["type"] for event in (*node.events[job.id], *finished.result.events)]
    assert kinds[:2] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[-3:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds.count("response.output_text.delta") == 8


def test_two_turns_hot_and_restored_say_the_same(node: Node) -> None:
    one = first()
    node.answer(one)
    two = following(node, one)
    hot = node.answer(two)
    assert (facts(hot)["path"], facts(hot)["computed"]) == ("hot", 13)  # and the pending token
    assert node.said(two) == node.oracle(two)
    node.settle()
    assert node.memory.used == 0
    three = following(node, two)
    restored = node.answer(three)
    assert (facts(restored)["path"], facts(restored)["computed"]) == ("restored", 13)
    assert facts(restored)["held_tokens"] == len(node.store.turn_ids(two.id)) - 1
    assert node.said(three) == node.oracle(three)
    assert restored.result is not None
    assert restored.result.usage["cached_tokens"] == facts(restored)["held_tokens"]
    turn = node.store.get_turn(three.id)
    assert turn is not None
    assert turn.conversation == "conv_" + one.id.removeprefix("resp_")
    assert list(turn.prompt_ids) == text_ids(12, seed=5)  # only what is new


def test_an_arrived_state_counts_as_computed(node: Node, loaded: Model) -> None:
    job = first()
    deliver(node.inbox, loaded, job.id, state_of(loaded, job.prompt_ids))
    finished = node.answer(job)
    assert (facts(finished)["path"], facts(finished)["computed"]) == ("cold", 40)
    told = Piece.read("run", finished.execution.notes.packed(Clock()))
    assert told is not None
    assert ["state", "cold", ""] in told.data["forks"]
    assert "unpack" in {span.stage for span in told.spans()}
    assert node.said(job) == node.oracle(job)
    assert finished.result is not None
    assert finished.result.usage["cached_tokens"] == 0


@pytest.mark.parametrize("spoken", [0, 1, 4, 8])
def test_a_retried_decode_goes_on_identically(node: Node, spoken: int) -> None:
    job = first()
    whole = node.answer(job)
    log = node.events.pop(job.id)
    counted = [n for n, event in enumerate(log) if event.get("ids")]
    cut = log[: counted[spoken - 1] + 1 if spoken else 0]
    again = node.run(node.execution(job, replay_of(cut)))
    assert [*cut, *node.events[job.id]] == log
    assert again.result is not None
    assert whole.result is not None
    assert (again.result.output, again.result.usage, again.result.events) == (
        whole.result.output, whole.result.usage, whole.result.events
    )  # fmt: skip


def test_retried_with_seeded_sampling(node: Node) -> None:
    request = asking(8, params={"max_output_tokens": 8, "temperature": 0.9, "seed": 11})
    job = make_job(text_ids(30), request=request)
    node.answer(job)
    log = node.events.pop(job.id)
    cut = log[:5]
    node.run(node.execution(job, replay_of(cut)))
    assert [*cut, *node.events[job.id]] == log


def test_a_stop_string_ends_the_answer(node: Node, words: Any) -> None:
    job = first(tokens=30)
    node.answer(job)
    text = "".join(event.get("delta", "") for event in node.events[job.id])
    stop = text[10:13]
    assert stop
    at = text.index(stop)
    params = {"max_output_tokens": 30, "stop": stop}
    other = make_job(job.prompt_ids, request=asking(30, params=params))
    finished = node.answer(other)
    assert finished.result is not None
    assert (finished.result.status, finished.result.output["text"]) == ("completed", text[:at])


def test_what_is_not_to_be_stored_is_not(node: Node) -> None:
    job = make_job(text_ids(30), request=asking(4, store=False))
    finished = node.run(node.execution(job))
    assert finished.commit is None
    assert node.engine.facts()["hot"] == 0
    assert node.store.get_turn(job.id) is None


@pytest.mark.parametrize(
    "params",
    [{"temperature": -1.0}, {"top_p": 2.0}, {"temperature": "hot"}, {"stop": [""]}],
)
def test_a_row_that_cannot_start_leaves_the_state_in_memory(
    node: Node, params: dict[str, Any]
) -> None:
    one = first()
    node.answer(one)
    used = node.memory.used
    two = following(node, one, params={"max_output_tokens": 4, **params})
    with pytest.raises(JobError):
        node.engine.add(node.execution(two), two)
    assert (node.engine.facts()["hot"], node.memory.used) == (1, used)
    assert facts(node.answer(following(node, one)))["path"] == "hot"


def test_a_forward_that_fails_leaves_the_stored_state_as_it_was(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any chunk of a resumed turn, again and again: nothing is half extended, or held."""
    one = first(length=LONG)
    node.answer(one)
    node.settle()
    two = following(node, one, more=2 * node.model.chunk + 40)
    real, left = Model.forward, 0

    def failing(self: Model, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if not left:
            raise RuntimeError("[metal] out of memory")
        left -= 1
        return real(self, *args, **kwargs)

    for number in range(200 if SOAK else 12):
        left = number % 3
        monkeypatch.setattr(Model, "forward", failing)
        finished = node.run(node.execution(two))
        monkeypatch.setattr(Model, "forward", real)
        assert finished.error is not None
        assert (node.memory.used, len(node.store.pins), node.engine.facts()["hot"]) == (0, 0, 0)
        assert node.engine.free() == node.config.decode.slots
    node.events.clear()
    assert facts(node.answer(two))["path"] == "restored"
    assert node.said(two) == node.oracle(two)
    assert node.store.check().clean


def test_cancelling_drops_the_row_and_what_arrived(node: Node, loaded: Model) -> None:
    job = first(tokens=50)
    execution = node.execution(job)
    node.engine.add(execution, job)
    node.engine.step()
    deliver(node.inbox, loaded, job.id, state_of(loaded, job.prompt_ids))
    node.engine.cancel(execution)
    node.engine.cancel(execution)
    assert (node.engine.free(), node.memory.used) == (node.config.decode.slots, 0)
    assert node.engine.step() == []


# --- states between turns -----------------------------------------------------------------------


def test_what_a_state_builds_upon_is_evicted_meanwhile(node: Node) -> None:
    """The save finds a gap, and then writes all of it."""
    one = first(length=LONG)
    node.answer(one)
    node.settle()
    two = following(node, one)
    assert facts(node.answer(two))["path"] == "restored"
    assert node.store.drop_state(one.id)
    node.settle()
    state = node.store.find_state(two.id)
    assert state is not None
    assert state.tokens == len(node.store.turn_ids(two.id)) - 1
    three = following(node, two)
    assert facts(node.answer(three))["path"] == "restored"
    assert node.said(three) == node.oracle(three)


def test_a_branch_shares_what_is_stored(node: Node) -> None:
    one = first(length=LONG)
    node.answer(one)
    node.settle()
    left, right = following(node, one), following(node, one, more=20)
    for job in (left, right):
        assert facts(node.answer(job))["path"] == "restored"
    node.settle()
    for job in (left, right):
        assert node.said(job) == node.oracle(job)
        assert node.store.find_state(job.id) is not None
    assert node.store.check().clean


class Failing:
    """Makes the saves of a store fail."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def save_state(*_: Any, **__: Any) -> Any:
            self.count += 1
            raise StoreError("the disk is full: free some")

        self.patch = monkeypatch
        monkeypatch.setattr(node.store, "save_state", save_state)


def test_a_state_that_cannot_be_saved_stays_while_there_is_room(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(node, monkeypatch)
    job = first()
    node.answer(job)
    eventually(lambda: node.engine.idle() or failing.count, "nothing is saved")
    eventually(lambda: quiet(node) or not node.engine.kept.saving, "the failure is not seen")
    assert node.engine.facts()["hot"] == 1
    assert failing.count == 1  # and it is not tried again at once
    assert facts(node.answer(following(node, job)))["path"] == "hot"


def test_a_state_that_cannot_be_saved_goes_when_room_is_wanted(
    node: Node, loaded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(node, monkeypatch)
    job = first()
    node.answer(job)
    node.memory.limit = node.memory.used - 1
    eventually(lambda: quiet(node) or not node.engine.facts()["hot"], "the state stays")
    assert failing.count == 1
    assert node.memory.used == 0
    again = following(node, job)
    assert facts(node.answer(again))["path"] == "recomputed"
    assert node.said(again) == node.oracle(again)


def test_what_is_wrong_with_a_grammar_is_told_to_the_client(node: Node) -> None:
    """Whether it is compiled ahead, or not before the answer begins."""
    job = first()
    job.request["params"]["grammar"] = {"kind": "regex", "text": "(a"}
    for ready in (node.engine.prepare, node.engine.add):
        with pytest.raises(JobError, match="the regex cannot be followed"):
            ready(node.execution(job), job)


def test_conversations_make_room_for_an_offer(
    node: Node, loaded: Model, words: Any, tmp_path: Path
) -> None:
    other = Node(loaded, words, tmp_path / "other", store={"idle_seconds": 3600})
    try:
        jobs = [first(), first()]
        for job in jobs:
            other.answer(job)
        used = other.memory.used
        other.memory.limit = used
        quiet(other)
        assert other.engine.facts()["hot"] == 2  # neither idle nor in anybody's way
        assert getattr(other.inbox.admit(offer(loaded, "r", 10)), "code", "") == "memory"
        other.memory.limit = used - 1
        eventually(lambda: quiet(other) or other.engine.facts()["hot"] == 1, "no room is made")
        assert other.store.find_state(jobs[0].id) is not None  # the one that waited longest
        assert other.store.find_state(jobs[1].id) is None
    finally:
        other.close()
    assert node.memory.used == 0


def test_every_turn_is_saved_at_once_if_asked(loaded: Model, words: Any, tmp_path: Path) -> None:
    node = Node(loaded, words, tmp_path, store={"idle_seconds": 3600, "save": "turn"})
    try:
        job = first()
        node.answer(job)
        node.settle()
        assert node.store.find_state(job.id) is not None
    finally:
        node.close()


def test_draining_saves_what_is_in_memory(loaded: Model, words: Any, tmp_path: Path) -> None:
    node = Node(loaded, words, tmp_path, store={"idle_seconds": 3600})
    jobs = [first() for _ in range(6)]  # more than may wait for the disk
    for job in jobs:
        node.answer(job)
    node.engine.drain()
    assert all(node.store.find_state(job.id) for job in jobs)
    assert node.memory.used == 0
    node.store.close()


# --- turns that do not become durable -----------------------------------------------------------


def test_a_turn_whose_past_was_deleted_is_forgotten(node: Node) -> None:
    one = first()
    node.answer(one)
    two = following(node, one)
    finished = node.run(node.execution(two))
    assert node.store.delete_conversation("conv_" + one.id.removeprefix("resp_"))
    assert finished.commit is not None
    with pytest.raises(JobError, match="was deleted while this turn"):
        finished.commit()
    quiet(node)
    assert (node.engine.facts()["hot"], node.memory.used) == (0, 0)


def test_a_lost_runs_state_is_forgotten(node: Node) -> None:
    job = first()
    execution = node.execution(job)
    node.run(execution)
    quiet(node)
    assert node.engine.facts()["hot"] == 1  # its record may still come
    execution.mark_lost()
    quiet(node)
    assert (node.engine.facts()["hot"], node.memory.used) == (0, 0)


def test_a_repeated_turn_is_kept_once(node: Node) -> None:
    job = first()
    node.run(node.execution(job))
    used = node.memory.used
    node.answer(job)
    assert (node.engine.facts()["hot"], node.memory.used) == (1, used)
    node.settle()
    assert node.memory.used == 0


def test_deleted_turns_leave_memory(node: Node) -> None:
    job = first()
    node.answer(job)
    node.engine.forget([job.id, "resp_unknown"])
    quiet(node, 1)
    assert (node.engine.facts()["hot"], node.memory.used) == (0, 0)


# --- records ------------------------------------------------------------------------------------


def record(node: Node, job: Job) -> Any:
    return compose(
        job, node.store, fingerprint=b"f" * 16, output=[{"type": "message"}], output_ids=[1, 2],
        schedule=[[1, 1]], usage={}, status="completed", finish="stop",
    )  # fmt: skip


def test_a_rewritten_past_is_stored_whole(node: Node) -> None:
    one = first()
    node.answer(one)
    past = node.store.turn_ids(one.id)
    exact = record(node, make_job([*past, 7, 8], previous=one.id))
    assert (exact.rebased, exact.prompt_ids, exact.parent) == (False, [7, 8], one.id)
    for ids in ([9, *past[1:], 7], past[:-1]):
        other = record(node, make_job(ids, previous=one.id))
        assert (other.rebased, other.prompt_ids) == (True, ids)


def test_the_conversation_of_a_turn(node: Node) -> None:
    one = make_job(text_ids(20), request=asking(2), conversation="conv_" + "c" * 32)
    node.answer(one)
    assert conversation_of(one, node.store) == "conv_" + "c" * 32
    assert conversation_of(following(node, one), node.store) == "conv_" + "c" * 32
    alone = first()
    assert conversation_of(alone, node.store) == "conv_" + alone.id.removeprefix("resp_")
    lost = make_job([1, 2], previous="resp_" + "0" * 32)
    assert conversation_of(lost, node.store) == "conv_" + lost.id.removeprefix("resp_")


def test_only_what_was_asked_is_recorded(node: Node) -> None:
    request = asking(2, instructions="Be brief.", tools=None, other=1)
    turn = record(node, make_job([1, 2, 3], request=request))
    assert turn.params == {"instructions": "Be brief.", "params": {"max_output_tokens": 2}}
    assert turn.items == [{"role": "user", "content": "?"}, {"type": "message"}]


def test_sampling_has_defaults_for_what_is_not_asked() -> None:
    bare = sampling(make_job([1], request={}), frozenset({2}), 77)
    assert (bare.temperature, bare.top_p, bare.max_tokens) == (0.0, 1.0, 77)
    assert bare.stop_ids == frozenset({2})
    params = {"temperature": 0.5, "top_p": 0.0001, "stop": "x", "max_output_tokens": 3, "seed": 4}
    asked = sampling(make_job([1], request={"params": params}), frozenset(), 77)
    assert (asked.temperature, asked.top_p, asked.stop) == (0.5, 0.0001, ("x",))
    assert (asked.max_tokens, asked.seed) == (3, 4)
