"""Damage in several places, and free pages that lie in pieces: what one resume and one save do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_states import MODEL, conversation_id, feeding, make_state, make_turn, payloads
from store_damage import flip

from store.environment import Environment
from store.errors import MapFull
from store.saving import PLACE_ATTEMPTS
from store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", 64 << 20)
    yield opened
    opened.close()


def add(store: Store, ids: range) -> str:
    turn = make_turn(ids[:-1], ids[-1:], conversation=conversation_id())
    store.put_turn(turn)
    return turn.id


@pytest.mark.parametrize("way", ["feed", "iterate"])
def test_all_damaged_blocks_are_found_by_one_resume_and_written_anew(
    store: Store, way: str
) -> None:
    turn = add(store, range(200))
    pieces, snapshot = make_state(range(160), row_bytes=8192, snapshot_bytes=300_000)
    store.save_state(turn, pieces, snapshot)
    with store.environment.read() as txn:
        state = store.states.get(txn, turn)
        assert state is not None
        line = store.blocks.line(txn, state.head)
    broken = [line[2][0], line[5][0], line[9][0], state.snap]
    for number, ident in enumerate(broken):
        flip(store, ident, 0, 100 + 1000 * number)
    reader = store.load_state(turn, MODEL)
    assert reader is not None
    if way == "feed":
        assert reader.feed(feeding) is None
    else:
        assert len(list(reader)) == 2, "the longest verified beginning"
    assert store.damaged == set(broken)
    assert len(reader.report.damage) == 4
    # The turn is computed again by the same forwards, and saved.
    report = store.save_state(turn, pieces, snapshot)
    assert report.blocks_new == 3
    assert not store.damaged
    again = store.load_state(turn, MODEL)
    assert again is not None
    assert [bytes(piece.payload) for piece in again] == payloads(pieces, snapshot)
    assert store.check().clean


def test_a_save_makes_more_room_each_time_the_map_is_in_pieces(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB finds no run of free pages twice; the third attempt has three times the room."""
    for number in range(12):
        turn = add(store, range(1000 * number, 1000 * number + 60))
        ids = range(1000 * number, 1000 * number + 48)
        store.save_state(turn, *make_state(ids, snapshot_bytes=2_000_000))
    write, tries, beats = Environment.write, [0], [0]
    target = add(store, range(90_000, 90_100))

    def full_twice(self: Environment, work: Any) -> Any:
        name = getattr(getattr(work, "func", work), "__name__", "")
        if name == "_run":
            tries[0] += 1
            if tries[0] <= 2:
                raise MapFull("the store's map is full: raise its size or evict")
        return write(self, work)

    heartbeat = Environment.heartbeat

    def counted(self: Environment) -> None:
        beats[0] += 1
        heartbeat(self)

    monkeypatch.setattr(Environment, "write", full_twice)
    monkeypatch.setattr(Environment, "heartbeat", counted)
    pieces, snapshot = make_state(range(90_000, 90_090), snapshot_bytes=9_000_000)
    report = store.save_state(target, pieces, snapshot)
    assert tries[0] >= 3
    assert beats[0] >= 2, "what an attempt frees is usable after the next commit"
    assert report.evicted > 0
    monkeypatch.undo()
    reader = store.load_state(target, MODEL)
    assert reader is not None
    assert [bytes(piece.payload) for piece in reader] == payloads(pieces, snapshot)
    assert store.check().clean


def test_a_map_that_stays_in_pieces_ends_the_save_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = add(store, range(60))
    pieces, snapshot = make_state(range(48))
    store.save_state(kept, pieces, snapshot)
    store.update_conversation(store.get_turn(kept).conversation, pinned=True)  # type: ignore[union-attr]
    target = add(store, range(500, 600))
    write, tries = Environment.write, [0]

    def full(self: Environment, work: Any) -> Any:
        name = getattr(getattr(work, "func", work), "__name__", "")
        if name == "_run":
            tries[0] += 1
            raise MapFull("the store's map is full: raise its size or evict")
        return write(self, work)

    monkeypatch.setattr(Environment, "write", full)
    with pytest.raises(MapFull):
        store.save_state(target, *make_state(range(500, 590)))
    assert tries[0] == PLACE_ATTEMPTS
    monkeypatch.undo()
    reader = store.load_state(kept, MODEL)
    assert reader is not None
    assert [bytes(piece.payload) for piece in reader] == payloads(pieces, snapshot)
    assert store.find_state(target) is None
    assert store.check().clean
