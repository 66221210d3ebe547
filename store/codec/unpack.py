"""From pieces back to a cache list: rows as they arrive, the snapshot last.

Nothing is believed that was not checked: order and range, fingerprint, the chain of token
ids, the leaf table against the model's own classes and widths, the checksums. Memory is
allocated once, by MLX, for the capacity that the caller granted; rows are copied to their
place in it. Until `finish` returns, the cache list given is untouched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from store.codec import memory
from store.codec.classes import Growing, live
from store.codec.header import (
    DTYPES,
    MAX_DEPTH,
    MAX_PAYLOAD,
    MAX_TOKENS,
    CodecError,
    Header,
    Leaf,
    Piece,
    offsets_of,
    root,
)
from store.codec.layout import Layout, Slot, Width, position
from store.codec.transient import NullKVCache


class _Target:
    """The memory of one growing array: `capacity` rows, of which `filled` are there."""

    def __init__(self, row: Growing, width: Width, capacity: int) -> None:
        self.row = row
        self.width = width
        self.capacity = capacity
        self.filled = 0
        self.row_bytes = width.nbytes(row.axis)
        self.memory = memory.allocate(self.row_bytes * capacity)
        self._outer = math.prod(width.shape[: row.axis])
        self._view: memory.Bytes | None = memory.view(self.memory)
        self._flat: memoryview | None = memory.flat_buffer(self.memory)

    def put(self, payload: memoryview, offset: int, rows: int) -> None:
        """Copy `rows` rows that lie at `offset` of a payload behind those already here."""
        nbytes = rows * self.row_bytes
        if nbytes and self._outer == 1:
            # The common case, and called for every array of every block.
            assert self._flat is not None
            at = self.filled * self.row_bytes
            self._flat[at : at + nbytes] = payload[offset : offset + nbytes]
        elif nbytes:
            inner, width = nbytes // self._outer, self.row_bytes // self._outer
            target = np.ndarray(
                (self._outer, inner),
                np.uint8,
                self._view,
                self.filled * width,
                (self.capacity * width, 1),
            )
            np.copyto(target, np.ndarray((self._outer, inner), np.uint8, payload, offset))
        self.filled += rows

    def array(self) -> mx.array:
        """The finished array, unevaluated: the whole buffer, or its live rows where exact."""
        self._view = self._flat = None
        shape = list(self.width.shape)
        shape[self.row.axis] = self.capacity
        whole = memory.shaped(self.memory, self.width.dtype, shape)
        done = live(whole, self.filled, self.row.axis) if self.row.exact else whole
        assert done is not None
        return done


class Importer:
    """Builds one conversation's state into a fresh cache list, piece by piece."""

    def __init__(
        self,
        layout: Layout,
        caches: Sequence[Any],
        fingerprint: bytes,
        capacity: int,
        *,
        seed: bytes | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """`caches` is a fresh list of this model, `capacity` the tokens to make room for.

        `max_bytes` bounds what rows may take in memory (default: what the layout says that
        `capacity` tokens need). Raises CodecError where the list is not this layout's or not
        fresh.
        """
        if not 0 <= capacity <= MAX_TOKENS:
            raise CodecError(f"a capacity of {capacity} tokens is out of range")
        if fingerprint != layout.fingerprint:
            raise CodecError("the layout belongs to another model than the state: reload the model")
        self.position = 0
        self.chain = root(fingerprint) if seed is None else seed
        self._layout = layout
        self._caches = caches
        self._capacity = capacity
        self._broken: str | None = None
        self._slots: dict[tuple[int, ...], Slot] = {}
        for slot, cache in layout.match(caches):
            if slot.kind.length(cache):
                raise CodecError("state can be restored into a fresh cache list only")
            self._slots[slot.path] = slot
        if max_bytes is None:
            max_bytes = layout.rows_bytes(0, capacity) if layout.measured else MAX_PAYLOAD
        self._room = max_bytes
        self._targets: dict[tuple[tuple[int, ...], str], _Target] = {}
        self._checked: tuple[tuple[Leaf, ...], list[tuple[_Target, int, int]]] | None = None

    def add(self, piece: Piece) -> None:
        """Take the next rows, which begin at `position`. Raises CodecError; after that the
        importer takes nothing more."""
        self._guard(piece.header, "rows")
        try:
            self._add(piece)
        except CodecError as error:
            self._broken = str(error)
            raise

    def finish(self, snapshot: Piece) -> Sequence[Any]:
        """Restore rows and snapshot into the cache list, and return it. Raises CodecError and
        leaves the list unfit for use where anything disagrees."""
        self._guard(snapshot.header, "snapshot")
        self._broken = "it is finished"
        return self._finish(snapshot)

    def _guard(self, header: Header, kind: str) -> None:
        if self._broken is not None:
            raise CodecError(f"this import takes nothing more: {self._broken}")
        if header.kind != kind:
            raise CodecError(f"expected {kind} at position {self.position}, got {header.kind}")
        if header.fingerprint != self._layout.fingerprint:
            raise CodecError("the state was computed by another model: recompute it")
        if header.start != self.position:
            raise CodecError(
                f"expected {kind} from position {self.position}, got {header.start}: "
                "pieces must come in order"
            )
        if header.parent != self.chain:
            raise CodecError(
                f"the state at position {self.position} continues other token ids: recompute it"
            )
        if header.stop > self._capacity:
            raise CodecError(
                f"{header.stop} tokens do not fit the {self._capacity} that were granted"
            )

    def _add(self, piece: Piece) -> None:
        header = piece.header
        piece.verify()
        for target, offset, rows in self._plan(header):
            target.put(piece.payload, offset, rows)
        self.position = header.stop
        self.chain = header.chain

    def _plan(self, header: Header) -> list[tuple[_Target, int, int]]:
        """For each leaf its target, its offset and its rows; checks the whole leaf table."""
        if self._checked is None or self._checked[0] is not header.leaves:
            self._checked = (header.leaves, self._checked_leaves(header))
        plan = self._checked[1]
        for target, _, rows in plan:
            row = target.row
            expected = header.stop // row.ratio - header.start // row.ratio
            if rows != expected or target.filled != header.start // row.ratio:
                raise CodecError(
                    f"{row.name} has {rows} rows for tokens [{header.start}, {header.stop}) after "
                    f"{target.filled}, expected {expected}: recompute this state"
                )
        return plan

    def _checked_leaves(self, header: Header) -> list[tuple[_Target, int, int]]:
        plan = []
        for leaf, offset in zip(header.leaves, offsets_of(header.leaves), strict=True):
            row, width = self._row_of(leaf)
            key = (leaf.path, leaf.name)
            target = self._targets.get(key)
            if target is None:
                target = self._targets[key] = self._allocate(row, width)
            plan.append((target, offset, leaf.shape[row.axis]))
        if len(plan) != len(self._targets):
            raise CodecError("an array that had rows has none any more: recompute this state")
        return plan

    def _row_of(self, leaf: Leaf) -> tuple[Growing, Width]:
        slot = self._slots.get(leaf.path)
        for row, known in zip(slot.rows, slot.widths, strict=True) if slot else ():
            if row.name != leaf.name:
                continue
            if row.axis >= len(leaf.shape):
                break
            shape = list(leaf.shape)
            shape[row.axis] = 0
            width = Width(leaf.dtype, tuple(shape))
            target = self._targets.get((leaf.path, leaf.name))
            expected = known or (target.width if target else width)
            if width != expected:
                raise CodecError(
                    f"{_where(leaf)} is {width.dtype}{list(width.shape)}, this model's is "
                    f"{expected.dtype}{list(expected.shape)}: recompute this state"
                )
            return row, width
        raise CodecError(f"{_where(leaf)} is no row of this model: recompute this state")

    def _allocate(self, row: Growing, width: Width) -> _Target:
        capacity = self._capacity // row.ratio
        need = width.nbytes(row.axis) * capacity
        if need > self._room:
            raise CodecError(
                f"rows need {need} more bytes where {self._room} are left of the memory granted"
            )
        self._room -= need
        return _Target(row, width, capacity)

    def _finish(self, snapshot: Piece) -> Sequence[Any]:
        header = snapshot.header
        snapshot.verify()
        entries = header.state
        if len(entries) != len(self._slots):
            raise CodecError("the snapshot is of another cache list: recompute this state")
        arrays = _Arrays(snapshot)
        restores = []
        for (slot, cache), entry in zip(self._layout.match(self._caches), entries, strict=True):
            rows, state = self._entry(slot, entry, arrays)
            restores.append((slot, cache, rows, state))
        arrays.close()
        mx.eval([rows for _, _, rows, _ in restores], arrays.made)
        for slot, cache, rows, state in restores:
            try:
                slot.kind.restore(cache, rows, state, header.stop)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise CodecError(
                    f"layer {slot.path} cannot be restored ({error!r}): recompute this state"
                ) from None
        _drop_transient(self._layout, self._caches)
        held = position(self._layout, self._caches)
        if held is not None and held != header.stop:
            raise CodecError(f"restored caches stand at {held}, not {header.stop}: recompute")
        return self._caches

    def _entry(
        self, slot: Slot, entry: Any, arrays: _Arrays
    ) -> tuple[dict[str, mx.array | None], dict[str, Any]]:
        where = f"layer {'.'.join(map(str, slot.path))}"
        if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[4], dict):
            raise CodecError(f"{where} of the snapshot is malformed: recompute this state")
        path, name, config, table, tree = entry
        if path != list(slot.path) or name != slot.name or config != slot.config:
            raise CodecError(
                f"{where} was a {name} with {config}, this model's is a {slot.name} with "
                f"{slot.config}: recompute this state"
            )
        if not isinstance(table, list) or len(table) != len(slot.rows):
            raise CodecError(f"{where} has other rows than this model's: recompute this state")
        rows = {
            row.name: self._finished(slot, row, known, told)
            for row, known, told in zip(slot.rows, slot.widths, table, strict=True)
        }
        state = {}
        for key, node in tree.items():
            state[key] = arrays.decode(node, slot, str(key))
        return rows, state

    def _finished(
        self, slot: Slot, row: Growing, known: Width | None, told: Any
    ) -> mx.array | None:
        target = self._targets.get((slot.path, row.name))
        if told is None:
            if target is not None and target.filled:
                raise CodecError(f"{row.name} has rows the snapshot knows nothing of: recompute")
            return None
        rows = self.position // row.ratio
        dtype, shape = told if isinstance(told, list) and len(told) == 2 else (None, [])
        if dtype not in DTYPES or not _is_shape(shape) or row.axis >= len(shape):
            raise CodecError(f"{row.name} has a malformed shape: recompute this state")
        if shape[row.axis] != rows or (target.filled if target else 0) != rows:
            raise CodecError(
                f"{row.name} has {target.filled if target else 0} of {rows} rows: "
                "recompute this state"
            )
        width = Width(dtype, (*shape[: row.axis], 0, *shape[row.axis + 1 :]))
        if width != (target.width if target else known or width):
            raise CodecError(f"{row.name} is not of this model's width: recompute this state")
        return target.array() if target else mx.zeros(shape, memory.dtype_of(width.dtype))


class _Arrays:
    """The arrays of a snapshot, copied into MLX memory on demand, each exactly once."""

    def __init__(self, snapshot: Piece) -> None:
        self._leaves = snapshot.header.leaves
        self._offsets = offsets_of(self._leaves)
        self._payload = snapshot.payload
        self._taken: set[int] = set()
        self._copies: list[Any] = []
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
            raise CodecError(f"{_where(leaf)} stands where {name} should: recompute this state")
        slot.check_state(leaf)
        if leaf.nbytes:
            room = memory.allocate(leaf.nbytes)
            target = memory.view(room)[: leaf.nbytes]
            origin = np.frombuffer(self._payload, np.uint8, leaf.nbytes, self._offsets[index])
            self._copies.append(partial(np.copyto, target, origin))
            array = memory.shaped(room, leaf.dtype, leaf.shape)
        else:
            array = mx.zeros(leaf.shape, memory.dtype_of(leaf.dtype))
        self.made.append(array)
        return array

    def close(self) -> None:
        """Copy, after all arrays are known. Raises CodecError where one was left out."""
        if len(self._taken) != len(self._leaves):
            raise CodecError("the snapshot holds arrays of no cache: recompute this state")
        memory.run_all(self._copies, self._payload.nbytes)
        self._copies = []


def _drop_transient(layout: Layout, caches: Sequence[Any]) -> None:
    for slot in layout.slots:
        if not slot.transient:
            continue
        *above, last = slot.path
        owner: Any = caches
        for step in above:
            owner = owner[step]
        members = list(owner.caches)
        members[last] = NullKVCache()
        owner.caches = tuple(members)


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and all(type(size) is int and 0 <= size < MAX_TOKENS for size in shape)
        and math.prod(size or 1 for size in shape) <= MAX_PAYLOAD
    )


def _where(leaf: Leaf) -> str:
    return f"layer {'.'.join(map(str, leaf.path))} {leaf.name}"
