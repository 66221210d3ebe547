"""From pieces back to a cache list: rows as they arrive, the snapshot last.

Nothing is believed that was not checked: order and range, fingerprint, the chain of token
ids, the leaf table against the model's own classes and widths, the checksums. Memory is
allocated once, by MLX, for the capacity that the caller granted; rows are copied to their
place in it. Until `finish` returns, the cache list given is untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import mlx.core as mx

from store.codec import memory
from store.codec.cacheclass import Growing
from store.codec.header import (
    DTYPES,
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
from store.codec.stored import Bringing, Stored, bring
from store.codec.targets import Key, Reserve, StateArrays, Target, where
from store.codec.transient import NullKVCache

_TOGETHER = 8
"""Pieces a thread brings at a time: waiting for the interpreter's lock costs as much as one."""


class _Plan(NamedTuple):
    """A leaf table checked against the model: what goes where, and rows by tokens per row.

    `lanes` are the memory of all rows in a payload's order, each with the number in `rates` of its
    (tokens of a row, bytes of a row).
    """

    leaves: tuple[Leaf, ...]
    copies: list[tuple[Target, int]]
    rows: dict[int, int]
    lanes: list[tuple[memoryview, int]]
    rates: list[tuple[int, int]]


class _State(NamedTuple):
    """A snapshot's arrays, and for each slot its cache, the table of its rows and its values."""

    arrays: StateArrays
    slots: list[tuple[Slot, Any, list[Any], dict[str, Any]]]


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

        A measured layout's memory is taken here, before anything arrives. `max_bytes` bounds
        what rows may take in memory (default: what the layout says that `capacity` tokens need).
        Raises CodecError where the list is not this layout's or not fresh.
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
        self._matched = list(layout.match(caches))
        if any(slot.kind.length(cache) for slot, cache in self._matched):
            raise CodecError("state can be restored into a fresh cache list only")
        self._slots = {slot.path: slot for slot, _ in self._matched}
        self._known = layout.rows_bytes(0, capacity) if layout.measured else 0
        if max_bytes is None:
            max_bytes = self._known if layout.complete else MAX_PAYLOAD
        if self._known > max_bytes:
            raise CodecError(
                f"rows of {capacity} tokens need {self._known} bytes where {max_bytes} are granted"
            )
        self._room = max_bytes
        self._reserve = Reserve(layout, capacity)
        self._targets: dict[Key, Target] = {}
        self._plan: _Plan | None = None

    def add(self, piece: Piece) -> None:
        """Take the next rows, which begin at `position`. Raises CodecError; after that the
        importer takes nothing more."""
        self.add_all([piece])

    def add_all(self, pieces: Sequence[Piece]) -> None:
        """Take several pieces in order. As `add`."""
        self._draw(map(Stored.of, pieces), sum(piece.nbytes for piece in pieces))

    def draw(self, rows: Iterable[Stored]) -> None:
        """Take the next rows from where they are stored, in order, each drawn when a thread is free
        to bring it. Raises as `add`, and what bringing raises."""
        self._draw(rows, self._known)

    def _draw(self, rows: Iterable[Stored], nbytes: int) -> None:
        try:
            memory.Running(_together(map(self._bringing, rows)), self._threads(nbytes)).join()
        except BaseException as error:
            self._broken = self._broken or str(error) or repr(error)
            raise

    def finish(self, snapshot: Piece | Stored) -> Sequence[Any]:
        """Restore rows and snapshot into the cache list, and return it. Raises CodecError and
        leaves the list unfit for use where anything disagrees."""
        self._guard(snapshot.header, "snapshot")
        if isinstance(snapshot, Piece):
            snapshot = Stored.of(snapshot)
        return self._restore([], snapshot, memory.threads_for(snapshot.header.nbytes))

    def restore(self, rows: Iterable[Stored], snapshot: Stored) -> Sequence[Any]:
        """As `draw` and then `finish`, with all threads busy to the end. Raises as they do."""
        threads = self._threads(self._known + snapshot.header.nbytes)
        return self._restore(map(self._bringing, rows), snapshot, threads)

    def finish_rows(self, tokens: int) -> Sequence[Any]:
        """Restore the first `tokens` positions of the rows taken, where the model has nothing but
        rows (`Layout.rows_alone`). Raises CodecError where it has more, or rows are missing."""
        if self._broken is not None:
            raise CodecError(f"this import takes nothing more: {self._broken}")
        if not self._layout.rows_alone or not 0 < tokens <= self.position:
            raise CodecError(f"rows up to {self.position} do not make a state of {tokens} tokens")
        self._broken = "it is finished"
        restores = []
        for slot, cache in self._matched:
            rows = {}
            for row in slot.rows:
                target = self._targets.get((slot.path, row.name))
                rows[row.name] = None if target is None else target.array(tokens // row.ratio)
            restores.append((slot, cache, rows))
        mx.eval([rows for _, _, rows in restores])
        for slot, cache, rows in restores:
            slot.kind.restore(cache, rows, {}, tokens)
        drop_transient(self._layout, self._caches)
        return self._caches

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

    def _threads(self, nbytes: int) -> int:
        # Memory that was not foreseen must be taken by the calling thread, which then does all.
        return memory.threads_for(nbytes) if self._layout.complete else 1

    def _bringing(self, piece: Stored) -> Bringing:
        """Take the next rows; what is returned brings them."""
        header = piece.header
        try:
            self._guard(header, "rows")
            plan = self._planned(header)
        except CodecError as error:
            self._broken = self._broken or str(error)
            raise
        if not plan.lanes:
            self._lay(plan)
        start, stop = header.start, header.stop
        self.position, self.chain = stop, header.chain
        spans = [slice(start // n * width, stop // n * width) for n, width in plan.rates]
        into = [lane[spans[rate]] for lane, rate in plan.lanes]
        if len(piece.parts) == 1:
            return Bringing([(piece.parts[0], into)], piece.seal)
        return piece.bringing(into)

    @staticmethod
    def _lay(plan: _Plan) -> None:
        """Find the lanes of a plan."""
        for target, _ in sorted(plan.copies, key=itemgetter(1)):
            for lane, width in target.lanes():
                rate = (target.row.ratio, width)
                if rate not in plan.rates:
                    plan.rates.append(rate)
                plan.lanes.append((lane, plan.rates.index(rate)))

    def _planned(self, header: Header) -> _Plan:
        plan = self._plan
        # Blocks of one conversation share one leaf table, and headers share its object.
        if plan is None or plan.leaves is not header.leaves:
            plan = self._plan = self._checked(header)
        for ratio, rows in plan.rows.items():
            expected = header.stop // ratio - header.start // ratio
            # An array that completes no row in a block is left out of it.
            if rows != expected:
                raise CodecError(
                    f"{rows} rows for tokens [{header.start}, {header.stop}), expected {expected}: "
                    "recompute this state"
                )
        return plan

    def _checked(self, header: Header) -> _Plan:
        plan = _Plan(header.leaves, [], {}, [], [])
        for leaf, offset in zip(header.leaves, offsets_of(header.leaves), strict=True):
            row, width = self._row_of(leaf)
            rows = leaf.shape[row.axis]
            if not rows or plan.rows.setdefault(row.ratio, rows) != rows:
                raise CodecError(f"{where(leaf)} has {rows} rows, others differ: recompute")
            key = (leaf.path, leaf.name)
            if key not in self._targets:
                if header.start // row.ratio:
                    raise CodecError(f"{where(leaf)} misses its first rows: recompute this state")
                self._targets[key] = self._admitted(key, row, width)
            if leaf.nbytes:
                plan.copies.append((self._targets[key], offset))
        missing = self._targets.keys() - {(leaf.path, leaf.name) for leaf in header.leaves}
        for key in missing:
            ratio = self._targets[key].row.ratio
            if plan.rows.setdefault(ratio, 0):
                raise CodecError(f"{key[1]} had rows and has none any more: recompute this state")
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
                    f"{where(leaf)} is {width.dtype}{list(width.shape)}, this model's is "
                    f"{expected.dtype}{list(expected.shape)}: recompute this state"
                )
            return row, width
        raise CodecError(f"{where(leaf)} is no row of this model: recompute this state")

    def _admitted(self, key: Key, row: Growing, width: Width) -> Target:
        """A new target, its bytes taken from the memory granted."""
        capacity = self._capacity // row.ratio
        need = width.nbytes(row.axis) * capacity
        if need > self._room:
            raise CodecError(
                f"rows need {need} more bytes where {self._room} are left of the memory granted"
            )
        self._room -= need
        return Target(row, width, capacity, key, self._reserve)

    def _state_of(self, snapshot: Stored) -> _State:
        """The state's values, decoded and with memory of their own, not yet filled."""
        header = snapshot.header
        if header.kind != "snapshot" or header.fingerprint != self._layout.fingerprint:
            self._guard(header, "snapshot")
        if len(header.state) != len(self._slots):
            raise CodecError("the snapshot is of another cache list: recompute this state")
        arrays = StateArrays(snapshot, self._reserve)
        slots = [
            (slot, cache, *self._entry(slot, entry, arrays))
            for (slot, cache), entry in zip(self._matched, header.state, strict=True)
        ]
        return _State(arrays, slots)

    def _restore(self, tasks: Iterable[Bringing], snapshot: Stored, threads: int) -> Sequence[Any]:
        header = snapshot.header
        try:
            state = self._state_of(snapshot)
            memory.Running(_together(chain(tasks, state.arrays.bringing())), threads).join()
            self._guard(header, "snapshot")
        finally:
            self._broken = self._broken or "it is finished"
        state.arrays.close()
        restores = []
        for slot, cache, table, values in state.slots:
            told = zip(slot.rows, slot.widths, table, strict=True)
            rows = {row.name: self._finished(slot, row, known, one) for row, known, one in told}
            restores.append((slot, cache, rows, values))
        mx.eval([rows for _, _, rows, _ in restores], state.arrays.made)
        for slot, cache, rows, values in restores:
            try:
                slot.kind.restore(cache, rows, values, header.stop)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise CodecError(
                    f"layer {slot.path} cannot be restored ({error!r}): recompute this state"
                ) from None
        drop_transient(self._layout, self._caches)
        held = position(self._layout, self._caches)
        if held is not None and held != header.stop:
            raise CodecError(f"restored caches stand at {held}, not {header.stop}: recompute")
        return self._caches

    def _entry(
        self, slot: Slot, entry: Any, arrays: StateArrays
    ) -> tuple[list[Any], dict[str, Any]]:
        """What the snapshot tells of a slot's rows, and the values of its state."""
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
        state = {key: arrays.decode(node, slot, str(key)) for key, node in tree.items()}
        return table, state

    def _finished(
        self, slot: Slot, row: Growing, known: Width | None, told: Any
    ) -> mx.array | None:
        target = self._targets.get((slot.path, row.name))
        if told is None:
            if target is not None and self.position // row.ratio:
                raise CodecError(f"{row.name} has rows the snapshot knows nothing of: recompute")
            return None
        rows = self.position // row.ratio
        dtype, shape = told if isinstance(told, list) and len(told) == 2 else (None, [])
        if (
            not isinstance(dtype, str)
            or dtype not in DTYPES
            or not _is_shape(shape)
            or row.axis >= len(shape)
        ):
            raise CodecError(f"{row.name} has a malformed shape: recompute this state")
        if shape[row.axis] != rows or (target is None and rows):
            raise CodecError(f"{row.name} does not have its {rows} rows: recompute this state")
        width = Width(dtype, (*shape[: row.axis], 0, *shape[row.axis + 1 :]))
        if width != (target.width if target else known or width):
            raise CodecError(f"{row.name} is not of this model's width: recompute this state")
        return target.array(rows) if target else mx.zeros(shape, memory.dtype_of(width.dtype))


def _together(tasks: Iterable[Bringing]) -> Iterator[Callable[[], None]]:
    """What brings several at a time."""
    left = iter(tasks)
    while some := list(islice(left, _TOGETHER)):
        yield partial(bring, some)


def drop_transient(layout: Layout, caches: Sequence[Any]) -> None:
    """Leave out of a restored list what its model never reads again."""
    for slot in layout.slots:
        if not slot.transient:
            continue
        *above, last = slot.path
        owner: Any = caches
        for step in above:
            owner = owner[step]
        if isinstance(owner[last], NullKVCache):
            continue
        # By family a transient slot is the member of a CacheList, whose members are a tuple.
        owner.caches = (*owner.caches[:last], NullKVCache(), *owner.caches[last + 1 :])


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and all(type(size) is int and 0 <= size < MAX_TOKENS for size in shape)
        and math.prod(size or 1 for size in shape) <= MAX_PAYLOAD
    )
