"""Several rows' caches as one: rows join, leave and come out exactly as they went in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import mlx.core as mx
from mlx_vlm.apc_adapters import merge_cache_entries

if TYPE_CHECKING:
    from engine.model import Caches


class NotMergeableError(Exception):
    """A cache class has no batched form; the message names it."""


class Holder(Protocol):
    """A row: `caches` is None while they are part of the merged ones, `ids` are what they hold."""

    caches: Caches | None
    ids: list[int]


R = TypeVar("R", bound=Holder)


def merge(rows: Sequence[Caches], lengths: Sequence[int]) -> Caches:
    """One cache list over all `rows`, which hold `lengths` tokens; raises `NotMergeableError`."""
    merged: Caches = []
    for entries in zip(*rows, strict=True):
        try:
            entry = merge_cache_entries(list(entries), list(lengths))
        except (TypeError, AttributeError, NotImplementedError, ValueError) as error:
            raise NotMergeableError(
                f"{type(entries[0]).__name__} cannot be batched: {error}"
            ) from error
        if entry is None or not all(
            callable(getattr(entry, name, None)) for name in ("extend", "filter", "extract")
        ):
            raise NotMergeableError(f"{type(entries[0]).__name__} cannot be batched")
        merged.append(entry)
    return merged


class Merged(Generic[R]):
    """Rows whose caches are merged; the order of `rows` is the order in the batch dimension."""

    def __init__(self) -> None:
        self.caches: Caches | None = None
        self.rows: list[R] = []
        self._leaving: set[int] = set()

    def arrange(self, wanted: Sequence[R]) -> None:
        """Make the merged rows those of `wanted`, with as little copying as that takes.

        Rows that are not wanted come out into their own caches. Fewer than two rows are no batch:
        everything comes out. Raises `NotMergeableError` before anything has changed.
        """
        keep = {id(row) for row in wanted}
        if len(wanted) < 2:
            keep = set()
        entering = [row for row in wanted if row.caches is not None] if keep else []
        joined = None
        if entering:
            own = [row.caches for row in entering if row.caches is not None]
            joined = merge(own, [len(row.ids) for row in entering])
        for row in self.rows:
            if id(row) not in keep:
                self.release(row)
        self.compact()
        if joined is None:
            return
        if self.caches is None:
            self.caches = joined
        else:
            for entry, other in zip(self.caches, joined, strict=True):
                entry.extend(other)
        mx.eval([cache.state for cache in self.caches])
        for row in entering:
            row.caches = None
        self.rows += entering

    def release(self, row: R) -> None:
        """Give `row` its own caches back if it is part of this; `compact` must follow."""
        if row.caches is not None or self.caches is None:
            return
        index = next(i for i, other in enumerate(self.rows) if other is row)
        row.caches = [entry.extract(index) for entry in self.caches]
        mx.eval([cache.state for cache in row.caches])
        self._leaving.add(index)

    def compact(self) -> None:
        """Drop the rows that have been released."""
        if not self._leaving:
            return
        kept = [i for i in range(len(self.rows)) if i not in self._leaving]
        self.rows = [self.rows[i] for i in kept]
        self._leaving = set()
        if not kept:
            self.caches = None
            return
        index: Any = mx.array(kept, dtype=mx.int32)
        assert self.caches is not None
        for entry in self.caches:
            entry.filter(index)
        mx.eval([cache.state for cache in self.caches])

    def clear(self) -> None:
        """Forget everything, for instance after a failed computation."""
        self.caches, self.rows, self._leaving = None, [], set()
