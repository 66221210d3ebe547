"""Headers: what is written is read back, and nothing else is."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from store.codec.header import (
    DTYPES,
    FORMAT,
    MAGIC,
    MAX_HEADER,
    MAX_PAYLOAD,
    PREFIX,
    CodecError,
    Header,
    Leaf,
    Piece,
    header_length,
    offsets_of,
    parse,
    runs_of,
)

digests = st.binary(min_size=16, max_size=16)
scalars = st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(max_size=12)
extras = st.dictionaries(st.text(max_size=8), scalars | st.lists(scalars, max_size=4), max_size=4)
leaves = st.lists(
    st.builds(
        Leaf,
        st.lists(st.integers(0, 500), min_size=1, max_size=4).map(tuple),
        st.text("abcxyz.0123", min_size=1, max_size=10),
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 9), max_size=5).map(tuple),
    ),
    max_size=12,
    unique_by=lambda leaf: (leaf.path, leaf.name),
).map(tuple)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    rows = draw(st.booleans())
    start = draw(st.integers(0, 1 << 20))
    return Header(
        kind="rows" if rows else "snapshot",
        fingerprint=draw(digests),
        start=start,
        stop=start + draw(st.integers(1, 1 << 16)) if rows else start,
        chain=draw(digests),
        parent=draw(digests),
        leaves=draw(leaves),
        digest=draw(st.integers(0, (1 << 64) - 1)),
        state=() if rows else tuple(draw(st.lists(st.lists(scalars, max_size=3), max_size=3))),
        provenance=draw(extras),
        extra=draw(extras),
    )


def sealed(body: bytes) -> bytes:
    """A header with a right prefix around any body, as a hostile peer would send it."""
    return PREFIX.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def fields_of(header: Header) -> list[object]:
    fields: list[object] = msgpack.unpackb(header.pack()[PREFIX.size :])
    return fields


GOOD = Header(
    kind="rows",
    fingerprint=b"f" * 16,
    start=0,
    stop=80,
    chain=b"c" * 16,
    parent=b"p" * 16,
    leaves=(
        Leaf((0, 1), "keys", "bfloat16", (1, 2, 80, 4)),
        Leaf((0, 1), "values", "bfloat16", (1, 2, 80, 0)),
        Leaf((1,), "keys", "float32", (1, 2, 80, 4)),
        Leaf((2,), "keys", "bool", (1, 1, 80, 1)),
    ),
    digest=7,
    provenance={"device": "cpu"},
)


@given(headers())
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    packed = header.pack()
    assert header_length(packed[: PREFIX.size]) == len(packed)
    assert parse(packed) == header
    assert parse(memoryview(packed)).pack() == packed


def test_runs_put_wide_items_first_so_that_each_is_aligned() -> None:
    assert [run.dtype for run in GOOD.runs] == ["float32", "bfloat16", "bool"]
    assert [run.nbytes for run in GOOD.runs] == [2560, 1280, 80]
    assert offsets_of(GOOD.leaves) == (2560, 3840, 0, 3840)
    assert GOOD.nbytes == 3920


@given(leaves)
def test_leaves_tile_the_payload(table: tuple[Leaf, ...]) -> None:
    spans = sorted(
        (offset, offset + leaf.nbytes)
        for leaf, offset in zip(table, offsets_of(table), strict=True)
        if leaf.nbytes
    )
    ends = [0, *(stop for _, stop in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends[-1] == sum(run.nbytes for run in runs_of(table))


@given(headers(), st.data())
def test_any_changed_bit_is_refused(header: Header, data: st.DataObject) -> None:
    packed = bytearray(header.pack())
    at = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[at // 8] ^= 1 << at % 8
    with pytest.raises(CodecError):
        parse(packed)


@given(headers(), st.data())
def test_any_other_length_is_refused(header: Header, data: st.DataObject) -> None:
    packed = header.pack()
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(CodecError):
        parse(packed[:cut])
    with pytest.raises(CodecError):
        parse(packed + data.draw(st.binary(min_size=1, max_size=9)))


wild = st.recursive(
    scalars | st.binary(max_size=20) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(headers(), st.integers(0, 12), wild)
def test_a_field_of_anything_else_is_refused_or_a_header(
    header: Header, field: int, value: object
) -> None:
    fields = fields_of(header)
    fields[field] = value
    try:
        found = parse(sealed(msgpack.packb(fields)))
    except CodecError:
        return
    assert parse(found.pack()) == found


@given(st.binary(max_size=200))
def test_any_body_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        parse(sealed(body))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000 + b"\xc0",  # nested deeper than any reader should follow
        b"\xdd\xff\xff\xff\xff",  # an array that claims four thousand million members
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x9d" + b"\xff" * 13,
    ],
)
def test_hostile_bodies_are_refused_without_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            parse(sealed(body))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(body) + (1 << 20)


def leaf_table(*entries: object) -> bytes:
    return bytes(msgpack.packb(list(entries)))


@pytest.mark.parametrize(
    "table",
    [
        leaf_table([[0], "keys", 0, [1 << 31]]),
        leaf_table([[0], "keys", 0, [1 << 30, 1 << 30, 1 << 30]]),
        leaf_table([[0], "keys", 0, [0, 1 << 30, 1 << 30]]),
        leaf_table([[0], "keys", 0, [-1]]),
        leaf_table([[0], "keys", 0, [True]]),
        leaf_table([[0], "keys", 0, [1.0]]),
        leaf_table([[0], "keys", 0, [1] * 9]),
        leaf_table([[0], "keys", len(DTYPES), [1]]),
        leaf_table([[0], "keys", -1, [1]]),
        leaf_table([[0], "", 0, [1]]),
        leaf_table([[0], "k" * 200, 0, [1]]),
        leaf_table([[], "keys", 0, [1]]),
        leaf_table([[0] * 9, "keys", 0, [1]]),
        leaf_table([[1 << 20], "keys", 0, [1]]),
        leaf_table([[0], "keys", 0, [1]], [[0], "keys", 0, [1]]),
        leaf_table([[0], "keys", 0]),
        leaf_table({}),
        b"",
        b"\xff",
    ],
)
def test_leaf_tables_are_bounded(table: bytes) -> None:
    fields = fields_of(GOOD)
    fields[8] = table
    with pytest.raises(CodecError):
        parse(sealed(msgpack.packb(fields)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (1, "weights"),
        (2, b"f" * 15),
        (3, -1),
        (3, 80),
        (4, 1 << 40),
        (5, "c" * 16),
        (7, [["float32", 2560], ["bfloat16", 1281], ["bool", 80]]),
        (7, [["bfloat16", 1280], ["float32", 2560], ["bool", 80]]),
        (7, [["float32", 2560], ["bfloat16", 1280]]),
        (9, 1 << 64),
        (9, -1),
        (10, [1]),
        (11, [1]),
        (12, {1: 2}),
    ],
)
def test_fields_are_checked(field: int, value: object) -> None:
    fields = fields_of(GOOD)
    fields[field] = value
    try:
        body = msgpack.packb(fields)
    except OverflowError:
        body = msgpack.packb([*fields[:field], b"\0" * 9, *fields[field + 1 :]])
    with pytest.raises(CodecError):
        parse(sealed(body))


def test_another_format_is_a_miss_that_says_so() -> None:
    fields = fields_of(GOOD)
    fields[0] = FORMAT + 1
    with pytest.raises(CodecError, match="recompute"):
        parse(sealed(msgpack.packb([*fields, "a field of a later format"])))


def test_a_prefix_bounds_the_next_read() -> None:
    with pytest.raises(CodecError):
        header_length(PREFIX.pack(MAGIC, MAX_HEADER, 0))
    with pytest.raises(CodecError):
        header_length(PREFIX.pack(b"XXXX", 10, 0))
    with pytest.raises(CodecError):
        header_length(b"TDM")


def test_a_header_that_is_too_large_is_not_written() -> None:
    with pytest.raises(CodecError):
        Header(
            kind="snapshot",
            fingerprint=b"f" * 16,
            start=0,
            stop=0,
            chain=b"c" * 16,
            parent=b"c" * 16,
            leaves=(),
            digest=0,
            extra={"ids": b"\0" * MAX_HEADER},
        ).pack()


def test_a_payload_is_bounded_in_sum() -> None:
    each = MAX_PAYLOAD // 4
    shape = [1 << 16, each >> 16]
    assert math.prod(shape) == each
    fields = fields_of(GOOD)
    fields[8] = leaf_table(*([[index], "keys", 12, shape] for index in range(5)))
    fields[7] = [["uint8", 5 * each]]
    with pytest.raises(CodecError, match="payload size"):
        parse(sealed(msgpack.packb(fields)))


def test_a_piece_verifies_length_and_content() -> None:
    payload = bytes(range(256)) * 16
    header = Header(
        kind="rows",
        fingerprint=b"f" * 16,
        start=0,
        stop=1,
        chain=b"c" * 16,
        parent=b"p" * 16,
        leaves=(Leaf((0,), "keys", "uint8", (len(payload),)),),
        digest=xxhash.xxh3_64_intdigest(payload),
    )
    Piece(header, memoryview(payload)).verify()
    with pytest.raises(CodecError):
        Piece(header, memoryview(payload)[:-1]).verify()
    with pytest.raises(CodecError):
        Piece(header, memoryview(payload[:-1] + b"\0")).verify()


def test_headers_chains_and_fingerprints_need_no_mlx() -> None:
    code = (
        "import sys, store.codec.header, store.codec.chain, store.codec.fingerprint,"
        " store.codec.bench\n"
        "raise SystemExit(any(name.split('.')[0] in ('mlx', 'mlx_vlm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
