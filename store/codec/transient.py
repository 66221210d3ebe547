"""The stand-in for a cache slot whose contents are neither moved nor kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from store.codec.header import CodecError


class NullKVCache:
    """Takes the place of a transient KV cache and never holds anything.

    Its size is -1, which no position equals, so a model that reuses the slot only when its
    size matches (glm5_next's projected keys and values) computes afresh instead. It answers
    the whole batching protocol, because rows that carry it are merged, filtered and extracted.
    """

    keys = None
    values = None
    offset = 0
    nbytes = 0
    meta_state = ""

    def size(self) -> int:
        return -1

    def empty(self) -> bool:
        return True

    @property
    def state(self) -> tuple[()]:
        return ()

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        if value:
            raise CodecError("a transient cache slot takes no state")

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        raise CodecError("a transient cache slot was written: the model reads it after all")

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        return count

    def is_single_row(self) -> bool:
        return True

    @classmethod
    def merge(cls, caches: Sequence[Any], prefix_lens: Sequence[int] | None = None) -> Self:
        return cls()

    def prefix_cache_merge(self, rows: Sequence[Any], prefix_lens: Sequence[int]) -> Self:
        return type(self)()

    def extract(self, index: int) -> Self:
        return type(self)()

    def filter(self, batch_indices: Any) -> None:
        return None

    def extend(self, other: Any) -> None:
        return None

    def prepare(self, **lengths: Any) -> None:
        return None

    def finalize(self) -> None:
        return None
