"""States out of a model and back: equal bit for bit, and refused where they do not belong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from decode_kit import contents, held_after, state_of
from tiny_models import prompt

from engine.model import Model
from store.codec.header import CodecError, Header, Piece
from worker_decode.hot import Held, Hot
from worker_decode.memory import Memory
from worker_decode.states import export, nbytes_of, restore

TURN = "resp_" + "a" * 32


def test_export_and_restore_are_inverse(model: Model) -> None:
    held, said = held_after(model, prompt(90), 7, TURN)
    assert held.nbytes > 0
    rows, snapshot = export(model, held)
    restored = restore(model, [*rows, snapshot], [*held.ids, *held.pending])
    assert restored.ids == said.ids
    assert restored.schedule == said.schedule
    again = dataclasses.replace(held, caches=restored.caches, ids=restored.ids)
    rows_again, snapshot_again = export(model, again)
    assert contents([*rows_again, snapshot_again]) == contents([*rows, snapshot])
    assert nbytes_of(restored.caches) > 0


def test_only_what_the_store_lacks_is_exported(llama: Model) -> None:
    block = llama.layout.block_tokens
    held, _ = held_after(llama, prompt(2 * block + 20), 3, TURN)
    whole, snapshot = export(llama, held)
    assert [piece.header.start for piece in whole] == [0, block, 2 * block]
    held.stored = 2 * block - 1
    rest, snapshot_again = export(llama, held)
    assert contents(rest) == contents(whole[1:])
    assert contents([snapshot]) == contents([snapshot_again])


@pytest.fixture(scope="module")
def pieces(llama: Model) -> list[Piece]:
    return state_of(llama, prompt(80))


def refused(model: Model, pieces: list[Piece], ids: list[int]) -> str:
    with pytest.raises(CodecError) as caught:
        restore(model, pieces, ids)
    return str(caught.value)


def test_a_prompt_that_is_no_longer_than_the_state(llama: Model, pieces: list[Piece]) -> None:
    assert restore(llama, pieces, prompt(80)).ids == prompt(80)[:79]
    assert "holds 79 tokens and the prompt has 79" in refused(llama, pieces, prompt(80)[:79])


@pytest.mark.parametrize("position", [0, 40, 78])
def test_other_token_ids(llama: Model, pieces: list[Piece], position: int) -> None:
    ids = prompt(100)
    ids[position] += 1
    assert "other token ids" in refused(llama, pieces, ids)


def test_another_model(llama: Model, pieces: list[Piece], loaded: Model) -> None:
    assert refused(loaded, pieces, prompt(80))


def test_parts_that_are_missing(llama: Model, pieces: list[Piece]) -> None:
    assert "no snapshot" in refused(llama, [], prompt(80))
    assert "no snapshot" in refused(llama, pieces[:-1], prompt(80))
    assert refused(llama, pieces[-1:], prompt(80))


def test_a_damaged_byte(llama: Model, pieces: list[Piece]) -> None:
    damaged = bytearray(pieces[0].payload)
    damaged[len(damaged) // 2] ^= 1
    bad = [Piece(pieces[0].header, memoryview(damaged)), *pieces[1:]]
    assert "checksum" in refused(llama, bad, prompt(80))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"schedule": [[79, 1]], "rope_delta": "1"},
        {"schedule": [[79, 2]]},
        {"schedule": [[0, 79]]},
        {"schedule": [[79, True]]},
        {"schedule": [79]},
        {"schedule": "79"},
        {"schedule": [[79, 1, 1]]},
    ],
)
def test_a_state_that_does_not_say_how_it_came_about(
    llama: Model, pieces: list[Piece], extra: dict[str, Any]
) -> None:
    header: Header = dataclasses.replace(pieces[-1].header, extra=extra)
    bad = [*pieces[:-1], Piece(header, pieces[-1].payload)]
    assert "recompute it" in refused(llama, bad, prompt(80))


# --- between turns ------------------------------------------------------------------------------


def held(turn: str, nbytes: int, used: float) -> Held:
    return Held(turn, [], [1], [2], [[1, 1]], 0, nbytes, used=used)


def test_held_states_are_counted() -> None:
    memory = Memory(100)
    hot = Hot(memory)
    hot.put(held("a", 70, 1.0))
    hot.put(held("b", 50, float("inf")))
    assert (memory.used, hot.nbytes, len(hot), "a" in hot) == (120, 120, 2, True)
    assert hot.turns() == ["a", "b"]
    assert hot.oldest() == "a"
    assert hot.idle(0.0) == ["a"]
    assert hot.get("a") is not None
    assert hot.take("c") is None
    taken = hot.take("a")
    assert taken is not None
    assert (memory.used, hot.oldest()) == (50, "b")
    hot.put(taken)
    assert hot.turns() == ["b", "a"]
    for turn in hot.turns():
        hot.take(turn)
    assert (memory.used, len(hot), hot.oldest()) == (0, 0, None)


def test_a_repeated_turn_replaces_its_state() -> None:
    memory = Memory(100)
    hot = Hot(memory)
    hot.put(held("a", 70, 1.0))
    hot.put(held("a", 30, 2.0))
    assert (memory.used, len(hot)) == (30, 1)
