"""Cache classes of recurrent, pooled and compressed state."""

from __future__ import annotations

from typing import Any

from store.codec.cacheclass import (
    CacheClass,
    Growing,
    Rows,
    State,
    array_in,
    int_in,
    list_in,
    live,
    padded,
)
from store.codec.header import CodecError


class Arrays(CacheClass):
    """Recurrent and convolution state: a fixed number of slots, each an array or unset."""

    def config(self, cache: Any) -> State:
        return {"slots": len(cache.cache)}

    def state(self, cache: Any) -> State:
        if cache.is_speculating:
            raise CodecError("a speculative step is open: commit or abort it before packing")
        return {
            "slots": list(cache.cache),
            "left_padding": cache.left_padding,
            "lengths": cache.lengths,
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        cache.cache = list_in(state, "slots", len(cache.cache))
        cache.left_padding = array_in(state, "left_padding", 1)
        cache.lengths = array_in(state, "lengths", 1)


class Pooling(CacheClass):
    """pooled (B, N // ratio, D) grows a row per `ratio` tokens; the rest waits in two buffers."""

    free_axes = (1,)

    def config(self, cache: Any) -> State:
        return {"ratio": int(cache.ratio)}

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        return (Growing("pooled", 1, ratio=int(cache.ratio), exact=True),)

    def length(self, cache: Any) -> int | None:
        if cache.pooled is None and cache.buf_kv is None:
            return None
        pooled = 0 if cache.pooled is None else int(cache.pooled.shape[1])
        return pooled * int(cache.ratio) + int(cache.remainder)

    def state(self, cache: Any) -> State:
        if cache.is_speculating:
            raise CodecError("a speculative step is open: commit or abort it before packing")
        remainder = int(cache.remainder)
        return {
            "buf_kv": live(cache.buf_kv, remainder, axis=1),
            "buf_gate": live(cache.buf_gate, remainder, axis=1),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        ratio = int(cache.ratio)
        buffers = array_in(state, "buf_kv", 3), array_in(state, "buf_gate", 3)
        for buffer in buffers:
            if buffer is not None and buffer.shape[1] != tokens % ratio:
                raise CodecError("pool remainder disagrees with the position: recompute this state")
        cache.buf_kv, cache.buf_gate = (padded(buffer, ratio, axis=1) for buffer in buffers)
        cache.remainder = 0 if buffers[0] is None else tokens % ratio
        cache.pooled = rows["pooled"]


class DeepseekV41(CacheClass):
    """One object for all layers. How many tokens a compressed row covers is known to the
    model's layers only, not to the cache, so all of it is state."""

    free_axes = None

    LISTS = ("window", "compress", "keys", "kv_state", "score_state")
    SINGLES = ("engram", "index_k", "candidates", "compress_kv", "topk_idxs")

    def config(self, cache: Any) -> State:
        return {"layers": int(cache.n_layers)}

    def length(self, cache: Any) -> int | None:
        return int(cache.offset) or None

    def window(self, cache: Any) -> int | None:
        return None

    def state(self, cache: Any) -> State:
        return {
            **{name: list(getattr(cache, name)) for name in self.LISTS},
            **{name: getattr(cache, name) for name in self.SINGLES},
            "offset": int(cache.offset),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        for name in self.LISTS:
            setattr(cache, name, list_in(state, name, int(cache.n_layers)))
        for name in self.SINGLES:
            setattr(cache, name, array_in(state, name))
        cache._compress_buffers, cache._key_buffers = list(cache.compress), list(cache.keys)
        cache.offset = int_in(state, "offset", tokens)


class Z1T(CacheClass):
    """Running pool sums and the convolution window: four arrays and the offset."""

    NAMES = ("cum_eKV", "cum_eK", "win_eKV", "win_eK")

    def length(self, cache: Any) -> int | None:
        return int(cache.offset) or None

    def state(self, cache: Any) -> State:
        return {
            **{name: getattr(cache, name) for name in self.NAMES},
            "offset": int(cache.offset),
        }

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        for name in self.NAMES:
            setattr(cache, name, array_in(state, name))
        cache.offset = int_in(state, "offset", tokens)


class Transient(CacheClass):
    """What no later step reads: never moved, never stored."""
