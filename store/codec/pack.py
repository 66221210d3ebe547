"""From a cache list to pieces: the rows of a token range, and the snapshot at a position.

Rows are cut at multiples of the layout's block, so what the link carries is what the store
keeps. Only live rows are read, never a buffer's slack, and every bit is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import xxhash

from store.codec import memory
from store.codec.cacheclass import Growing
from store.codec.chain import Chain, Mark
from store.codec.header import CodecError, Header, Leaf, Piece, offsets_of, root, runs_of
from store.codec.layout import Layout, Slot, arrays_of, dtype_name, position

_GROUP_BYTES = 16 << 20
"""Blocks are packed together into buffers of about this size: a piece that is kept alive
keeps its whole buffer, so buffers stay small."""
_ALIGN = 64


class _Source(NamedTuple):
    """One growing array to read from: (B, ..., rows, ...) whose first row is `base`."""

    slot: Slot
    row: Growing
    array: mx.array
    base: int

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Rows completed in tokens [start, stop)."""
        return start // self.row.ratio, stop // self.row.ratio

    def leaf(self, start: int, stop: int) -> Leaf:
        first, last = self.span(start, stop)
        shape = list(self.array.shape)
        shape[self.row.axis] = last - first
        return Leaf(self.slot.path, self.row.name, dtype_name(self.array), tuple(shape))

    def slice(self, start: int, stop: int) -> mx.array:
        first, last = self.span(start, stop)
        index = (slice(None),) * self.row.axis + (slice(first - self.base, last - self.base),)
        return self.array[index]


@cache
def build() -> dict[str, str]:
    """Where state is computed here: device kind and MLX build. Told, never compared."""
    return {
        "device": "metal" if mx.metal.is_available() else "cpu",
        "mlx": version("mlx"),
    }


def export_rows(
    layout: Layout,
    caches: Sequence[Any],
    ids: Sequence[int],
    start: int,
    stop: int,
    parent: bytes | None = None,
    *,
    marks: Sequence[Mark] = (),
    provenance: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """The rows of tokens [start, stop) as one piece per block, the ends partial where they are.

    `ids` are all token ids from position 0, `marks` what else decides rows (images, adapters).
    `parent` is the chain at `start`; it saves the hashing of everything before, and where
    `start` is inside a block it is checked instead. Must run on the thread that owns the
    arrays; the pieces may then go anywhere. Raises CodecError where the caches hold fewer
    tokens than `stop`, or are not this layout's.
    """
    if not 0 <= start < stop <= len(ids):
        raise CodecError(f"no rows [{start}, {stop}) among {len(ids)} token ids")
    block = layout.block_tokens
    seed = root(layout.fingerprint)
    aligned = parent is not None and start % block == 0
    chain = Chain(seed, ids, block, marks, known=(start, parent) if aligned else None)
    if parent is not None and chain.at(start) != parent:
        raise CodecError(f"the chain given for position {start} is not that of these token ids")
    return _rows(layout, caches, chain, start, stop, provenance)


def export_snapshot(
    layout: Layout,
    caches: Sequence[Any],
    ids: Sequence[int],
    stop: int,
    extra: Mapping[str, Any] | None = None,
    *,
    marks: Sequence[Mark] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Piece:
    """Everything overwritten in `caches` at position `stop`, as one piece.

    `extra` is what the model keeps outside its caches (rope offset, pending token ids) in
    msgpack values; `provenance` adds to `build()` (chunk lengths). Raises CodecError where
    the caches stand at another position.
    """
    if not 0 <= stop <= len(ids):
        raise CodecError(f"no position {stop} among {len(ids)} token ids")
    chain = Chain(root(layout.fingerprint), ids, layout.block_tokens, marks)
    return _snapshot(layout, caches, chain.at(stop), stop, extra, provenance)


class Exporter:
    """Exports one state as it grows: whole blocks while it does, the rest at the end."""

    def __init__(
        self,
        layout: Layout,
        ids: Sequence[int],
        start: int = 0,
        *,
        marks: Sequence[Mark] = (),
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """`ids` are all token ids, also those not computed yet; rows before `start`, a
        multiple of the block, are known to the other side."""
        if start % layout.block_tokens:
            raise CodecError(f"position {start} is not the start of a block")
        self.position = start
        self._layout = layout
        self._provenance = provenance
        self._chain = Chain(root(layout.fingerprint), ids, layout.block_tokens, marks)

    def rows(self, caches: Sequence[Any], stop: int, *, last: bool = False) -> list[Piece]:
        """The rows not exported yet, up to the last block boundary before `stop`, or all."""
        end = stop if last else stop - stop % self._layout.block_tokens
        if end <= self.position:
            return []
        pieces = _rows(self._layout, caches, self._chain, self.position, end, self._provenance)
        self.position = end
        return pieces

    def snapshot(self, caches: Sequence[Any], extra: Mapping[str, Any] | None = None) -> Piece:
        """The snapshot at the exporter's position, after `rows(..., last=True)`."""
        return _snapshot(
            self._layout,
            caches,
            self._chain.at(self.position),
            self.position,
            extra,
            self._provenance,
        )


def _rows(
    layout: Layout,
    caches: Sequence[Any],
    chain: Chain,
    start: int,
    stop: int,
    provenance: Mapping[str, Any] | None,
) -> list[Piece]:
    held = position(layout, caches)
    if held is not None and held < stop:
        raise CodecError(f"the caches hold {held} tokens, not {stop}")
    sources = [
        _Source(slot, row, array, 0)
        for slot, cache_ in layout.match(caches)
        for row in slot.rows
        if (array := slot.kind.array(cache_, row.name)) is not None
    ]
    block = layout.block_tokens
    cuts = [start, *range(start - start % block + block, stop, block), stop]
    tables = _tables(sources, cuts)
    gather = _on_device if memory.packs_on_device() else _on_host
    payloads = gather(sources, cuts, tables)
    digests = _digests(payloads)
    facts = {**build(), **(provenance or {})}
    return [
        Piece(
            Header(
                kind="rows",
                fingerprint=layout.fingerprint,
                start=a,
                stop=b,
                chain=chain.at(b),
                parent=chain.at(a),
                leaves=table,
                digest=digest,
                provenance=facts,
            ),
            payload,
        )
        for (a, b), table, payload, digest in zip(
            pairwise(cuts), tables, payloads, digests, strict=True
        )
    ]


def _snapshot(
    layout: Layout,
    caches: Sequence[Any],
    link: bytes,
    stop: int,
    extra: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
) -> Piece:
    held = position(layout, caches)
    if held is not None and held != stop:
        raise CodecError(f"the caches stand at {held}, the snapshot was asked for {stop}")
    arrays: list[mx.array] = []
    leaves: list[Leaf] = []
    states = []
    for slot, cache_ in layout.match(caches):
        state = slot.kind.state(cache_)
        states.append(
            [
                list(slot.path),
                slot.name,
                slot.config,
                _row_table(slot, cache_, stop),
                _tree(state, len(arrays)),
            ]
        )
        for name, array in arrays_of(state):
            arrays.append(array)
            leaves.append(Leaf(slot.path, name, dtype_name(array), array.shape))
    table = tuple(leaves)
    payload = _flatten(arrays, table)
    return Piece(
        Header(
            kind="snapshot",
            fingerprint=layout.fingerprint,
            start=stop,
            stop=stop,
            chain=link,
            parent=link,
            leaves=table,
            digest=_digests([payload])[0],
            state=tuple(states),
            provenance={**build(), **(provenance or {})},
            extra=dict(extra or {}),
        ),
        payload,
    )


def _row_table(slot: Slot, cache_: Any, stop: int) -> list[Any]:
    """For each growing array its dtype and shape at `stop`, or None where it is unset."""
    table: list[Any] = []
    for row in slot.rows:
        array = slot.kind.array(cache_, row.name)
        if array is None:
            table.append(None)
            continue
        shape = list(array.shape)
        shape[row.axis] = stop // row.ratio
        table.append([dtype_name(array), shape])
    return table


def _tree(value: Any, first: int) -> Any:
    """A state value with its arrays replaced by their places in the leaf table."""
    place = iter(range(first, 1 << 30))

    def encode(node: Any) -> Any:
        if isinstance(node, mx.array):
            return ["a", next(place)]
        if isinstance(node, list):
            return ["l", [encode(member) for member in node]]
        if isinstance(node, tuple):
            return ["t", [encode(member) for member in node]]
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise CodecError(f"a cache holds a {type(node).__name__}, which has no encoding")

    return {name: encode(member) for name, member in value.items()}


def _tables(sources: Sequence[_Source], cuts: Sequence[int]) -> list[tuple[Leaf, ...]]:
    """The leaf table of each block. Blocks of equal row counts share one object."""
    known: dict[tuple[int, ...], tuple[Leaf, ...]] = {}
    tables = []
    ratios = {source.row.ratio for source in sources}
    for a, b in pairwise(cuts):
        counts = tuple(b // ratio - a // ratio for ratio in ratios)
        if counts not in known:
            known[counts] = tuple(source.leaf(a, b) for source in sources)
        tables.append(known[counts])
    return tables


def _on_host(
    sources: Sequence[_Source], cuts: Sequence[int], tables: Sequence[tuple[Leaf, ...]]
) -> list[memoryview]:
    """Copy through numpy views, many blocks at a time, one strided copy per array."""
    flat = _flat_sources(sources, cuts[0], cuts[-1])
    views = [memory.view(memory.bits(source.array)) for source in flat]
    payloads: list[memoryview] = []
    at = 0
    while at < len(tables):
        table = tables[at]
        size = sum(run.nbytes for run in runs_of(table))
        count = 1
        while (
            at + count < len(tables)
            and tables[at + count] == table
            and (count + 1) * size <= _GROUP_BYTES
        ):
            count += 1
        payloads += _pack_group(flat, views, cuts[at], cuts[at + 1], count, table, size)
        at += count
    return payloads


def _pack_group(
    sources: Sequence[_Source],
    views: Sequence[memory.Bytes],
    start: int,
    stop: int,
    count: int,
    table: tuple[Leaf, ...],
    size: int,
) -> list[memoryview]:
    """`count` equal blocks, the first of them [start, stop)."""
    if not size:
        return [memoryview(b"")] * count
    stride = -(-size // _ALIGN) * _ALIGN
    buffer = memory.lease(count * stride)
    tasks = []
    for source, data, leaf, offset in zip(sources, views, table, offsets_of(table), strict=True):
        if not leaf.nbytes:
            continue
        axis = source.row.axis
        rows = leaf.shape[axis]
        outer = int(np.prod(leaf.shape[:axis], dtype=np.int64))
        inner = leaf.nbytes // outer
        total = source.array.shape[axis]
        width = inner // rows
        first = start // source.row.ratio - source.base
        target = np.ndarray((count, outer, inner), np.uint8, buffer, offset, (stride, inner, 1))
        origin = np.ndarray(
            (count, outer, inner), np.uint8, data, first * width, (inner, total * width, 1)
        )
        tasks.append(partial(np.copyto, target, origin))
    memory.run_all(tasks, count * size)
    return [buffer[i * stride : i * stride + size] for i in range(count)]


def _flat_sources(sources: Sequence[_Source], start: int, stop: int) -> list[_Source]:
    """The sources as evaluated arrays without gaps; one with gaps is copied in its range."""
    mx.eval([memory.bits(source.array) for source in sources])
    gaps = {
        index: mx.contiguous(source.slice(start, stop))
        for index, source in enumerate(sources)
        if not memory.is_flat(source.array)
    }
    mx.eval(list(gaps.values()))
    return [
        source._replace(array=gaps[index], base=start // source.row.ratio)
        if index in gaps
        else source
        for index, source in enumerate(sources)
    ]


def _on_device(
    sources: Sequence[_Source], cuts: Sequence[int], tables: Sequence[tuple[Leaf, ...]]
) -> list[memoryview]:
    """Concatenate each block on the device, then view it."""
    packs = [
        _concatenated([source.slice(a, b) for source in sources], table)
        for a, b, table in zip(cuts, cuts[1:], tables, strict=False)
    ]
    mx.eval(packs)
    return [memory.flat_buffer(pack) for pack in packs]


def _flatten(arrays: Sequence[mx.array], table: tuple[Leaf, ...]) -> memoryview:
    """Whole arrays as one payload."""
    size = sum(leaf.nbytes for leaf in table)
    if not size:
        return memoryview(b"")
    if memory.packs_on_device():
        pack = _concatenated(arrays, table)
        mx.eval(pack)
        return memory.flat_buffer(pack)
    flat = memory.ready(arrays)
    buffer = memory.lease(size)
    target = np.frombuffer(buffer, np.uint8)
    tasks = [
        partial(np.copyto, target[offset : offset + leaf.nbytes], memory.view(array))
        for array, leaf, offset in zip(flat, table, offsets_of(table), strict=True)
        if leaf.nbytes
    ]
    memory.run_all(tasks, size)
    return buffer[:size]


def _concatenated(arrays: Sequence[mx.array], table: tuple[Leaf, ...]) -> mx.array:
    offsets = offsets_of(table)
    order = sorted(range(len(table)), key=offsets.__getitem__)
    parts = [
        memory.bits(mx.contiguous(arrays[index])).reshape(-1).view(mx.uint8)
        for index in order
        if table[index].nbytes
    ]
    return mx.concatenate(parts) if parts else mx.zeros((0,), mx.uint8)


def _digests(payloads: Sequence[memoryview]) -> list[int]:
    digests = [0] * len(payloads)

    def digest(index: int) -> None:
        digests[index] = xxhash.xxh3_64_intdigest(payloads[index])

    tasks = [partial(digest, index) for index in range(len(payloads))]
    memory.run_all(tasks, sum(payload.nbytes for payload in payloads))
    return digests
