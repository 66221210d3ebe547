"""Whatever is wrong with a piece, importing it ends in CodecError: no crash, no wrong state."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import made_caches
import mlx.core as mx
import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from mlx_vlm.models import cache as classes

from store.codec import memory
from store.codec.header import PREFIX, CodecError, Header, Leaf, Piece, parse
from store.codec.layout import Layout
from store.codec.pack import Exporter, export_rows, export_snapshot
from store.codec.unpack import Importer

MODEL = b"m" * 16
HELD = 53
IDS = list(range(100, 100 + HELD + 20))
RECIPE: list[Any] = [
    {"class": "KVCache", "heads": 2, "keys": 4, "values": 3, "dtype": "bfloat16"},
    {
        "list": [
            {"class": "ArraysCache", "slots": [[1, 3], None], "padded": False, "dtype": "float32"},
            {"class": "PoolingCache", "keys": 4, "ratio": 16, "dtype": "float16"},
        ],
        "as": "CacheList",
    },
    {
        "class": "RotatingKVCache",
        "heads": 1,
        "keys": 2,
        "values": 2,
        "window": 20,
        "keep": 0,
        "dtype": "float32",
    },
]


def layout_of(recipe: Any = RECIPE, fingerprint: bytes = MODEL) -> Layout:
    probe = made_caches.fresh(recipe)
    made_caches.fill(probe, recipe, [16], 1)
    return Layout.of(probe, "any", fingerprint, value_bytes=1)


def filled(recipe: Any = RECIPE) -> Any:
    caches = made_caches.fresh(recipe)
    made_caches.fill(caches, recipe, [30, 20, 1, 1, 1], 1)
    return caches


def pieces_of(caches: Any, layout: Layout) -> list[Piece]:
    exporter = Exporter(layout, IDS)
    pieces = [*exporter.rows(caches, HELD, last=True), exporter.snapshot(caches)]
    return [Piece(parse(piece.header.pack()), piece.payload) for piece in pieces]


LAYOUT = layout_of()
PIECES = pieces_of(filled(), LAYOUT)
TOLD = made_caches.told(filled(), RECIPE)


def importer(capacity: int = HELD, **bounds: Any) -> Importer:
    return Importer(LAYOUT, made_caches.fresh(RECIPE), MODEL, capacity, **bounds)


def imported(pieces: list[Piece]) -> Any:
    taking = importer()
    for piece in pieces[:-1]:
        taking.add(piece)
    return taking.finish(pieces[-1])


def test_the_pieces_are_good_to_begin_with() -> None:
    assert made_caches.told(imported(PIECES), RECIPE) == TOLD
    assert len(PIECES) == 5


@given(st.integers(0, len(PIECES) - 1), st.data())
def test_any_changed_bit_of_a_payload_is_refused(index: int, data: st.DataObject) -> None:
    payload = bytearray(PIECES[index].payload)
    at = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[at // 8] ^= 1 << at % 8
    pieces = [*PIECES]
    pieces[index] = Piece(PIECES[index].header, memoryview(payload))
    with pytest.raises(CodecError):
        imported(pieces)


@given(st.integers(0, len(PIECES) - 1), st.data())
def test_any_other_length_of_a_payload_is_refused(index: int, data: st.DataObject) -> None:
    payload = bytes(PIECES[index].payload)
    longer = data.draw(st.binary(min_size=1, max_size=9))
    shorter = data.draw(st.integers(0, len(payload) - 1))
    for other in (payload[:shorter], payload + longer):
        pieces = [*PIECES]
        pieces[index] = Piece(PIECES[index].header, memoryview(other))
        with pytest.raises(CodecError):
            imported(pieces)


@given(st.permutations(range(len(PIECES))) | st.lists(st.integers(0, len(PIECES) - 1), max_size=7))
def test_any_other_order_is_refused(order: list[int]) -> None:
    if list(order) == list(range(len(PIECES))):
        return
    with pytest.raises(CodecError):
        taken_in([PIECES[index] for index in order])


def taken_in(pieces: list[Piece]) -> None:
    taking = importer()
    for piece in pieces:
        if piece.header.kind == "snapshot":
            taking.finish(piece)
            return
        taking.add(piece)
    taking.finish(PIECES[-1])


def resealed(piece: Piece, **changes: Any) -> Piece:
    """A piece as a peer would send it that means what it says: every checksum right."""
    payload = changes.pop("payload", piece.payload)
    digest = xxhash.xxh3_64_intdigest(payload)
    return Piece(
        dataclasses.replace(piece.header, **{"digest": digest, **changes}), memoryview(payload)
    )


def renamed(header: Header, index: int, **changes: Any) -> dict[str, Any]:
    leaves = [*header.leaves]
    leaves[index] = leaves[index]._replace(**changes)
    return {"leaves": tuple(leaves)}


ROWS = PIECES[0].header
SNAPSHOT = PIECES[-1].header


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": b"n" * 16},
        {"parent": b"n" * 16},
        {"start": 16, "stop": 32},
        {"kind": "snapshot", "start": 0, "stop": 0},
        renamed(ROWS, 0, path=(2,)),
        renamed(ROWS, 0, path=(7,)),
        renamed(ROWS, 0, path=(1,)),
        renamed(ROWS, 0, name="values"),
        renamed(ROWS, 0, name="offset"),
        renamed(ROWS, 0, dtype="float16"),
        renamed(ROWS, 0, dtype="uint16"),
        renamed(ROWS, 0, shape=(1, 1, 16, 8)),
        renamed(ROWS, 0, shape=(2, 1, 16, 4)),
        renamed(ROWS, 0, shape=(1, 2, 64)),
        renamed(ROWS, 0, shape=(128,)),
        {"leaves": ROWS.leaves[:-1]},
        {"leaves": (*ROWS.leaves, Leaf((1, 0), "slots.0", "float32", (1, 0)))},
        {"leaves": (*ROWS.leaves, Leaf((2,), "keys", "float32", (1, 1, 0, 2)))},
        {"stop": 15},
        {"stop": 17},
    ],
)
def test_rows_that_are_not_this_models_are_refused(change: dict[str, Any]) -> None:
    piece = resealed(PIECES[0], **change)
    payload = piece.payload[: piece.header.nbytes]
    with pytest.raises(CodecError):
        imported([resealed(piece, payload=bytes(payload)), *PIECES[1:]])


def edited(path: list[int | str], value: Any) -> tuple[Any, ...]:
    """The snapshot's state with one thing in it replaced."""
    state = msgpack.unpackb(msgpack.packb(list(SNAPSHOT.state)))
    node = state
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return tuple(state)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([0], None),
        ([0, 0], [9]),
        ([0, 1], "mlx_vlm.models.cache.RotatingKVCache"),
        ([0, 1], "os.system"),
        ([0, 2], {"bits": 8}),
        ([0, 3], []),
        ([0, 3, 0], None),
        ([0, 3, 0], ["bfloat16", [1, 2, 52, 4]]),
        ([0, 3, 0], ["float16", [1, 2, 53, 4]]),
        ([0, 3, 0], ["bfloat16", [1, 2, 53, 5]]),
        ([0, 3, 0], ["bfloat16", [1 << 40] * 8]),
        ([0, 3, 0], "keys"),
        ([0, 3, 0], [["bfloat16"], 3]),
        ([0, 4], []),
        ([1, 4, "slots"], None),
        ([1, 4, "slots"], ["l", [["a", 0]]]),
        ([1, 4, "slots"], ["l", [["a", 0], ["a", 0]]]),
        ([1, 4, "slots"], ["l", [["a", 99], None]]),
        ([1, 4, "slots"], ["l", [["a", -1], None]]),
        ([1, 4, "slots"], ["l", [["a", True], None]]),
        ([1, 4, "slots"], ["l", [["a", 1], None]]),
        ([1, 4, "slots"], ["x", []]),
        ([1, 4, "lengths"], 3),
        ([1, 4], {}),
        ([2, 2, "ratio"], 4),
        ([2, 4, "buf_kv"], None),
        ([3, 2, "max_size"], 21),
        ([3, 4, "offset"], 52),
        ([3, 4, "offset"], "53"),
        ([3, 4, "offset"], -1),
        ([3, 4, "index"], 1 << 40),
        ([3, 4, "index"], None),
        ([3, 4, "keys"], 1.5),
        ([3, 4, "keys"], None),
    ],
)
def test_snapshots_that_are_not_this_models_are_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(CodecError):
        imported([*PIECES[:-1], resealed(PIECES[-1], state=edited(path, value))])


def test_state_arrays_of_another_shape_or_type_are_refused() -> None:
    for changes in ({"shape": (3, 1)}, {"shape": (3,)}, {"dtype": "uint32"}):
        with pytest.raises(CodecError):
            imported([*PIECES[:-1], resealed(PIECES[-1], **renamed(SNAPSHOT, 0, **changes))])


@given(st.data())
def test_any_state_at_all_is_refused_or_the_same(data: st.DataObject) -> None:
    """Random damage to the snapshot's structure, sealed with right checksums."""
    state: Any = msgpack.unpackb(msgpack.packb(list(SNAPSHOT.state)))
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        keys = range(len(node)) if isinstance(node, list) else list(node)
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (list, dict)):
                collect(node[key])

    collect(state)
    wild = st.none() | st.integers(-3, 70) | st.text(max_size=3) | st.just([]) | st.just({})
    for _ in range(data.draw(st.integers(1, 3))):
        node, key = places[data.draw(st.integers(0, len(places) - 1))]
        node[key] = data.draw(wild)
    try:
        found = imported([*PIECES[:-1], resealed(PIECES[-1], state=tuple(state))])
    except CodecError:
        return
    told = made_caches.told(found, RECIPE)
    assert [entry[0] for entry in told] == [entry[0] for entry in TOLD]


def test_an_importer_that_failed_takes_nothing_more() -> None:
    taking = importer()
    taking.add(PIECES[0])
    damaged = bytearray(PIECES[1].payload)
    damaged[0] ^= 1
    with pytest.raises(CodecError, match="checksum"):
        taking.add(Piece(PIECES[1].header, memoryview(damaged)))
    for piece in PIECES[1:]:
        with pytest.raises(CodecError, match="nothing more"):
            taking.add(piece)
    with pytest.raises(CodecError, match="nothing more"):
        taking.finish(PIECES[-1])


def test_an_import_is_finished_once() -> None:
    taking = importer()
    taking.add_all(PIECES[:-1])
    taking.finish(PIECES[-1])
    with pytest.raises(CodecError):
        taking.finish(PIECES[-1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_snapshot_cut_short_is_refused_for_good(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_THREADS", threads)
    monkeypatch.setattr(memory, "_PARALLEL_BYTES", 0)
    taking = importer()
    taking.add_all(PIECES[:-1])
    whole = PIECES[-1]
    with pytest.raises(CodecError, match="payload of"):
        taking.finish(Piece(whole.header, whole.payload[: whole.payload.nbytes // 2]))
    with pytest.raises(CodecError, match="nothing more"):
        taking.finish(whole)


def test_until_it_is_finished_the_cache_list_is_untouched() -> None:
    caches = made_caches.fresh(RECIPE)
    empty = made_caches.told(made_caches.fresh(RECIPE), RECIPE)
    taking = Importer(LAYOUT, caches, MODEL, HELD)
    taking.add_all(PIECES[:-1])
    assert made_caches.told(caches, RECIPE) == empty


def test_memory_is_bounded_before_it_is_taken() -> None:
    """A header's claims cost nothing: the capacity granted is all that is ever allocated."""
    fresh = Layout.of(made_caches.fresh(RECIPE), "any", MODEL)
    assert not fresh.measured
    wide = PIECES[0].header
    leaves = (wide.leaves[0]._replace(shape=(1, 2, 16, 1 << 20)), *wide.leaves[1:])
    claims = Piece(dataclasses.replace(wide, leaves=leaves), PIECES[0].payload)
    before = mx.get_active_memory()
    with pytest.raises(CodecError):
        Importer(fresh, made_caches.fresh(RECIPE), MODEL, 1 << 20, max_bytes=1 << 20).add(claims)
    with pytest.raises(CodecError):
        Importer(LAYOUT, made_caches.fresh(RECIPE), MODEL, 1 << 20, max_bytes=1 << 20)
    assert mx.get_active_memory() - before < 1 << 20
    with pytest.raises(CodecError, match="granted"):
        importer(16).add_all(PIECES[:2])
    for capacity in (-1, 1 << 40):
        with pytest.raises(CodecError):
            importer(capacity)


def test_a_list_that_is_not_fresh_or_not_alike_takes_no_state() -> None:
    with pytest.raises(CodecError, match="fresh"):
        Importer(LAYOUT, filled(), MODEL, HELD)
    with pytest.raises(CodecError, match="another model"):
        Importer(LAYOUT, made_caches.fresh(RECIPE), b"n" * 16, HELD)
    others: list[Callable[[], Any]] = [
        lambda: made_caches.fresh(RECIPE[:2]),
        lambda: made_caches.fresh(RECIPE[::-1]),
        lambda: [classes.QuantizedKVCache(32, 8), *made_caches.fresh(RECIPE)[1:]],
        lambda: [*made_caches.fresh(RECIPE)[:2], classes.RotatingKVCache(21)],
    ]
    for other in others:
        with pytest.raises(CodecError):
            Importer(LAYOUT, other(), MODEL, HELD)


@pytest.mark.parametrize(
    "call",
    [
        lambda caches: export_rows(LAYOUT, caches, IDS, 5, 5),
        lambda caches: export_rows(LAYOUT, caches, IDS, -1, 5),
        lambda caches: export_rows(LAYOUT, caches, IDS, 0, HELD + 1),
        lambda caches: export_rows(LAYOUT, caches, IDS[:10], 0, 11),
        lambda caches: export_rows(LAYOUT, caches, IDS, 5, 20, b"x" * 16),
        lambda caches: export_snapshot(LAYOUT, caches, IDS, HELD - 1),
        lambda caches: export_snapshot(LAYOUT, caches, IDS, HELD + 1),
        lambda caches: export_snapshot(LAYOUT, caches, IDS[:9], HELD),
        lambda caches: export_snapshot(LAYOUT, caches, IDS, HELD, {"x": object()}).header.pack(),
        lambda caches: Exporter(LAYOUT, IDS, 5),
        lambda caches: export_rows(LAYOUT, caches[:2], IDS, 0, 16),
    ],
)
def test_an_export_says_what_is_wrong(call: Callable[[Any], Any]) -> None:
    caches = filled()
    with pytest.raises(CodecError):
        call(caches)


def test_random_bytes_are_refused() -> None:
    chance = random.Random(3)
    head = PIECES[-1].header.pack()
    for _ in range(300):
        damaged = bytearray(head)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(PREFIX.size, len(damaged))] = chance.randrange(256)
        body = bytes(damaged[PREFIX.size :])
        sealed = PREFIX.pack(b"TDMS", len(body), xxhash.xxh3_64_intdigest(body)) + body
        try:
            header = parse(sealed)
            imported([*PIECES[:-1], Piece(header, PIECES[-1].payload)])
        except CodecError:
            continue
