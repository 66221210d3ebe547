"""Restoring from the data file's own offsets: the same bytes, with or without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from store import heads, pages
from store.codec import memory, reference
from store.codec.layout import Layout
from store.codec.pack import Exporter
from store.codec.parted import CAN_SCATTER, Place
from store.codec.unpack import Importer
from store.objects import Record
from store.store import Store
from store.turns import Turn
from store.values import Values

MODEL = b"\0" * 16
TOKENS = 1000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Layout, list[bytes]]]:
    """A store with one state of the real classes, and what is in it."""
    caches = reference.fresh(16)
    reference.fill(caches, TOKENS)
    layout = Layout.of(caches, reference.MODEL_TYPE, MODEL)
    ids = list(range(TOKENS + 1))
    exporter = Exporter(layout, ids)
    rows, snapshot = exporter.rows(caches, TOKENS, last=True), exporter.snapshot(caches)
    store = Store.open(tmp_path_factory.mktemp("placed") / "store", 1 << 30)
    store.put_turn(Turn("resp_1", "conv_1", fingerprint=MODEL, prompt_ids=ids))
    store.save_state("resp_1", rows, snapshot)
    yield store, layout, contents(layout, caches)
    store.close()


def contents(layout: Layout, caches: Any) -> list[bytes]:
    exporter = Exporter(layout, list(range(TOKENS + 1)))
    pieces = [*exporter.rows(caches, TOKENS, last=True), exporter.snapshot(caches)]
    return [bytes(piece.payload) for piece in pieces]


def restored(store: Store, layout: Layout) -> Any:
    reader = store.load_state("resp_1", MODEL)
    assert reader is not None
    importer = Importer(layout, reference.fresh(16), MODEL, reader.ref.tokens)
    return reader.feed(
        importer.add_all, lambda piece: None if piece is None else importer.finish(piece)
    )


@pytest.mark.parametrize(
    "way", ["placed", "refused", "short", "elsewhere", "unknown", "one thread"]
)
def test_the_same_bytes_whichever_way_they_come(
    saved: tuple[Store, Layout, list[bytes]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout, expected = saved
    seen: list[int] = []
    scatter = Place.scatter

    def noted(self: Place, into: Any, nbytes: int) -> bool:
        if way == "refused":
            return False
        if way == "elsewhere":
            self = Place(self.fd, self.offset + (1 << 20), self.mark)
        if way == "short":
            self = Place(os.open(os.devnull, os.O_RDONLY), self.offset, self.mark)
        done = scatter(self, into, nbytes)
        if way == "short":
            os.close(self.fd)
        seen.append(done)
        return done

    monkeypatch.setattr(Place, "scatter", noted)
    if way == "unknown":
        monkeypatch.setattr(Values, "places", lambda self, views: [])
    if way == "one thread":
        monkeypatch.setattr(memory, "_THREADS", 1)
    caches = restored(store, layout)
    mx.eval([cache.state for cache in caches])
    assert contents(layout, caches) == expected
    if way in ("placed", "one thread"):
        assert CAN_SCATTER
        assert len(seen) > TOKENS // layout.block_tokens
        assert all(seen)


@pytest.mark.parametrize("kind", ["rows", "snapshot"])
def test_damage_is_found_as_ever(saved: tuple[Store, Layout, list[bytes]], kind: str) -> None:
    store, layout, _ = saved
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
        assert state is not None
        ident = store.blocks.line(txn, state.head)[3][0] if kind == "rows" else state.snap
        record = store.blocks.get(txn, ident)
        assert record is not None
        key = ident + (record.parts - 1).to_bytes(2, "big")
        value = bytes(txn.get(key, db=store.environment.dat))
    broken = bytearray(value)
    broken[5000] ^= 1
    store.environment.write(lambda txn: txn.put(key, bytes(broken), db=store.environment.dat))
    try:
        assert restored(store, layout) is None
        assert store.damaged == {ident}
    finally:
        store.environment.write(lambda txn: txn.put(key, value, db=store.environment.dat))
        store.damaged.clear()
    assert restored(store, layout) is not None


def test_parts_of_another_order_are_not_taken(saved: tuple[Store, Layout, list[bytes]]) -> None:
    """Each part is whole and of this object; that they are those of the save is in the seal."""
    store, layout, _ = saved
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
        assert state is not None
        record = store.blocks.get(txn, state.snap)
    assert record is not None
    changed = replace(record, seal=record.seal ^ 1)

    def put(one: Record) -> None:
        blk = store.environment.blk
        store.environment.write(lambda txn: txn.put(state.snap, one.pack(), db=blk))

    put(changed)
    try:
        assert restored(store, layout) is None
        assert store.damaged == {state.snap}
    finally:
        put(record)
        store.damaged.clear()
    assert restored(store, layout) is not None


def test_headers_are_read_once_and_again_when_they_were_written_anew(
    saved: tuple[Store, Layout, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout, expected = saved
    seen: list[bytes] = []
    parse = heads.parse
    monkeypatch.setattr(heads, "parse", lambda data: (seen.append(bytes(data)), parse(data))[1])
    monkeypatch.setattr(store.reading, "_heads", heads.Heads(store.blocks))
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
        assert state is not None
        line = [*store.blocks.line(txn, state.head)]
        packed, ids = store.blocks.header(txn, *line[2])
    assert restored(store, layout) is not None
    assert len(seen) == len(line) + 1
    assert restored(store, layout) is not None
    assert len(seen) == len(line) + 1

    ident, record = line[2]
    told = parse(packed)
    body = replace(told, provenance={**told.provenance, "again": 1}).pack()

    def rewrite(txn: Any, header: bytes) -> None:
        blocks, environment = store.blocks, store.environment
        _, small = blocks._schemas.pack(txn, told.fingerprint + b"r", header)
        pages.delete(environment, txn, b"h" + ident)
        count = (len(ids) // 4).to_bytes(4, "little")
        pages.put(environment, txn, b"h" + ident, count + ids + small)

    store.environment.write(lambda txn: rewrite(txn, body))
    caches = restored(store, layout)
    assert seen[len(line) + 1 :] == [body]
    store.environment.write(lambda txn: rewrite(txn, packed))
    assert contents(layout, caches) == expected

    monkeypatch.setattr(heads, "KEPT", 4)
    few = heads.Heads(store.blocks)
    monkeypatch.setattr(store.reading, "_heads", few)
    assert restored(store, layout) is not None
    assert len(few._kept) == 4
    assert record.start > 0
