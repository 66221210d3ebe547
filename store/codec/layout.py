"""The shape of one model's state: its cache slots, what a token costs, where blocks end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import mlx.core as mx

from store.codec.cacheclass import CacheClass, Growing, State
from store.codec.classes import (
    CONTAINERS,
    TRANSIENT,
    full_name,
    is_transient,
    row_for,
)
from store.codec.header import DTYPES, LAYOUT_VERSION, MAX_DEPTH, MAX_LEAVES, CodecError, Leaf

VALUE_BYTES = 1_048_512
"""Payload of one value of the store: 64 pages of 16 KiB less LMDB's and our own header."""
HEADER_RESERVE = 96
"""Bytes of a block's header beside its leaf table, rounded up."""
_GRAIN = 16
_NO_FINGERPRINT = b"\0" * 16


class Width(NamedTuple):
    """What one row of a growing array is: its dtype, and the shape with 0 for the row axis."""

    dtype: str
    shape: tuple[int, ...]

    def nbytes(self, axis: int) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[:axis] + self.shape[axis + 1 :]) * DTYPES[self.dtype]


@dataclass(frozen=True)
class Slot:
    """One cache object of the list: where it hangs, its class, and what that class stores."""

    path: tuple[int, ...]
    name: str
    kind: CacheClass
    rows: tuple[Growing, ...]
    config: State
    widths: tuple[Width | None, ...]
    held: dict[str, tuple[str, tuple[int, ...]]]
    window: int | None
    plain: bool = False
    """Whether the class has no state beside its rows."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state when the layout was built."""
        return sum(math.prod(shape) * DTYPES[dtype] for dtype, shape in self.held.values())

    def check_state(self, leaf: Leaf) -> None:
        """Hold a state array to what this model had of the same name. Raises CodecError."""
        if leaf.name not in self.held or self.kind.free_axes is None:
            return
        dtype, shape = self.held[leaf.name]
        free = self.kind.free_axes
        if (
            leaf.dtype != dtype
            or len(leaf.shape) != len(shape)
            or any(
                one != other
                for axis, (one, other) in enumerate(zip(leaf.shape, shape, strict=True))
                if axis not in free
            )
        ):
            raise CodecError(
                f"layer {'.'.join(map(str, self.path))} {leaf.name} is {leaf.dtype}"
                f"{list(leaf.shape)}, this model's is {dtype}{list(shape)}: recompute this state"
            )

    @property
    def transient(self) -> bool:
        return self.kind is TRANSIENT


def children(cache: Any) -> Sequence[Any] | None:
    """The members of a container of caches, or None for a cache itself."""
    if isinstance(cache, (list, tuple)):
        return cache
    if full_name(cache) in CONTAINERS:
        members: Sequence[Any] = cache.caches
        return members
    return None


def walk(
    caches: Any, path: tuple[int, ...] = (), siblings: int = 1
) -> Iterator[tuple[tuple[int, ...], int, Any]]:
    """All cache objects with their paths, depth first; None stands for a layer without one."""
    members = children(caches)
    if members is None:
        yield path, siblings, caches
        return
    if len(path) >= MAX_DEPTH:
        raise CodecError(f"cache lists are nested deeper than {MAX_DEPTH} at {path}")
    for index, member in enumerate(members):
        yield from walk(member, (*path, index), len(members))


def dtype_name(array: mx.array) -> str:
    """The name of an array's dtype, such as "bfloat16"."""
    return str(array.dtype).removeprefix("mlx.core.")


@dataclass(frozen=True)
class Layout:
    """The slots of one model's cache list. `of` builds it and refuses what it does not know.

    Built from a fresh list it knows classes and settings; built from a list that has seen at
    least `unit` tokens it also knows every width, and then holds each piece to them.
    """

    model_type: str
    fingerprint: bytes
    slots: tuple[Slot, ...]
    tokens: int
    value_bytes: int = VALUE_BYTES

    @classmethod
    def of(
        cls,
        caches: Sequence[Any],
        model_type: str,
        fingerprint: bytes = _NO_FINGERPRINT,
        *,
        tokens: int | None = None,
        value_bytes: int = VALUE_BYTES,
    ) -> Layout:
        """The layout of a cache list whose blocks are to fill values of `value_bytes`.

        `tokens` is what the list has seen, where none of its caches counts them itself.
        Raises CodecError naming a class that is not supported.
        """
        slots = []
        for path, siblings, cache in walk(list(caches)):
            if cache is None:
                continue
            name = full_name(cache)
            if is_transient(model_type, path, siblings):
                slots.append(Slot(path, name, TRANSIENT, (), {}, (), {}, 0))
                continue
            try:
                kind = row_for(name)
                slots.append(_slot(path, name, kind, cache))
            except CodecError as error:
                raise CodecError(f"layer {'.'.join(map(str, path))}: {error}") from None
        if not slots or len(slots) > MAX_LEAVES:
            raise CodecError(f"a cache list of {len(slots)} caches cannot be stored")
        layout = cls(model_type, fingerprint, tuple(slots), 0)
        seen = position(layout, caches)
        seen = (tokens or 0) if seen is None else seen
        return cls(model_type, fingerprint, tuple(slots), seen, value_bytes)

    @property
    def unit(self) -> int:
        """The grain of blocks: the least common multiple of 16 and every pool ratio, in tokens.

        A list that has seen this many tokens has every growing array set.
        """
        return math.lcm(_GRAIN, *(row.ratio for slot in self.slots for row in slot.rows))

    @property
    def rows_alone(self) -> bool:
        """Whether the state is rows and nothing else, so that it can be cut anywhere."""
        return all(slot.transient or (slot.rows and slot.plain) for slot in self.slots)

    @property
    def measured(self) -> bool:
        """Whether widths are known. An array still unset after `unit` tokens counts as none."""
        return self.complete or self.tokens >= self.unit

    @property
    def complete(self) -> bool:
        """Whether every growing array was set in the list that the layout was built from."""
        return all(width is not None for slot in self.slots for width in slot.widths)

    def rows_bytes(self, start: int, stop: int) -> int:
        """Bytes of the rows of tokens [start, stop). Raises CodecError when unmeasured."""
        if not self.measured:
            raise CodecError(
                f"row widths are unknown: build the layout from a list that saw {self.unit} tokens"
            )
        return sum(
            width.nbytes(row.axis) * (stop // row.ratio - start // row.ratio)
            for slot in self.slots
            for row, width in zip(slot.rows, slot.widths, strict=True)
            if width is not None
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of rows a token adds, on average over a block, rounded up."""
        return math.ceil(Fraction(self.rows_bytes(0, self.unit), self.unit))

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: as many units as fill one value of the store, at least one.

        Where nothing grows by the token a block is 1,024 units of nothing but token ids.
        """
        unit = self.unit
        table = sum(40 + len(row.name) for slot in self.slots for row in slot.rows)
        room = self.value_bytes - HEADER_RESERVE - table
        per_unit = self.rows_bytes(0, unit)
        return unit * (max(1, room // per_unit) if per_unit else 64)

    def snapshot_bytes(self, caches: Sequence[Any]) -> int:
        """Bytes of everything overwritten in `caches` as it stands, live rows only."""
        return sum(
            array.nbytes
            for slot, cache in self.match(caches)
            for _, array in arrays_of(slot.kind.state(cache))
        )

    def state_bytes(self, tokens: int) -> int:
        """Bytes of a whole state of `tokens` tokens: rows exactly, overwritten state estimated.

        For GLM-5.3-Flash: 147,619,840 + 11 (1,025 + 256/k) n, k the index pool; the tokens of
        a pool that is not full yet come on top. State that follows the sequence (rings,
        windows) is scaled from the list the layout was built from.
        """
        return self.rows_bytes(0, tokens) + sum(
            _scaled(slot, self.tokens, tokens) for slot in self.slots
        )

    def match(self, caches: Sequence[Any]) -> Iterator[tuple[Slot, Any]]:
        """The slots with the objects of a cache list of the same model, transient ones left out.

        Raises CodecError where class, settings or structure differ.
        """
        found = {path: cache for path, _, cache in walk(list(caches)) if cache is not None}
        if found.keys() != {slot.path for slot in self.slots}:
            raise CodecError(
                "the cache list is built otherwise than this model's: reload the model"
            )
        for slot in self.slots:
            if slot.transient:
                continue
            cache = found[slot.path]
            where = f"layer {'.'.join(map(str, slot.path))}"
            if full_name(cache) != slot.name:
                raise CodecError(
                    f"{where} is a {full_name(cache)}, expected {slot.name}: "
                    "build the cache list with the same settings"
                )
            if slot.kind.config(cache) != slot.config:
                raise CodecError(
                    f"{where} has settings {slot.kind.config(cache)}, expected {slot.config}: "
                    "build the cache list with the same settings"
                )
            yield slot, cache

    def describe(self) -> dict[str, Any]:
        """The layout in plain values, for reports: classes, bytes per token, block size."""
        counts: dict[str, int] = {}
        for slot in self.slots:
            short = slot.name.rpartition(".")[2] + (" (transient)" if slot.transient else "")
            counts[short] = counts.get(short, 0) + 1
        facts: dict[str, Any] = {
            "model_type": self.model_type,
            "layout_version": LAYOUT_VERSION,
            "caches": counts,
            "unit": self.unit,
        }
        if self.measured:
            facts["row_bytes"] = self.row_bytes
            facts["block_tokens"] = self.block_tokens
            facts["fixed_bytes"] = self.state_bytes(0)
            facts["dtypes"] = sorted(
                {width.dtype for slot in self.slots for width in slot.widths if width is not None}
            )
        return facts


def position(layout: Layout, caches: Sequence[Any]) -> int | None:
    """The number of tokens every cache of the list has seen; None where none of them counts.

    Raises CodecError when they differ: such a state belongs to no token list.
    """
    seen: dict[int, str] = {}
    for slot, cache in layout.match(caches):
        length = slot.kind.length(cache)
        if length is not None:
            seen.setdefault(length, ".".join(map(str, slot.path)))
    if len(seen) > 1:
        told = ", ".join(f"layer {where} at {length}" for length, where in sorted(seen.items()))
        raise CodecError(f"cache positions disagree ({told}): discard this state")
    return next(iter(seen), None)


def arrays_of(value: Any, name: str = "") -> Iterator[tuple[str, mx.array]]:
    """The arrays inside a state value with dotted names, depth first in a fixed order."""
    if isinstance(value, mx.array):
        yield name, value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from arrays_of(member, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield from arrays_of(member, f"{name}.{index}")


def _slot(path: tuple[int, ...], name: str, kind: CacheClass, cache: Any) -> Slot:
    rows = kind.rows(cache)
    widths = tuple(_width(kind.array(cache, row.name), row.axis) for row in rows)
    held = {
        part: (dtype_name(array), tuple(array.shape))
        for part, array in arrays_of(kind.state(cache))
    }
    return Slot(
        path, name, kind, rows, kind.config(cache), widths, held, kind.window(cache),
        plain=not kind.state(cache),
    )  # fmt: skip


def _width(array: mx.array | None, axis: int) -> Width | None:
    if array is None:
        return None
    shape = list(array.shape)
    shape[axis] = 0
    return Width(dtype_name(array), tuple(shape))


def _scaled(slot: Slot, probed: int, tokens: int) -> int:
    if slot.window is not None and slot.window == 0:
        # State of a fixed shape; what has a free axis is the rest of a pool not yet full.
        return 0 if slot.kind.free_axes else slot.state_bytes
    if not probed:
        return slot.state_bytes
    limit = tokens if slot.window is None else min(tokens, slot.window)
    seen = probed if slot.window is None else min(probed, slot.window)
    return math.ceil(Fraction(slot.state_bytes * limit, max(1, seen)))
