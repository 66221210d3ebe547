"""Where a row's state comes from, and what is done where it is damaged or another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Parts, contents, deliver, held_after, make_job, state_of
from store_damage import flip
from tiny_models import prompt

from engine.decode import Batch
from engine.model import Model
from engine.prefill import expand_schedule
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.solo import Answer, answer
from scheduler.runs import SendBack
from store.turns import Turn
from worker_decode.hot import Held
from worker_decode.starts import Start
from worker_decode.states import export

TURNS = ["resp_" + digit * 32 for digit in "123"]
CONVERSATION = "conv_" + "1" * 32
GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture
def parts(llama: Model, tmp_path: Path) -> Iterator[Parts]:
    made = Parts(llama, tmp_path)
    yield made
    made.close()


def play(model: Model, start: Start, ids: list[int]) -> tuple[list[int], list[int]]:
    """Decode from a start; the answer, and the forwards that computed the prompt."""
    batch = Batch(model, 1)
    batch.add(
        Row(
            start.caches, start.ids, ids[len(start.ids) :], GREEDY,
            schedule=start.schedule, rope_delta=start.rope_delta, lengths=start.lengths,
        )
    )  # fmt: skip
    tokens: list[int] = []
    while True:
        for event in batch.step():
            assert event.finish != "error", event.error
            if event.token is not None:
                tokens.append(event.token)
            if event.finish:
                lengths = expand_schedule(event.schedule)
                total = count = 0
                while total < len(ids) - 1:
                    total += lengths[count]
                    count += 1
                assert total == len(ids) - 1
                return tokens, lengths[:count]


def stored(parts: Parts, model: Model, ids: list[int], number: int, base: int = -1) -> Held:
    """Answer `ids`, store the turn and its state."""
    held, said = held_after(model, ids, 6, TURNS[number])
    put(parts, model, said, ids, number, base)
    rows, snapshot = export(model, held)
    parts.store.save_state(held.turn, rows, snapshot)
    return held


def put(parts: Parts, model: Model, said: Answer, ids: list[int], number: int, base: int) -> None:
    past = parts.store.turn_ids(TURNS[base]) if base >= 0 else []
    assert ids[: len(past)] == past
    parts.store.put_turn(
        Turn(
            TURNS[number],
            CONVERSATION,
            parent=TURNS[base] if base >= 0 else None,
            fingerprint=model.fingerprint,
            prompt_ids=ids[len(past) :],
            output_ids=said.tokens,
            schedule=said.schedule,
        )
    )


def follow(held: Held, more: int = 20) -> list[int]:
    """The next turn's prompt."""
    return [*held.ids, *held.pending, *prompt(more, seed=9)]


def solo(model: Model, ids: list[int], lengths: list[int]) -> list[int]:
    return answer(model, ids, lengths, GREEDY).tokens


# --- the paths ----------------------------------------------------------------------------------


def test_cold_without_anything(parts: Parts, llama: Model) -> None:
    start = parts.starts.find(make_job(prompt(30)))
    assert (start.path, start.ids, start.lengths, start.notes) == ("cold", [], [], [])
    assert start.cached == 0


def test_cold_from_the_link(parts: Parts, llama: Model) -> None:
    job = make_job(prompt(90))
    deliver(parts.inbox, llama, job.id, state_of(llama, job.prompt_ids))
    start = parts.starts.find(job)
    assert (start.path, start.ids, start.cached) == ("cold", job.prompt_ids[:-1], 0)
    tokens, lengths = play(llama, start, job.prompt_ids)
    assert lengths == [64, 25]
    assert tokens == solo(llama, job.prompt_ids, lengths)
    assert parts.memory.used == 0


def test_hot(parts: Parts, llama: Model) -> None:
    held, _ = held_after(llama, prompt(40), 5, TURNS[0])
    parts.hot.put(held)
    ids = follow(held)
    start = parts.starts.find(make_job(ids, previous=TURNS[0]))
    assert (start.path, start.ids, start.cached) == ("hot", held.ids, len(held.ids))
    assert parts.memory.used == 0
    parts.starts.give_back(start)  # had the row not fitted
    assert parts.hot.turns() == [TURNS[0]]
    assert parts.memory.used == held.nbytes
    start = parts.starts.find(make_job(ids, previous=TURNS[0]))
    tokens, lengths = play(llama, start, ids)
    assert tokens == solo(llama, ids, lengths)


def test_restored_equals_what_was_saved_and_the_oracle(model: Model, tmp_path: Path) -> None:
    parts = Parts(model, tmp_path)
    try:
        held = stored(parts, model, prompt(90), 0)
        before = export(model, held)
        ids = follow(held)
        start = parts.starts.find(make_job(ids, previous=TURNS[0]))
        assert (start.path, start.ids, start.notes) == ("restored", held.ids, [])
        assert (start.base, start.stored) == (TURNS[0], len(held.ids))
        again = export(model, Held(
            held.turn, start.caches, start.ids, held.pending, start.schedule, start.rope_delta, 0
        ))  # fmt: skip
        assert contents([*again[0], again[1]]) == contents([*before[0], before[1]])
        tokens, lengths = play(model, start, ids)
        assert tokens == solo(model, ids, lengths)
    finally:
        parts.close()


def test_recomputed_by_the_recorded_forwards(model: Model, tmp_path: Path) -> None:
    """What the turn's own state would have given, although that was never saved."""
    parts = Parts(model, tmp_path)
    try:
        ids = prompt(90)
        held, said = held_after(model, ids, 6, TURNS[0])
        put(parts, model, said, ids, 0, -1)
        following = follow(held)
        start = parts.starts.find(make_job(following, previous=TURNS[0]))
        assert (start.path, start.ids) == ("recomputed", [])
        assert start.notes == ["no stored state of this model"]
        assert start.lengths == [*expand_schedule(said.schedule), 20]
        tokens, lengths = play(model, start, following)
        assert tokens == solo(model, following, lengths)
        parts.hot.put(held)
        hot = parts.starts.find(make_job(following, previous=TURNS[0]))
        assert play(model, hot, following) == (tokens, lengths)
    finally:
        parts.close()


def test_recomputed_by_the_forwards_of_a_lost_hand_off(parts: Parts, llama: Model) -> None:
    ids = prompt(90)
    facts: dict[str, Any] = {"path": "tcp", "schedule": [[40, 2], [9, 1]]}
    start = parts.starts.find(make_job(ids, handoff=facts))
    assert (start.path, start.lengths) == ("recomputed", [40, 40, 9])
    facts["schedule"] = [[40, 2]]  # of another prompt: not followed
    assert parts.starts.find(make_job(ids, handoff=facts)).lengths == []


def test_an_ancestors_state_goes_on_by_the_recorded_forwards(parts: Parts, llama: Model) -> None:
    first = stored(parts, llama, prompt(60), 0)
    second_ids = follow(first)
    from_first = parts.starts.find(make_job(second_ids, previous=TURNS[0]))
    said = answer(llama, second_ids, [*expand_schedule(first.schedule), 20], GREEDY)
    put(parts, llama, said, second_ids, 1, 0)
    third_ids = [*said.ids, *said.pending, *prompt(11, seed=4)]
    start = parts.starts.find(make_job(third_ids, previous=TURNS[1]))
    assert (start.path, start.base, start.stored) == ("restored", TURNS[0], len(first.ids))
    assert start.lengths == [20, 1, 1, 1, 1, 1, 1, 11]
    tokens, lengths = play(llama, start, third_ids)
    assert lengths == [*expand_schedule(said.schedule), 11]
    assert tokens == solo(llama, third_ids, lengths)
    assert play(llama, from_first, second_ids)[0] == said.tokens


# --- what goes wrong ----------------------------------------------------------------------------


def damage(parts: Parts, turn: str) -> None:
    """Flip one byte in the first part of the turn's state, where it lies in the store."""
    with parts.store.environment.read() as txn:
        state = parts.store.states.get(txn, turn)
        assert state is not None
        ident, record = parts.store.blocks.line(txn, state.head)[0]
    assert record.parts
    flip(parts.store, ident, 0, 1000)


def test_a_damaged_state_is_recomputed_with_a_note(parts: Parts, llama: Model) -> None:
    held = stored(parts, llama, prompt(90), 0)
    damage(parts, TURNS[0])
    ids = follow(held)
    start = parts.starts.find(make_job(ids, previous=TURNS[0]))
    assert start.path == "recomputed"
    assert "damaged" in start.notes[0]
    tokens, lengths = play(llama, start, ids)
    assert lengths == [*expand_schedule(held.schedule), 20]
    assert tokens == solo(llama, ids, lengths)


def test_an_older_whole_state_is_better_than_none(parts: Parts, llama: Model) -> None:
    first = stored(parts, llama, prompt(60), 0)
    second = stored(parts, llama, follow(first, 600), 1, base=0)
    block = llama.layout.block_tokens
    assert len(first.ids) < block < len(second.ids)
    damage(parts, TURNS[1])
    ids = follow(second)
    start = parts.starts.find(make_job(ids, previous=TURNS[1]))
    assert (start.path, start.base) == ("restored", TURNS[0])
    assert "damaged" in start.notes[0]
    assert play(llama, start, ids)[0]


def test_states_of_other_token_ids_are_declined(parts: Parts, llama: Model) -> None:
    held = stored(parts, llama, prompt(90), 0)
    ids = follow(held)
    ids[5] += 1
    parts.hot.put(held)
    start = parts.starts.find(make_job(ids, previous=TURNS[0]))
    assert (start.path, start.lengths) == ("recomputed", [])
    assert "does not continue the state in memory" in start.notes[0]
    assert "other token ids" in start.notes[1]
    assert parts.hot.turns() == [TURNS[0]]  # whoever continues it finds it
    assert parts.memory.used == held.nbytes
    # Nor does a prompt that ends within the state.
    start = parts.starts.find(make_job(held.ids, previous=TURNS[0]))
    assert start.path == "recomputed"


def test_states_of_another_model_are_not_looked_at(parts: Parts, llama: Model) -> None:
    held = stored(parts, llama, prompt(90), 0)
    other = Model(
        llama.path, llama.model, llama.config, llama.device, fingerprint=b"another model   "
    )
    parts.starts._model = other
    start = parts.starts.find(make_job(follow(held), previous=TURNS[0]))
    assert (start.path, start.notes) == ("recomputed", ["no stored state of this model"])


def test_an_unusable_arrival_is_prefilled_again_if_long(parts: Parts, llama: Model) -> None:
    job = make_job(prompt(90), handoff={"path": "tcp"})
    deliver(parts.inbox, llama, job.id, state_of(llama, prompt(91, seed=1)))
    start = parts.starts.find(job)
    assert start.path == "recomputed"
    assert "the received state is unusable" in start.notes[0]
    parts.starts._local = 89
    with pytest.raises(SendBack, match="not here any more"):
        parts.starts.find(job)
    deliver(parts.inbox, llama, job.id, state_of(llama, prompt(91, seed=1)))
    with pytest.raises(SendBack, match="the received state is unusable"):
        parts.starts.find(job)
    assert parts.memory.used == 0


def test_a_failed_hand_off_is_computed_here(parts: Parts) -> None:
    parts.starts._local = 10
    start = parts.starts.find(make_job(prompt(90), handoff={"path": "none", "error": "no node"}))
    assert (start.path, start.notes) == ("recomputed", ["no hand-off: no node"])


def test_a_previous_turn_that_is_not_stored(parts: Parts) -> None:
    start = parts.starts.find(make_job(prompt(90), previous=TURNS[2]))
    assert (start.path, start.lengths) == ("recomputed", [])


def test_a_previous_turn_that_cannot_be_read(parts: Parts, llama: Model) -> None:
    held = stored(parts, llama, prompt(90), 0)
    environment = parts.store.environment

    def lose(txn: Any) -> None:
        for db in (environment.pages, environment.dat):
            for key, _ in list(txn.cursor(db=db)):
                txn.delete(bytes(key), db=db)

    environment.write(lose)
    start = parts.starts.find(make_job(follow(held), previous=TURNS[0]))
    assert (start.path, start.lengths) == ("recomputed", [])
    assert start.notes
