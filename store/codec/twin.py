"""A second cache list of the same state that shares the first one's memory until either changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from store.codec.cacheclass import State, live
from store.codec.layout import Layout
from store.codec.unpack import drop_transient


def twin(layout: Layout, caches: Sequence[Any], fresh: Sequence[Any], tokens: int) -> Sequence[Any]:
    """Put the state of `caches`, which hold `tokens` tokens, into the list `fresh` as well.

    Nothing is copied now: arrays share their buffers, and MLX copies one when it is written to
    while another array refers to it. Raises CodecError where the lists are not this layout's.
    """
    return restore_kept(layout, caches, keep(layout, caches), fresh, tokens)


class Kept(NamedTuple):
    """What of a slot is overwritten, and the growing arrays that had no row at all."""

    state: State
    unset: frozenset[str]


def keep(layout: Layout, caches: Sequence[Any]) -> list[Kept]:
    """All that is overwritten in `caches`, by slot, sharing memory: their rows are not held."""
    return [
        Kept(
            _shared(slot.kind.state(cache)),
            frozenset(row.name for row in slot.rows if slot.kind.array(cache, row.name) is None),
        )
        for slot, cache in layout.match(caches)
    ]


def restore_kept(
    layout: Layout, rows_of: Sequence[Any], kept: list[Kept], fresh: Sequence[Any], tokens: int
) -> Sequence[Any]:
    """Put the state at `tokens`, of which `kept` was kept, into the list `fresh`.

    Its rows are the first of `rows_of`, a cache list that went on from it: rows only grow.
    """
    pairs = zip(layout.match(rows_of), layout.match(fresh), kept, strict=True)
    for (slot, source), (_, target), (state, unset) in pairs:
        rows: dict[str, mx.array | None] = {}
        for row in slot.rows:
            array = None if row.name in unset else slot.kind.array(source, row.name)
            if array is not None and row.exact:
                array = live(array, tokens // row.ratio, row.axis)
            rows[row.name] = None if array is None else _same(array)
        slot.kind.restore(target, rows, _shared(state), tokens)
    drop_transient(layout, fresh)
    return fresh


def kept_bytes(kept: list[Kept]) -> int:
    """Bytes of the arrays in what `keep` gave."""
    return sum(_nbytes(slot.state) for slot in kept)


def _same(array: mx.array) -> mx.array:
    """Another array object of the same memory: assigning to a part of one leaves the other."""
    return array.view(array.dtype)


def _shared(value: Any) -> Any:
    if isinstance(value, mx.array):
        return _same(value)
    if isinstance(value, dict):
        return {key: _shared(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_shared(member) for member in value]
    if isinstance(value, tuple):
        return tuple(_shared(member) for member in value)
    return value


def _nbytes(value: Any) -> int:
    if isinstance(value, mx.array):
        return int(value.nbytes)
    members = value.values() if isinstance(value, dict) else value
    return sum(map(_nbytes, members)) if isinstance(value, (dict, list, tuple)) else 0
