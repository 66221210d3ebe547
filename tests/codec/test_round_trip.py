"""Any cache tree of any class comes back bit for bit in a process that never saw it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import made_caches
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_caches import LEAVES, runs, trees
from other_process import OtherProcess

from store.codec import gather, memory
from store.codec.header import CodecError, Piece, parse
from store.codec.layout import Layout
from store.codec.pack import Exporter, export_rows, export_snapshot
from store.codec.unpack import Importer

MODEL = b"m" * 16
IDS = [(index * 31) % 1009 for index in range(600)]


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.close()


@pytest.fixture(params=["host", "device"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of packing; the device's also runs where the device is the processor."""
    monkeypatch.setattr(memory, "packs_on_device", lambda: request.param == "device")
    monkeypatch.setattr(gather, "_GROUP_BYTES", 4096)
    return str(request.param)


def layout_of(recipe: Any, seed: int, value_bytes: int) -> Layout:
    probe = made_caches.fresh(recipe)
    unit = Layout.of(probe, "any", MODEL).unit
    made_caches.fill(probe, recipe, [unit], seed)
    return Layout.of(probe, "any", MODEL, tokens=unit, value_bytes=value_bytes)


def packed(layout: Layout, caches: Any, total: int) -> list[Piece]:
    exporter = Exporter(layout, IDS)
    pieces = [*exporter.rows(caches, total, last=True), exporter.snapshot(caches)]
    # Through bytes, as on a wire, so that nothing shared survives.
    return [Piece(parse(piece.header.pack()), piece.payload) for piece in pieces]


def check(
    other: OtherProcess, recipe: Any, lengths: list[int], more: list[int], seed: int, value: int
) -> None:
    layout = layout_of(recipe, seed, value)
    caches = made_caches.fresh(recipe)
    made_caches.fill(caches, recipe, lengths, seed)
    total = sum(lengths)
    pieces = packed(layout, caches, total)
    found = other.ask(
        {
            "recipe": recipe,
            "seed": seed,
            "lengths": lengths,
            "more": more,
            "spare": seed % 300,
            "fingerprint": MODEL,
            "value_bytes": value,
            "ids": IDS,
            "pieces": [(piece.header.pack(), bytes(piece.payload)) for piece in pieces],
        }
    )
    assert "error" not in found, found["error"]
    assert found["heads"] == [piece.header.pack() for piece in pieces]
    assert found["told"] == made_caches.told(caches, recipe)
    made_caches.fill(caches, recipe, more, seed, start=total)
    assert found["told_later"] == made_caches.told(caches, recipe)


@pytest.mark.usefixtures("packing")
@given(trees, runs, runs, st.integers(0, 1 << 30), st.sampled_from([1, 3000, 1 << 20]))
def test_any_tree(
    other: OtherProcess, recipe: Any, lengths: list[int], more: list[int], seed: int, value: int
) -> None:
    check(other, recipe, lengths, more, seed, value)


@pytest.mark.parametrize("name", sorted(LEAVES))
@given(st.data(), runs, runs, st.integers(0, 1 << 30))
def test_each_class(
    other: OtherProcess,
    name: str,
    data: st.DataObject,
    lengths: list[int],
    more: list[int],
    seed: int,
) -> None:
    check(other, [data.draw(LEAVES[name])], lengths, more, seed, 1)


@given(trees, st.lists(st.integers(1, 37), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_rows_in_any_split_equal_the_whole(recipe: Any, lengths: list[int], seed: int) -> None:
    """Rows exported after each chunk are those exported at the end, piece by piece of the same
    range, and the state built from them is the same."""
    layout = layout_of(recipe, seed, 1)
    caches = made_caches.fresh(recipe)
    pieces: list[Piece] = []
    held = 0
    for index, count in enumerate(lengths):
        made_caches.fill(caches, recipe, [count], seed + index, start=held)
        parent = pieces[-1].header.chain if pieces else None
        pieces += export_rows(layout, caches, IDS, held, held + count, parent)
        held += count
    snapshot = export_snapshot(layout, caches, IDS, held)
    for piece in pieces:
        a, b = piece.header.start, piece.header.stop
        (later,) = export_rows(layout, caches, IDS, a, b)
        assert later.header == piece.header
        assert later.payload == piece.payload
    importer = Importer(layout, made_caches.fresh(recipe), MODEL, held)
    for piece in pieces:
        importer.add(piece)
    restored = importer.finish(snapshot)
    assert made_caches.told(restored, recipe) == made_caches.told(caches, recipe)
    whole = [piece.header for piece in packed(layout, caches, held)]
    assert [piece.header for piece in packed(layout, restored, held)] == whole


@given(trees, runs, st.integers(0, 1 << 30))
def test_only_live_rows_are_read(recipe: Any, lengths: list[int], seed: int) -> None:
    """Bytes follow the tokens held, whatever the buffers' capacity."""
    layout = layout_of(recipe, seed, 1 << 20)
    caches = made_caches.fresh(recipe)
    made_caches.fill(caches, recipe, lengths, seed)
    total = sum(lengths)
    rows = packed(layout, caches, total)[:-1]
    assert sum(piece.payload.nbytes for piece in rows) == layout.rows_bytes(0, total)


def test_an_open_transaction_is_not_packed() -> None:
    recipe = [{"class": "PoolingCache", "keys": 4, "ratio": 4, "dtype": "float32"}]
    layout = layout_of(recipe, 1, 1)
    caches = made_caches.fresh(recipe)
    made_caches.fill(caches, recipe, [6], 1)
    caches[0].start_speculation(2)
    with pytest.raises(CodecError, match="speculative"):
        export_snapshot(layout, caches, IDS, 6)
