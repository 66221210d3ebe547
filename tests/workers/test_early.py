"""What arrives is unpacked before it is asked for, and is the same state as when it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Node, Parts, asking, contents, make_job, offer, state_of
from redis_kit import eventually

from engine.model import Model
from store.codec.header import CodecError, Piece
from store.codec.pack import Exporter
from transport.protocol import Offer
from worker_decode.early import Early
from worker_decode.starts import Start, Starts
from worker_decode.states import Restoring, restore

IDS = [20 + (7 * i + i * i) % 380 for i in range(2100)]


@pytest.fixture
def parts(loaded: Model, tmp_path: Path) -> Iterator[Parts]:
    made = Parts(loaded, tmp_path)
    yield made
    made.close()


@pytest.fixture
def early(parts: Parts) -> Early:
    found = Early(parts.model, parts.inbox, parts.memory)
    parts.starts = Starts(parts.model, parts.store, parts.hot, parts.inbox, 10_000, early=found)
    return found


@pytest.fixture(scope="module")
def pieces(loaded: Model) -> list[Piece]:
    """Rows in five pieces, and the snapshot."""
    made = state_of(loaded, IDS, 512)
    assert len(made) == 6
    return made


def promised(parts: Parts, response: str, tokens: int, nbytes: int = 32 << 20) -> Offer:
    told = offer(parts.model, response, nbytes)
    return Offer(**{name: getattr(told, name) for name in Offer.__slots__} | {"tokens": tokens})


def begin(parts: Parts, response: str, pieces: Sequence[Piece], tokens: int) -> None:
    assert not hasattr(parts.inbox.admit(promised(parts, response, tokens)), "reason")
    for piece in pieces:
        parts.inbox.piece(response, piece)


def unpack(early: Early, room: int = 1, *, busy: bool = True) -> None:
    while early.look_after(room, busy=busy):
        pass


def end(parts: Parts, response: str, pieces: Sequence[Piece]) -> Start:
    for piece in pieces:
        parts.inbox.piece(response, piece)
    parts.inbox.done(response)
    return parts.starts.find(make_job(IDS, ident=response))


def again(model: Model, start: Start) -> list[tuple[bytes, bytes]]:
    """The state of a row, packed once more."""
    exporter = Exporter(model.layout, start.ids)
    rows = exporter.rows(start.caches, len(start.ids), last=True)
    extra = {"schedule": start.schedule, "rope_delta": start.rope_delta}
    return contents([*rows, exporter.snapshot(start.caches, extra)])


def response(number: int) -> str:
    return f"resp_{number:032x}"


@pytest.mark.parametrize("here", [1, 3, 5, 6])
def test_the_state_is_that_of_one_unpacked_at_once(
    parts: Parts, early: Early, pieces: list[Piece], here: int
) -> None:
    begin(parts, response(1), pieces, len(IDS) - 1)
    whole = end(parts, response(1), [])
    assert whole.early == 0
    begin(parts, response(2), pieces[:here], len(IDS) - 1)
    unpack(early)
    start = end(parts, response(2), pieces[here:])
    assert start.early == pieces[here - 1].header.stop
    assert start.path == "cold"
    assert again(parts.model, start) == again(parts.model, whole)
    assert parts.memory.used == 0


def test_every_kind_of_state(model: Model, tmp_path: Path) -> None:
    """Sliding windows, recurrent state and pooled rows among them."""
    ids = [IDS[i % len(IDS)] for i in range(model.layout.block_tokens + 60)]
    pieces = state_of(model, ids, 512)
    parts = Parts(model, tmp_path)
    try:
        found = Early(model, parts.inbox, parts.memory)
        parts.starts = Starts(model, parts.store, parts.hot, parts.inbox, 10_000, early=found)
        begin(parts, response(1), pieces[:-1], len(ids) - 1)
        unpack(found)
        parts.inbox.piece(response(1), pieces[-1])
        parts.inbox.done(response(1))
        start = parts.starts.find(make_job(ids, ident=response(1)))
        assert start.early == len(ids) - 1
        packed = again(model, start)
        assert packed == again(model, plain(model, pieces, ids))
        assert [data for _, data in packed] == [data for _, data in contents(pieces)]
    finally:
        parts.close()


def plain(model: Model, pieces: Sequence[Piece], ids: Sequence[int]) -> Start:
    state = restore(model, pieces, ids)
    return Start("cold", state.caches, state.ids, state.schedule)


def test_more_than_was_offered_is_begun_anew_with_more_room(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    """An answer that goes on elsewhere grows beyond the prompt for which there was room."""
    begin(parts, response(1), pieces[:2], 20)
    unpack(early)
    for piece in pieces[2:]:
        parts.inbox.piece(response(1), piece)
    unpack(early)
    start = end(parts, response(1), [])
    assert start.early == len(IDS) - 1
    assert again(parts.model, start) == again(parts.model, plain(parts.model, pieces, IDS))
    assert parts.memory.used == 0


def test_too_little_room_is_noticed_by_who_takes_it(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    begin(parts, response(1), pieces[:2], 20)
    unpack(early)
    start = end(parts, response(1), pieces[2:])
    assert (start.early, len(start.ids)) == (0, len(IDS) - 1)


def test_what_was_unpacked_is_held_to_the_jobs_own_ids(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    begin(parts, response(1), pieces, len(IDS) - 1)
    parts.inbox.done(response(1))
    unpack(early)
    other = [*IDS[:50], IDS[50] + 1, *IDS[51:]]
    start = parts.starts.find(make_job(other, ident=response(1)))
    assert (start.path, start.ids) == ("cold", [])
    assert any("unusable" in note for note in start.notes)
    assert parts.memory.used == 0


def test_a_damaged_piece_is_told_by_who_takes_it(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    bad = bytearray(pieces[1].payload)
    bad[5] ^= 1
    damaged = [pieces[0], Piece(pieces[1].header, memoryview(bad)), *pieces[2:]]
    begin(parts, response(1), damaged, len(IDS) - 1)
    granted = parts.memory.used
    unpack(early)
    assert parts.memory.used == granted, "arrays of which nothing can be made are kept"
    start = end(parts, response(1), [])
    assert start.ids == []
    assert any("unusable" in note for note in start.notes)


def test_it_gives_way_to_who_waits_for_memory(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    begin(parts, response(1), pieces, len(IDS) - 1)
    granted = parts.memory.used
    unpack(early)
    assert parts.memory.used > granted
    parts.memory.limit = granted
    assert not early.look_after(1, busy=False)
    assert parts.memory.used == granted
    unpack(early)
    assert parts.memory.used == granted, "there is no room to begin"
    start = end(parts, response(1), [])
    assert (start.early, len(start.ids)) == (0, len(IDS) - 1)


def test_it_takes_nothing_that_somebody_is_about_to_be_given(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    begin(parts, response(1), pieces, len(IDS) - 1)
    memory, nbytes = parts.memory, 64 << 20
    memory.take(nbytes)
    memory.limit = memory.used
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(memory.reserve, nbytes, 60.0)
        eventually(lambda: memory.wanted, "nobody waits")
        with memory._changed:  # who waits is told, and has not been given it yet
            memory.release(nbytes)
            used = memory.used
            early.look_after(1, busy=False)
            assert memory.used == used
        assert waiting.result()


def test_it_gives_way_before_conversations_do(
    loaded: Model, words: Any, tmp_path: Path, pieces: list[Piece]
) -> None:
    node = Node(loaded, words, tmp_path, store={"idle_seconds": 3600})
    try:
        node.answer(make_job(IDS[:40], request=asking(4)))
        node.inbox.admit(offer(loaded, response(1), 32 << 20))
        for piece in pieces:
            node.inbox.piece(response(1), piece)
        used = node.memory.used
        node.engine.idle()
        assert node.memory.used > used
        node.memory.limit = used
        node.engine.kept.next_look = 0.0
        node.engine.step()
        assert node.memory.used == used
        assert node.engine.kept.saving == set()
        node.inbox.discard(response(1))
    finally:
        node.close()


def test_only_what_can_be_decoded_soon_is_unpacked(
    parts: Parts, early: Early, pieces: list[Piece]
) -> None:
    begin(parts, response(1), pieces, len(IDS) - 1)
    granted = parts.memory.used
    unpack(early, room=0)
    assert parts.memory.used == granted
    unpack(early)
    parts.inbox.abort(response(1), "the link broke")
    assert not early.look_after(1, busy=False)
    assert parts.memory.used == 0


def test_restoring_twice_is_refused(loaded: Model, pieces: list[Piece]) -> None:
    made = Restoring(loaded, len(IDS))
    made.add(pieces[:2])
    made.finish(pieces[2:-1], pieces[-1], IDS)
    assert made.capacity >= len(IDS)
    with pytest.raises(CodecError):
        made.add(pieces[:1])
