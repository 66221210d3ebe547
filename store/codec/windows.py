"""Cache classes that overwrite keys and values, or hold them in a fixed room."""

from __future__ import annotations

from typing import Any

from store.codec.cacheclass import CacheClass, Rows, State, array_in, int_in, live, padded
from store.codec.header import CodecError


class Rotating(CacheClass):
    """A ring: keys, values (B, H, <= window + chunk, D), raw order, offset and write index."""

    free_axes = (2,)

    def config(self, cache: Any) -> State:
        return {"max_size": int(cache.max_size), "keep": int(cache.keep)}

    def length(self, cache: Any) -> int | None:
        return None if cache.keys is None else int(cache.offset)

    def window(self, cache: Any) -> int | None:
        return int(cache.max_size)

    def _filled(self, cache: Any) -> int:
        # Before the ring wraps the rows past the offset are slack, or another branch's.
        size, offset = int(cache.keys.shape[2]), int(cache.offset)
        return offset if offset < size and cache._idx <= offset else size

    def state(self, cache: Any) -> State:
        if cache.keys is None:
            return {"keys": None, "values": None, "offset": int(cache.offset), "index": 0}
        filled = self._filled(cache)
        return {
            "keys": live(cache.keys, filled),
            "values": live(cache.values, filled),
            "offset": int(cache.offset),
            "index": int(cache._idx),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        keys, values = array_in(state, "keys", 4), array_in(state, "values", 4)
        size = 0 if keys is None else keys.shape[2]
        cache.offset = int_in(state, "offset", tokens, exact=keys is not None)
        cache._idx = int_in(state, "index", size)
        cache.keys, cache.values = keys, values


class BufferedRotating(Rotating):
    """A window in temporal order with slack for rollback; a ring only where `keep` is set."""

    def config(self, cache: Any) -> State:
        return {**super().config(cache), "buffer_size": int(cache.buffer_size)}

    def window(self, cache: Any) -> int | None:
        return int(cache.max_size) + int(cache.buffer_size)

    def _filled(self, cache: Any) -> int:
        return super()._filled(cache) if cache.keep else int(cache._idx)

    def state(self, cache: Any) -> State:
        return {**super().state(cache), "start": int(cache.start_position)}

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        super().restore(cache, rows, state, tokens)
        cache.start_position = int_in(state, "start", tokens)


class Chunked(CacheClass):
    """keys, values (B, H, N, D) of the current attention chunk, its start and the offset."""

    free_axes = (2,)

    def config(self, cache: Any) -> State:
        return {"chunk_size": int(cache.chunk_size)}

    def length(self, cache: Any) -> int | None:
        return None if cache.keys is None else int(cache.offset)

    def window(self, cache: Any) -> int | None:
        return int(cache.chunk_size)

    def state(self, cache: Any) -> State:
        filled = int(cache.offset) - int(cache.start_position)
        return {
            "keys": live(cache.keys, filled),
            "values": live(cache.values, filled),
            "offset": int(cache.offset),
            "start": int(cache.start_position),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        keys, values = array_in(state, "keys", 4), array_in(state, "values", 4)
        offset = int_in(state, "offset", tokens, exact=keys is not None)
        start = int_in(state, "start", offset)
        if keys is not None and keys.shape[2] != offset - start:
            raise CodecError("attention chunk holds other rows than it says: recompute this state")
        cache.keys, cache.values = keys, values
        cache.offset, cache.start_position = offset, start


class RingSliding(CacheClass):
    """The prompt's keys, values (B, H, N, D), then a ring over the generated tokens."""

    free_axes = (2,)

    def config(self, cache: Any) -> State:
        return {"window_size": int(cache.window_size)}

    def length(self, cache: Any) -> int | None:
        return None if cache.keys is None else int(cache.offset)

    def window(self, cache: Any) -> int | None:
        return None

    def state(self, cache: Any) -> State:
        offset, prefill = int(cache.offset), cache.prefill_length
        filled = offset if prefill is None else min(offset, int(prefill) + int(cache.window_size))
        return {
            "keys": live(cache.keys, filled),
            "values": live(cache.values, filled),
            "offset": offset,
            "prefill": None if prefill is None else int(prefill),
            "ring": int(cache._ring_pos),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        keys, values = array_in(state, "keys", 4), array_in(state, "values", 4)
        cache.keys, cache.values = keys, values
        cache.offset = int_in(state, "offset", tokens, exact=keys is not None)
        prefill = state["prefill"]
        cache.prefill_length = None if prefill is None else int_in(state, "prefill", tokens)
        cache._ring_pos = int_in(state, "ring", int(cache.window_size))


class StaticPrefix(CacheClass):
    """keys, values (B, H, capacity, D) of fixed capacity, populated up to the offset."""

    free_axes = (2,)

    def config(self, cache: Any) -> State:
        return {"step": int(cache.step)}

    def length(self, cache: Any) -> int | None:
        return None if cache.keys is None else int(cache.offset)

    def window(self, cache: Any) -> int | None:
        return None

    def state(self, cache: Any) -> State:
        offset = int(cache.offset)
        return {
            "keys": live(cache.keys, offset),
            "values": live(cache.values, offset),
            "offset": offset,
            "capacity": int(cache.max_size),
            "read_only": bool(cache.read_only),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        offset = int_in(state, "offset", tokens)
        # The class grows its capacity by whole steps; anything larger is not its own doing.
        most = max(int(cache.max_size), offset + int(cache.step))
        capacity = int_in(state, "capacity", most)
        cache.keys = padded(array_in(state, "keys", 4), capacity, axis=2)
        cache.values = padded(array_in(state, "values", 4), capacity, axis=2)
        cache.offset, cache.max_size = offset, capacity
        cache.read_only = bool(state["read_only"])


class Simple(CacheClass):
    """keys, values (B, H, N, D) of an encoder-decoder: one slot follows the tokens, another
    holds the encoder's output, and the class does not say which, so both are state."""

    free_axes = (2,)

    def window(self, cache: Any) -> int | None:
        return None

    def state(self, cache: Any) -> State:
        return {
            "keys": cache.keys,
            "values": cache.values,
            "length": int(cache.cache_length),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        cache.keys, cache.values = array_in(state, "keys", 4), array_in(state, "values", 4)
        cache.cache_length = int_in(state, "length", 1 << 31)
