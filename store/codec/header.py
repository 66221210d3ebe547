"""The header of a piece of model state, and the piece itself. Imports no MLX.

A piece is a header and one flat payload. The header is `PREFIX` (magic, body length,
xxh3_64 of the body) and a msgpack body; the payload is one run per dtype, wide dtypes
first, each run the leaves of that dtype in the order of the leaf table, each leaf in C
order. Everything that a peer or a file says is bounded here before it is believed.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import msgpack
import xxhash

FORMAT = 1
"""Version of the bytes: header, leaf table, payload."""
LAYOUT_VERSION = 1
"""Raised when a row of the table of cache classes changes its meaning."""
MAGIC = b"TDMS"
PREFIX = struct.Struct("<4sIQ")
"""Magic, length of the body in bytes, xxh3_64 of the body."""

MAX_HEADER = 4 << 20
MAX_PAYLOAD = 16 << 30
MAX_TOKENS = 1 << 31
MAX_LEAVES = 1 << 14
MAX_DIMS = 8
MAX_DEPTH = 8
MAX_NAME = 96
MAX_NODES = 1 << 17

DTYPES: dict[str, int] = {
    "complex64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element. The order is the order of runs: a run starts aligned to its items."""
_ORDER = {name: index for index, name in enumerate(DTYPES)}

Kind = Literal["rows", "snapshot"]


class CodecError(Exception):
    """State that cannot be packed, is damaged, or does not belong to this model."""


class Leaf(NamedTuple):
    """One array of a piece: where it hangs in the cache list, its dtype and shape."""

    path: tuple[int, ...]
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


class Run(NamedTuple):
    """All leaves of one dtype, one after another; `nbytes` of the payload."""

    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a piece is, whose it is, and what lies in its payload.

    `start`, `stop` are token positions; a snapshot has both equal. `chain` is the chained
    hash of the token ids up to `stop`, `parent` the one up to `start`. `state` (snapshots)
    holds, for each slot of the cache list, its class, settings, rows and scalars.
    """

    kind: Kind
    fingerprint: bytes
    start: int
    stop: int
    chain: bytes
    parent: bytes
    leaves: tuple[Leaf, ...]
    digest: int
    state: tuple[Any, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: int = FORMAT

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The dtype runs of the payload, in payload order."""
        return runs_of(self.leaves)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(run.nbytes for run in self.runs)

    def pack(self) -> bytes:
        """The header as bytes, prefix included. Raises CodecError beyond MAX_HEADER, and for
        values in `extra` or `provenance` that msgpack has no form for."""
        fields = [
            self.version,
            self.kind,
            self.fingerprint,
            self.start,
            self.stop,
            self.chain,
            self.parent,
            [[run.dtype, run.nbytes] for run in self.runs],
            _pack_leaves(self.leaves),
            self.digest,
            list(self.state),
            dict(self.provenance),
            dict(self.extra),
        ]
        try:
            body: bytes = msgpack.packb(fields)
        except (TypeError, ValueError, OverflowError) as error:
            raise CodecError(
                f"what travels beside the state must be plain values ({error})"
            ) from None
        if len(body) + PREFIX.size > MAX_HEADER:
            raise CodecError(
                f"header of {len(body)} bytes exceeds {MAX_HEADER}: carry less beside the state"
            )
        return PREFIX.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


@dataclass(frozen=True)
class Piece:
    """A header and its payload: flat uint8 memory of `header.nbytes` bytes."""

    header: Header
    payload: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.nbytes

    def verify(self) -> None:
        """Check length and xxh3_64 of the payload. Raises CodecError."""
        self._check_length()
        self._check(xxhash.xxh3_64_intdigest(self.payload))

    def lying(self) -> tuple[memoryview, int]:
        """The payload, and the seed of its digest. Raises CodecError where its length is wrong."""
        self._check_length()
        return self.payload, 0

    def settle(self, into: Sequence[memoryview], digest: int | None) -> None:
        """Raise CodecError unless `digest`, that of the copy made, is the payload's."""
        self._check(digest)

    def _check_length(self) -> None:
        if self.payload.nbytes != self.header.nbytes:
            raise CodecError(
                f"payload of {self.payload.nbytes} bytes where the header says "
                f"{self.header.nbytes}: fetch the piece again"
            )

    def _check(self, digest: int | None) -> None:
        if digest != self.header.digest:
            raise CodecError(
                f"payload of tokens [{self.header.start}, {self.header.stop}) fails its "
                "checksum: fetch the piece again"
            )


@lru_cache(maxsize=64)
def runs_of(leaves: tuple[Leaf, ...]) -> tuple[Run, ...]:
    """Dtype runs of a leaf table, wide dtypes first. Runs of no bytes are kept."""
    sizes: dict[str, int] = {}
    for leaf in leaves:
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.nbytes
    return tuple(Run(name, sizes[name]) for name in sorted(sizes, key=_ORDER.__getitem__))


@lru_cache(maxsize=64)
def offsets_of(leaves: tuple[Leaf, ...]) -> tuple[int, ...]:
    """Byte offset in the payload of each leaf of a table."""
    at: dict[str, int] = {}
    total = 0
    for run in runs_of(leaves):
        at[run.dtype] = total
        total += run.nbytes
    offsets = []
    for leaf in leaves:
        offsets.append(at[leaf.dtype])
        at[leaf.dtype] += leaf.nbytes
    return tuple(offsets)


def header_length(prefix: bytes | memoryview) -> int:
    """Length in bytes of the whole header whose first PREFIX.size bytes are given.

    Lets a reader of a stream bound its next read. Raises CodecError on a bad prefix.
    """
    if len(prefix) < PREFIX.size:
        raise CodecError(f"header of {len(prefix)} bytes is cut short: fetch the piece again")
    magic, length, _ = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise CodecError("this is not a piece of model state (wrong magic)")
    if length + PREFIX.size > MAX_HEADER:
        raise CodecError(f"header claims {length} bytes, more than {MAX_HEADER}: refused")
    return int(length) + PREFIX.size


def parse(data: bytes | bytearray | memoryview) -> Header:
    """Read a header; `data` is exactly the header. Raises CodecError on anything wrong."""
    view = memoryview(data)
    if view.nbytes != header_length(view[: PREFIX.size]):
        raise CodecError("header has a wrong length: fetch the piece again")
    body = view[PREFIX.size :]
    if xxhash.xxh3_64_intdigest(body) != PREFIX.unpack_from(view)[2]:
        raise CodecError("header fails its checksum: fetch the piece again")
    try:
        fields = msgpack.unpackb(
            body, max_array_len=MAX_NODES, max_map_len=MAX_NODES, strict_map_key=True
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise CodecError(f"header is not readable ({error}): fetch the piece again") from None
    return _header(fields)


def _header(fields: Any) -> Header:
    _need(isinstance(fields, list) and bool(fields), "body")
    _need(_is_count(fields[0], 1 << 16), "version")
    if fields[0] != FORMAT:
        raise CodecError(
            f"state of format {fields[0]}, this build reads format {FORMAT}: recompute it"
        )
    _need(len(fields) == 13, "body")
    (_, kind, fingerprint, start, stop, chain_, parent, runs, blob, digest, state, prov, extra) = (
        fields
    )
    _need(kind in ("rows", "snapshot"), "kind")
    for name, value in (("fingerprint", fingerprint), ("chain", chain_), ("parent", parent)):
        _need(isinstance(value, bytes) and len(value) == 16, name)
    _need(_is_count(start, MAX_TOKENS) and _is_count(stop, MAX_TOKENS), "token range")
    _need(start < stop if kind == "rows" else start == stop, "token range")
    _need(_is_count(digest, 1 << 64), "digest")
    _need(isinstance(blob, bytes), "leaf table")
    table = _table(blob)
    _need(runs == table.told, "dtype runs")
    _need(table.nbytes <= MAX_PAYLOAD, "payload size")
    _need(isinstance(state, list) and len(state) <= MAX_LEAVES, "state")
    _need(kind == "snapshot" or not state, "state")
    for name, value in (("provenance", prov), ("extra", extra)):
        _need(isinstance(value, dict) and all(isinstance(key, str) for key in value), name)
    header = Header(
        kind=kind,
        fingerprint=fingerprint,
        start=start,
        stop=stop,
        chain=chain_,
        parent=parent,
        leaves=table.leaves,
        digest=digest,
        state=tuple(state),
        provenance=prov,
        extra=extra,
    )
    # Known already: finding them by the table would hash all of its leaves for every header.
    vars(header).update(runs=table.runs, nbytes=table.nbytes)
    return header


@lru_cache(maxsize=64)
def _pack_leaves(leaves: tuple[Leaf, ...]) -> bytes:
    packed: bytes = msgpack.packb(
        [[list(leaf.path), leaf.name, _ORDER[leaf.dtype], list(leaf.shape)] for leaf in leaves]
    )
    return packed


class _Table(NamedTuple):
    """A leaf table as it was read, its runs, the same as a header tells them, and their bytes."""

    leaves: tuple[Leaf, ...]
    runs: tuple[Run, ...]
    told: list[list[Any]]
    nbytes: int


def _table(blob: bytes) -> _Table:
    # Blocks of one conversation share one table, so it is read once; a table large enough
    # to make the cache itself a burden is not kept.
    return _cached_table(blob) if len(blob) <= 1 << 16 else _read_table(blob)


def _read_table(blob: bytes) -> _Table:
    leaves = _read_leaves(blob)
    runs = runs_of(leaves)
    told = [[run.dtype, run.nbytes] for run in runs]
    return _Table(leaves, runs, told, sum(run.nbytes for run in runs))


def _read_leaves(blob: bytes) -> tuple[Leaf, ...]:
    try:
        table = msgpack.unpackb(blob, max_array_len=MAX_LEAVES, max_map_len=0)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise CodecError(f"leaf table is not readable ({error}): fetch the piece again") from None
    _need(isinstance(table, list) and len(table) <= MAX_LEAVES, "leaf table")
    names = tuple(DTYPES)
    leaves = []
    for entry in table:
        _need(isinstance(entry, list) and len(entry) == 4, "leaf")
        path, name, dtype, shape = entry
        _need(isinstance(path, list) and 0 < len(path) <= MAX_DEPTH, "leaf path")
        _need(all(_is_count(step, 1 << 16) for step in path), "leaf path")
        _need(isinstance(name, str) and 0 < len(name) <= MAX_NAME, "leaf name")
        _need(_is_count(dtype, len(names)), "leaf dtype")
        _need(isinstance(shape, list) and len(shape) <= MAX_DIMS, "leaf shape")
        # The product of the nonzero sizes is bounded too: a zero must not hide a huge axis.
        _need(all(_is_count(size, 1 << 31) for size in shape), "leaf shape")
        _need(math.prod(size or 1 for size in shape) <= MAX_PAYLOAD, "leaf shape")
        leaves.append(Leaf(tuple(path), name, names[dtype], tuple(shape)))
    _need(len({(leaf.path, leaf.name) for leaf in leaves}) == len(leaves), "leaf table")
    return tuple(leaves)


_cached_table = lru_cache(maxsize=64)(_read_table)


def _is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise CodecError(f"header has an invalid {what}: fetch the piece again")


def root(fingerprint: bytes, extra: bytes = b"") -> bytes:
    """The chain before the first token of a model: 16 bytes."""
    return hashlib.blake2b(fingerprint + extra, digest_size=16, person=b"tandem root").digest()


def chain(parent: bytes, ids: Sequence[int], extra: bytes = b"") -> bytes:
    """The chain after `ids`, 16 bytes, where `parent` is the chain at the block's start."""
    if len(parent) != 16:
        raise CodecError("a chained hash has 16 bytes")
    digest = hashlib.blake2b(parent, digest_size=16, person=b"tandem chain")
    digest.update(struct.pack("<I", len(ids)))
    digest.update(_packed_ids(ids))
    digest.update(extra)
    return digest.digest()


def _packed_ids(ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise CodecError("token ids must be integers from 0 to 4294967295") from None
