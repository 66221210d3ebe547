"""Where restored bytes come to lie: growing arrays, and the arrays of a snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import mlx.core as mx

from store.codec import memory
from store.codec.cacheclass import Growing, live
from store.codec.header import MAX_DEPTH, CodecError, Leaf, offsets_of
from store.codec.layout import Layout, Slot, Width
from store.codec.stored import Bringing, Stored

Key = tuple[tuple[int, ...], str]
"""A slot's path and the name of an array in it."""


class Reserve:
    """Memory taken before the first byte arrives, for every array whose size is known."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        """All rows of `capacity` tokens, and the state arrays of fixed shape."""
        rows: dict[Key, int] = {}
        held: dict[Key, int] = {}
        for slot in layout.slots if layout.measured else ():
            for row, width in zip(slot.rows, slot.widths, strict=True):
                if width is not None:
                    rows[slot.path, row.name] = width.nbytes(row.axis) * (capacity // row.ratio)
            if slot.kind.free_axes == ():
                for name, (dtype, shape) in slot.held.items():
                    held[slot.path, name] = Leaf(slot.path, name, dtype, shape).nbytes
        self._blocks = dict(zip(rows, memory.allocate(*rows.values()), strict=True))
        self._foreseen(held)

    def foresee(self, leaves: Sequence[Leaf]) -> None:
        """Take memory for those of a snapshot's arrays that there is none for, in one go."""
        sizes = {
            (leaf.path, leaf.name): leaf.nbytes
            for leaf in leaves
            if leaf.nbytes and (leaf.path, leaf.name) not in self._blocks
        }
        self._foreseen(sizes)

    def _foreseen(self, sizes: dict[Key, int]) -> None:
        # A state's arrays end together: the next forward leaves others in their place.
        blocks = memory.allocate_together(*sizes.values())
        self._blocks.update(zip(sizes, blocks, strict=True))

    def take(self, key: Key, nbytes: int) -> memory.Block:
        """The memory reserved for an array, or, where it was not foreseen, new memory."""
        block = self._blocks.pop(key, None)
        if block is not None and block.view.nbytes - memory.ALIGN < nbytes <= block.view.nbytes:
            return block
        (block,) = memory.allocate(nbytes)
        return block


class Target:
    """The memory of one growing array: room for `capacity` rows, filled from the front."""

    def __init__(
        self, row: Growing, width: Width, capacity: int, key: Key, reserve: Reserve
    ) -> None:
        self.row = row
        self.width = width
        self.capacity = capacity
        self.row_bytes = width.nbytes(row.axis)
        self.outer = math.prod(width.shape[: row.axis])
        self._memory, room = reserve.take(key, self.row_bytes * capacity)
        flat = room[: self.row_bytes * capacity]
        self._view: memory.Bytes | None = flat.reshape(self.outer, -1) if flat.size else None
        self._memory_view = flat.data

    def lanes(self) -> Iterator[tuple[memoryview, int]]:
        """The memory that rows go to, in the order of a payload's bytes: for each index before the
        token axis all of it, and the bytes that one row takes there."""
        width = self.row_bytes // self.outer
        room = self.capacity * width
        for at in range(0, self.outer * room, room):
            yield self._memory_view[at : at + room], width

    def array(self, rows: int) -> mx.array:
        """The finished array, unevaluated: the whole buffer, zeros behind its rows, or where
        exact its live rows."""
        if self._view is not None:
            # The memory may have been another conversation's.
            self._view[:, rows * (self.row_bytes // self.outer) :] = 0
        self._view = None
        self._memory_view = memoryview(b"")
        shape = list(self.width.shape)
        shape[self.row.axis] = self.capacity
        whole = memory.shaped(self._memory, self.width.dtype, shape)
        done = live(whole, rows, self.row.axis) if self.row.exact else whole
        assert done is not None
        return done


class StateArrays:
    """The arrays of a snapshot, copied into MLX memory on demand, each exactly once."""

    def __init__(self, snapshot: Stored, reserve: Reserve) -> None:
        reserve.foresee(snapshot.header.leaves)  # as much as lies before us, at most
        self._reserve = reserve
        self._leaves = snapshot.header.leaves
        self._offsets = offsets_of(self._leaves)
        self._piece = snapshot
        self._taken: set[int] = set()
        self._targets: list[tuple[int, memoryview]] = []
        self.made: list[mx.array] = []

    def decode(self, node: Any, slot: Slot, name: str, depth: int = 0) -> Any:
        """A state value from its encoding; `name` is the dotted name its array must bear."""
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if depth > MAX_DEPTH or not isinstance(node, list) or len(node) != 2:
            raise CodecError("the snapshot holds an unreadable value: recompute this state")
        kind, value = node
        if kind == "a":
            return self._array(value, slot, name)
        if kind in ("l", "t") and isinstance(value, list):
            members = [
                self.decode(member, slot, f"{name}.{index}", depth + 1)
                for index, member in enumerate(value)
            ]
            return members if kind == "l" else tuple(members)
        raise CodecError("the snapshot holds an unreadable value: recompute this state")

    def _array(self, index: Any, slot: Slot, name: str) -> mx.array:
        if type(index) is not int or not 0 <= index < len(self._leaves) or index in self._taken:
            raise CodecError("the snapshot points outside its leaf table: recompute this state")
        self._taken.add(index)
        leaf = self._leaves[index]
        if leaf.path != slot.path or leaf.name != name:
            raise CodecError(f"{where(leaf)} stands where {name} should: recompute this state")
        slot.check_state(leaf)
        if not leaf.nbytes:
            return mx.zeros(leaf.shape, memory.dtype_of(leaf.dtype))
        block = self._reserve.take((leaf.path, leaf.name), leaf.nbytes)
        self._targets.append((self._offsets[index], block.view[: leaf.nbytes].data))
        array = memory.shaped(block.array, leaf.dtype, leaf.shape)
        self.made.append(array)
        return array

    def bringing(self) -> Iterator[Bringing]:
        """What fills the arrays, in any threads, after all are known. Raises CodecError where one
        was left out."""
        if len(self._taken) != len(self._leaves):
            raise CodecError("the snapshot holds arrays of no cache: recompute this state")
        targets = sorted(self._targets, key=itemgetter(0))
        spread = self._piece.spread(target for _, target in targets)
        return (Bringing([pair]) for pair in spread)

    def close(self) -> None:
        """Check what was brought, and let go of the memory. Raises what the check raises."""
        self._piece.seal()
        self._targets = []


def where(leaf: Leaf) -> str:
    """A leaf's place, for messages."""
    return f"layer {'.'.join(map(str, leaf.path))} {leaf.name}"
