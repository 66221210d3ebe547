"""Cache classes that grow by a row of keys and values per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from store.codec.cacheclass import CacheClass, Growing, Rows, State, array_in, int_in
from store.codec.header import CodecError


@dataclass(frozen=True)
class KeyValue(CacheClass):
    """keys, values (B, H, N, D) and an offset."""

    exact: bool = False

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        return (Growing("keys", 2, exact=self.exact), Growing("values", 2, exact=self.exact))

    def length(self, cache: Any) -> int | None:
        return None if cache.keys is None else int(cache.offset)

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        cache.keys, cache.values = rows["keys"], rows["values"]
        cache.offset = 0 if cache.keys is None else tokens


class Quantized(CacheClass):
    """keys, values: (packed uint32, scales, biases), each (B, H, N, ...)."""

    def config(self, cache: Any) -> State:
        return {"group_size": int(cache.group_size), "bits": int(cache.bits)}

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        return tuple(Growing(f"{part}.{i}", 2) for part in ("keys", "values") for i in range(3))

    def array(self, cache: Any, name: str) -> mx.array | None:
        part, _, index = name.partition(".")
        parts = getattr(cache, part)
        found: mx.array | None = None if parts is None else parts[int(index)]
        return found

    def length(self, cache: Any) -> int | None:
        return None if cache.keys is None else int(cache.offset)

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        for part in ("keys", "values"):
            arrays = tuple(rows[f"{part}.{i}"] for i in range(3))
            if len({array is None for array in arrays}) > 1:
                raise CodecError(f"quantised {part} are incomplete: recompute this state")
            setattr(cache, part, None if arrays[0] is None else arrays)
        cache.offset = 0 if cache.keys is None else tokens


class MiniMaxM3(CacheClass):
    """keys, values in an inner KVCache, and index_keys (B, H, N, D) of the sparse index."""

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        return (Growing("keys", 2), Growing("values", 2), Growing("index_keys", 2))

    def array(self, cache: Any, name: str) -> mx.array | None:
        owner = cache if name == "index_keys" else cache.kv_cache
        found: mx.array | None = getattr(owner, name)
        return found

    def length(self, cache: Any) -> int | None:
        if cache.kv_cache.keys is None:
            return None
        length = int(cache.kv_cache.offset)
        if cache.index_keys is not None and int(cache.index_offset) != length:
            raise CodecError(
                f"index keys stand at {int(cache.index_offset)}, keys and values at {length}"
            )
        return length

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        inner = cache.kv_cache
        inner.keys, inner.values = rows["keys"], rows["values"]
        inner.offset = 0 if inner.keys is None else tokens
        cache.index_keys = rows["index_keys"]
        cache.index_offset = 0 if cache.index_keys is None else tokens


class _Indexer:
    """What both QSA classes keep beside keys and values.

    index_keys (B, N, D) grow. The position ids (B, N) or (3, B, N) change rank when the first
    image arrives, and the block keys are dropped and rebuilt, so both count as state.
    """

    GROWING = Growing("index_keys", 1, exact=True)

    @staticmethod
    def state(cache: Any) -> State:
        ratio = cache.index_block_ratio
        return {
            "position_ids": cache.index_position_ids,
            "block_keys": cache.index_block_keys,
            "block_ratio": None if ratio is None else int(ratio),
        }

    @staticmethod
    def restore(cache: Any, rows: Rows, state: State) -> None:
        cache.index_keys = rows["index_keys"]
        cache.index_position_ids = array_in(state, "position_ids")
        cache.index_block_keys = array_in(state, "block_keys")
        ratio = state["block_ratio"]
        cache.index_block_ratio = None if ratio is None else int_in(state, "block_ratio", 1 << 20)


class QSA(KeyValue):
    """KeyValue with the QSA indexer's keys and positions."""

    free_axes = None

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        return (*super().rows(cache), _Indexer.GROWING)

    def state(self, cache: Any) -> State:
        return _Indexer.state(cache)

    def window(self, cache: Any) -> int | None:
        return None

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        super().restore(cache, rows, state, tokens)
        _Indexer.restore(cache, rows, state)


class QSAQuantized(Quantized):
    """Quantized with the QSA indexer's keys and positions, which stay float."""

    free_axes = None

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        return (*super().rows(cache), _Indexer.GROWING)

    def array(self, cache: Any, name: str) -> mx.array | None:
        if name != _Indexer.GROWING.name:
            return super().array(cache, name)
        found: mx.array | None = cache.index_keys
        return found

    def state(self, cache: Any) -> State:
        return _Indexer.state(cache)

    def window(self, cache: Any) -> int | None:
        return None

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        super().restore(cache, rows, state, tokens)
        _Indexer.restore(cache, rows, state)
