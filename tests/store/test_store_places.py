"""Restoring from where values lie, in memory or in the file: the same bytes, with or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from store_damage import flip

from store import heads, places
from store.blocks import Blocks
from store.codec import memory, reference, scatter, stored
from store.codec.layout import Layout
from store.codec.pack import Exporter
from store.codec.stored import Stored
from store.codec.unpack import Importer
from store.objects import ROWS, Record
from store.store import Store
from store.turns import Turn

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

    def take(rows: Iterator[Stored], snapshot: Stored | None) -> Any:
        assert snapshot is not None
        return importer.restore(rows, snapshot)

    return reader.feed(take)


@pytest.mark.parametrize(
    "way",
    ["noted", "refused", "short", "elsewhere", "nowhere", "unknown", "few buffers", "one thread"],
)
def test_the_same_bytes_whichever_way_they_come(
    saved: tuple[Store, Layout, list[bytes]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file, as what lies on disk alone."""
    store, layout, expected = saved
    seen: list[bool] = []
    read = places._read

    def noted(fd: int, offset: int, into: Any, nbytes: int) -> bool:
        if way == "refused":
            into[1][:] = bytes(len(into[1]))  # something was read before it went wrong
            return False
        done = read(fd, (1 << 50) if way == "short" else offset, into, nbytes)
        seen.append(done)
        return done

    monkeypatch.setattr(places, "_read", noted)
    monkeypatch.setattr(places, "is_resident", lambda memory: False)
    if way == "few buffers":
        monkeypatch.setattr(places, "_MOST_BUFFERS", 4)
    go(way, store, monkeypatch)
    caches = restored(store, layout)
    mx.eval([cache.state for cache in caches])
    assert contents(layout, caches) == expected
    values = TOKENS // layout.block_tokens
    if way in ("noted", "few buffers", "one thread"):
        assert len(seen) > values
        assert all(seen)
    if way in ("elsewhere", "nowhere", "unknown"):
        # Where a value was found is known from then on.
        seen.clear()
        assert contents(layout, restored(store, layout)) == expected
        assert len(seen) > values
        assert all(seen)


@pytest.mark.skipif(scatter.VARIANT == "in turns", reason="not built here")
@pytest.mark.parametrize("way", ["noted", "elsewhere", "unknown", "beyond the end", "one thread"])
def test_the_same_bytes_out_of_memory(
    saved: tuple[Store, Layout, list[bytes]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout, expected = saved
    seen: list[int] = []
    copy = stored.scatter

    def noted(copies: Any) -> list[int]:
        seen.extend(source.nbytes for source, _, _ in copies)
        return copy(copies)

    def never(*_: object) -> bool:
        raise AssertionError("the file was read")

    monkeypatch.setattr(stored, "scatter", noted)
    # The system may have dropped a page at any time.
    monkeypatch.setattr(places, "is_resident", lambda memory: True)
    if way != "beyond the end":
        monkeypatch.setattr(places, "_read", never)
    go(way, store, monkeypatch)
    assert contents(layout, restored(store, layout)) == expected
    with store.environment.read() as txn:
        whole = store.blocks.totals(txn)[2]
    if way in ("noted", "one thread"):
        assert sum(seen) == whole
    else:
        assert not seen
        assert contents(layout, restored(store, layout)) == expected
        assert sum(seen) == whole


NOTED: dict[str, Callable[[int], int]] = {
    # One page on: there is memory, and what lies there has another header.
    "elsewhere": lambda page: page + 1,
    # As after a copy that left out what was free: a look there would end the process.
    "beyond the end": lambda page: 1 << 40,
    "nowhere": lambda page: 1 << 62,
    "unknown": lambda page: 0,
}


def go(way: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every value be noted at another page than it lies on, or be brought by one thread."""
    pages = Blocks.pages

    def told(self: Blocks, txn: Any, ident: bytes) -> list[int]:
        return [NOTED[way](page) for page in pages(self, txn, ident)]

    if way in NOTED:
        monkeypatch.setattr(Blocks, "pages", told)
    if way == "one thread":
        monkeypatch.setattr(memory, "_THREADS", 1)
    monkeypatch.setattr(store.reading, "_places", places.Places(store.blocks))


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_page_that_holds_another_value_by_now_is_not_believed(
    saved: tuple[Store, Layout, list[bytes]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hints of two blocks are exchanged: each page holds a whole value, but another's."""
    store, layout, expected = saved
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
        assert state is not None
        line = [ident for ident, _ in store.blocks.line(txn, state.head)]
    pages = Blocks.pages
    monkeypatch.setattr(places, "is_resident", lambda memory: where == "memory")

    def exchanged(self: Blocks, txn: Any, ident: bytes) -> list[int]:
        other = {line[2]: line[5], line[5]: line[2]}.get(ident, ident)
        return pages(self, txn, other)

    monkeypatch.setattr(Blocks, "pages", exchanged)
    monkeypatch.setattr(store.reading, "_places", places.Places(store.blocks))
    assert contents(layout, restored(store, layout)) == expected


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("kind", ["rows", "snapshot"])
def test_damage_is_found_as_ever(
    saved: tuple[Store, Layout, list[bytes]],
    kind: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, layout, _ = saved
    monkeypatch.setattr(places, "is_resident", lambda memory: where == "memory")
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
        assert state is not None
        ident = store.blocks.line(txn, state.head)[3][0] if kind == "rows" else state.snap
        record = store.blocks.get(txn, ident)
        assert record is not None
    flip(store, ident, record.parts - 1, 5000)
    try:
        assert restored(store, layout) is None
        assert store.damaged == {ident}
    finally:
        flip(store, ident, record.parts - 1, 5000)
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
    changed = record._replace(seal=record.seal ^ 1)

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


def test_headers_are_read_once(
    saved: tuple[Store, Layout, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout, _ = saved
    seen: list[bytes] = []
    parse = heads.parse
    monkeypatch.setattr(heads, "parse", lambda data: (seen.append(bytes(data)), parse(data))[1])
    monkeypatch.setattr(store.reading, "_places", places.Places(store.blocks))
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
        assert state is not None
        line = store.blocks.line(txn, state.head)
    assert restored(store, layout) is not None
    assert len(seen) == len(line) + 1
    assert restored(store, layout) is not None
    assert len(seen) == len(line) + 1

    monkeypatch.setitem(heads.KEPT, ROWS, 4)
    few = heads.Heads(store.blocks)
    for ident, record in line:
        few.get(ident, record)
    assert len(few._kept[ROWS]) == 4


def test_an_object_written_anew_is_found_where_it_lies_now(
    saved: tuple[Store, Layout, list[bytes]],
) -> None:
    """A damaged snapshot is written again with the next save: its old pages are free."""
    store, layout, expected = saved
    before = restored(store, layout)
    exporter = Exporter(layout, list(range(TOKENS + 1)))
    rows, snapshot = exporter.rows(before, TOKENS, last=True), exporter.snapshot(before)
    with store.environment.read() as txn:
        state = store.states.get(txn, "resp_1")
    assert state is not None
    store.damaged.add(state.snap)
    store.save_state("resp_1", rows, snapshot)
    assert not store.damaged
    assert contents(layout, restored(store, layout)) == expected
