"""Collecting arrays into payloads: many blocks of rows at a time, or a whole snapshot.

Two ways, one result. On the host, bytes are copied through numpy views on several threads,
and each payload's digest is taken while it is still in the processor's cache. On the device,
each payload is one concatenate, then viewed where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import xxhash

from store.codec import memory
from store.codec.cacheclass import Growing
from store.codec.header import Leaf, offsets_of, runs_of
from store.codec.layout import Slot, dtype_name

_GROUP_BYTES = 8 << 20
"""Blocks are collected together into buffers of about this size: small enough to stay in a
cache, and because a piece that is kept alive keeps its whole buffer."""
_ALIGN = 64


class Payload(NamedTuple):
    """Flat uint8 memory and its xxh3_64."""

    data: memoryview
    digest: int


class Source(NamedTuple):
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


class Block(NamedTuple):
    """The leaf table of a block, and the source of each leaf."""

    table: tuple[Leaf, ...]
    sources: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in runs_of(self.table))


def blocks_of(sources: Sequence[Source], cuts: Sequence[int]) -> list[Block]:
    """The blocks between neighbouring `cuts`. Blocks of equal row counts share one object.

    An array that completes no row in a block is left out of it, whether it is set already or
    not: the bytes of a block do not depend on when they were taken.
    """
    known: dict[tuple[int, ...], Block] = {}
    blocks = []
    ratios = {source.row.ratio for source in sources}
    for a, b in pairwise(cuts):
        counts = tuple(b // ratio - a // ratio for ratio in ratios)
        if counts not in known:
            chosen = [
                (source.leaf(a, b), index)
                for index, source in enumerate(sources)
                if source.span(a, b)[0] < source.span(a, b)[1]
            ]
            known[counts] = Block(
                tuple(leaf for leaf, _ in chosen), tuple(index for _, index in chosen)
            )
        blocks.append(known[counts])
    return blocks


def gather_rows(
    sources: Sequence[Source], cuts: Sequence[int], blocks: Sequence[Block]
) -> list[Payload]:
    """The payload of each block."""
    if memory.packs_on_device():
        return _digested(
            [
                _concatenated([sources[index].slice(a, b) for index in block.sources], block.table)
                for (a, b), block in zip(pairwise(cuts), blocks, strict=True)
            ]
        )
    return _rows_on_host(sources, cuts, blocks)


def gather_all(arrays: Sequence[mx.array], table: tuple[Leaf, ...]) -> Payload:
    """Whole arrays as one payload."""
    size = sum(leaf.nbytes for leaf in table)
    if not size:
        return _payload(memoryview(b""))
    if memory.packs_on_device():
        return _digested([_concatenated(arrays, table)])[0]
    flat = memory.ready(arrays)
    buffer = memory.lease(size)
    target = np.frombuffer(buffer, np.uint8)
    tasks = [
        partial(np.copyto, target[offset : offset + leaf.nbytes], memory.view(array))
        for array, leaf, offset in zip(flat, table, offsets_of(table), strict=True)
        if leaf.nbytes
    ]
    memory.run_all(tasks, size)
    return _payload(buffer)


def _rows_on_host(
    sources: Sequence[Source], cuts: Sequence[int], blocks: Sequence[Block]
) -> list[Payload]:
    flat = _without_gaps(sources, cuts[0], cuts[-1])
    views = [_by_head(source) for source in flat]
    tasks: list[Callable[[], object]] = []
    results: list[list[Payload]] = []
    total = at = 0
    while at < len(blocks):
        block = blocks[at]
        size = block.nbytes
        count = 1
        while (
            at + count < len(blocks)
            and blocks[at + count] is block
            and (count + 1) * size <= _GROUP_BYTES
        ):
            count += 1
        result: list[Payload] = []
        results.append(result)
        tasks.append(partial(_pack_group, result, flat, views, cuts[at], count, block))
        total += count * size
        at += count
    memory.run_all(tasks, total)
    return [payload for result in results for payload in result]


def _by_head(source: Source) -> memory.Bytes:
    """The array's bytes as (all axes before the rows, rows): what lies together in memory."""
    outer = math.prod(source.array.shape[: source.row.axis])
    flat = memory.view(memory.bits(source.array))
    return flat.reshape(outer, -1) if flat.size else np.empty((1, 0), np.uint8)


def _pack_group(
    result: list[Payload],
    sources: Sequence[Source],
    views: Sequence[memory.Bytes],
    start: int,
    count: int,
    block: Block,
) -> None:
    """`count` equal blocks from token `start` on: one strided copy per array, then digests."""
    size = block.nbytes
    stride = -(-size // _ALIGN) * _ALIGN
    if not size:
        result.extend([_payload(memoryview(b""))] * count)
        return
    buffer = memory.lease(count * stride)
    target = np.frombuffer(buffer, np.uint8).reshape(count, stride)
    for leaf, index, offset in zip(
        block.table, block.sources, offsets_of(block.table), strict=True
    ):
        if not leaf.nbytes:
            continue
        source, data = sources[index], views[index]
        inner = leaf.nbytes // data.shape[0]
        width = inner // leaf.shape[source.row.axis]
        first = (start // source.row.ratio - source.base) * width
        rows = data[:, first : first + count * inner]
        place = target[:, offset : offset + leaf.nbytes]
        if data.shape[0] == 1:
            place[...] = rows.reshape(count, inner)
        else:
            # Views both: (blocks, heads, rows of a block) on either side.
            shape = (data.shape[0], count, inner)
            place.reshape(count, *shape[::2])[...] = rows.reshape(shape).transpose(1, 0, 2)
    result.extend(_payload(buffer[i * stride : i * stride + size]) for i in range(count))


def _without_gaps(sources: Sequence[Source], start: int, stop: int) -> list[Source]:
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


def _concatenated(arrays: Sequence[mx.array], table: tuple[Leaf, ...]) -> mx.array:
    offsets = offsets_of(table)
    order = sorted(range(len(table)), key=offsets.__getitem__)
    parts = [
        memory.bits(mx.contiguous(arrays[index])).reshape(-1).view(mx.uint8)
        for index in order
        if table[index].nbytes
    ]
    return mx.concatenate(parts) if parts else mx.zeros((0,), mx.uint8)


def _digested(packs: Sequence[mx.array]) -> list[Payload]:
    mx.eval(packs)
    buffers = [memory.flat_buffer(pack) for pack in packs]
    digests = [0] * len(buffers)

    def digest(index: int) -> None:
        digests[index] = xxhash.xxh3_64_intdigest(buffers[index])

    tasks = [partial(digest, index) for index in range(len(buffers))]
    memory.run_all(tasks, sum(buffer.nbytes for buffer in buffers))
    return list(map(Payload, buffers, digests))


def _payload(data: memoryview) -> Payload:
    return Payload(data, xxhash.xxh3_64_intdigest(data))
