"""The table of cache classes: what in each grows, what is overwritten, how it is put back.

One row for every cache class of mlx-vlm, keyed by the class's full name, so that neither
this module nor any data ever imports one. A row says, of one cache object:

- `rows`: the arrays that only grow along the token axis, and how many tokens a row covers;
- `state`: everything that is overwritten, live rows only, as arrays and plain scalars;
- `config`: what the constructor fixed, which must agree on both sides;
- `length`: how many tokens the object has seen, or None where it does not know;
- `restore`: how rows and state go into a fresh object of the same class.

Shapes: B batch (1 for a conversation), H heads, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from store.codec.header import CodecError

Rows = Mapping[str, "mx.array | None"]
State = dict[str, Any]


class Growing(NamedTuple):
    """An array that only grows: `axis` is its token axis, one row covers `ratio` tokens.

    `exact` arrays are taken whole by their class, so their buffer has no spare capacity.
    """

    name: str
    axis: int
    ratio: int = 1
    exact: bool = False


class CacheClass:
    """One row of the table. The default is a class with no rows and no state."""

    free_axes: ClassVar[tuple[int, ...] | None] = ()
    """Axes in which a state array may differ from the model's own; None: all of it may."""

    def config(self, cache: Any) -> State:
        """Settings that a fresh cache of the same model has too."""
        return {}

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        """The growing arrays, in a fixed order; depends on `config` alone."""
        return ()

    def array(self, cache: Any, name: str) -> mx.array | None:
        """The buffer of a growing array, with its slack, or None where it is unset."""
        found: mx.array | None = getattr(cache, name)
        return found

    def length(self, cache: Any) -> int | None:
        """Tokens seen, or None where the class does not count or is still unset."""
        return None

    def state(self, cache: Any) -> State:
        """Overwritten arrays (live rows only) and scalars, by name."""
        return {}

    def window(self, cache: Any) -> int | None:
        """Tokens after which `state` stops growing with the sequence; 0: it never grows."""
        return 0

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        """Put `tokens` tokens of rows and the state into the fresh `cache`."""


def live(array: mx.array | None, length: int, axis: int = 2) -> mx.array | None:
    """The first `length` rows of a buffer along `axis`."""
    if array is None or array.shape[axis] == length:
        return array
    return array[(slice(None),) * axis + (slice(length),)]


def padded(array: mx.array | None, length: int, axis: int) -> mx.array | None:
    """A buffer of `length` rows along `axis` that begins with `array`, zeros after."""
    if array is None or array.shape[axis] >= length:
        return array
    shape = list(array.shape)
    shape[axis] = length - shape[axis]
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=axis)


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


def array_in(state: State, name: str, ndim: int | None = None) -> mx.array | None:
    """The array `name` of a restored state, or None. Raises CodecError on anything else."""
    value = state[name]
    if value is not None and not isinstance(value, mx.array):
        raise CodecError(f"{name} is not an array: recompute this state")
    if value is not None and ndim is not None and value.ndim != ndim:
        raise CodecError(f"{name} has {value.ndim} axes, not {ndim}: recompute this state")
    return value


def int_in(state: State, name: str, most: int, *, exact: bool = False) -> int:
    """The integer `name` of a restored state, in [0, most] (or `most` itself)."""
    value = state[name]
    if type(value) is not int or not 0 <= value <= most or (exact and value != most):
        raise CodecError(f"{name} is {value!r}, out of range: recompute this state")
    return value


def list_in(state: State, name: str, size: int) -> list[Any]:
    """The list `name` of `size` restored values."""
    value = state[name]
    if not isinstance(value, list) or len(value) != size:
        raise CodecError(f"{name} is not a list of {size}: recompute this state")
    return list(value)


_CACHE = "mlx_vlm.models.cache."
_MODELS = "mlx_vlm.models."
CONTAINERS = frozenset({_CACHE + "CacheList"})
TRANSIENT = Transient()

TABLE: dict[str, CacheClass] = {
    _CACHE + "KVCache": KeyValue(),
    _CACHE + "ConcatenateKVCache": KeyValue(exact=True),
    _CACHE + "QuantizedKVCache": Quantized(),
    _CACHE + "RotatingKVCache": Rotating(),
    _CACHE + "BufferedRotatingKVCache": BufferedRotating(),
    _CACHE + "ChunkedKVCache": Chunked(),
    _CACHE + "ArraysCache": Arrays(),
    _CACHE + "PoolingCache": Pooling(),
    _CACHE + "SimpleKVCache": Simple(),
    _CACHE + "StaticPrefixKVCache": StaticPrefix(),
    _MODELS + "minimax_m3_vl.language.MiniMaxM3KVCache": MiniMaxM3(),
    _MODELS + "deepseek_v41.language.DeepseekV41Cache": DeepseekV41(),
    _MODELS + "z1t.language.Z1TCache": Z1T(),
    _MODELS + "qwen4_exp.language.QSAKVCache": QSA(),
    _MODELS + "qwen4_exp.language.QSAQuantizedKVCache": QSAQuantized(),
    _MODELS + "hy_v4.cache.HyV4KVCache": KeyValue(),
    _MODELS + "unlimited_ocr.language.RingSlidingKVCache": RingSliding(),
    "store.codec.transient.NullKVCache": TRANSIENT,
}
"""Every class that a conversation's state can be made of."""

_BATCH = "a batch of rows: extract the conversation's row first"
_TURBO = "its packed rows need codecs of its own: use uniform KV quantisation, or none"
_IMAGES = "it belongs to image or audio generation, not to a conversation"
REFUSED: dict[str, str] = {
    **{
        _CACHE + name: _BATCH
        for name in (
            "BatchKVCache",
            "BatchRotatingKVCache",
            "BatchQuantizedKVCache",
            "BatchPoolingCache",
        )
    },
    _MODELS + "minimax_m3_vl.language.MiniMaxM3BatchKVCache": _BATCH,
    _MODELS + "deepseek_v41.language.BatchDeepseekV41Cache": _BATCH,
    _MODELS + "qwen4_exp.language.BatchQSAKVCache": _BATCH,
    "mlx_vlm.turboquant.BatchTurboQuantKVCache": _BATCH,
    "mlx_vlm.turboquant.TurboQuantKVCache": _TURBO,
    "mlx_vlm.turboquant.HybridQuantKVCache": _TURBO,
    _MODELS + "flux2.transformer.kv_cache.Flux2KVCache": _IMAGES,
    _MODELS + "flux2.transformer.kv_cache.Flux2KVLayerCache": _IMAGES,
    _MODELS + "qwen_image.kv_cache.QwenImageKVCache": _IMAGES,
    _MODELS + "qwen_image.kv_cache.QwenImageKVLayerCache": _IMAGES,
    _MODELS + "minimax_h3.transformer.MiniMaxH3AdaLNCache": _IMAGES,
    _MODELS + "muse_spark.audio.AudioConvCache": _IMAGES,
}
"""Classes known and declined, each with what to do instead."""


def full_name(cache: Any) -> str:
    """Module and name of an object's class, the key of the table."""
    kind = type(cache)
    return f"{kind.__module__}.{kind.__qualname__}"


def row_for(name: str) -> CacheClass:
    """The table's row of a class. Raises CodecError naming the class where there is none."""
    found = TABLE.get(name)
    if found is not None:
        return found
    if name in REFUSED:
        raise CodecError(f"cache class {name} cannot be stored: {REFUSED[name]}")
    raise CodecError(f"cache class {name} is not in the codec's table: its state would be lost")


def is_transient(model_type: str, path: tuple[int, ...], siblings: int) -> bool:
    """Whether the slot at `path`, one of `siblings` in its container, is never read again.

    glm5_next ends each sparse layer's list with the projected keys and values of the prefill
    (65,536 bytes a token and layer): decode never reads them, and prefill projects them anew
    from the latent rows where they are missing.
    """
    return model_type.startswith("glm5_next") and len(path) == 2 and path[-1] == siblings - 1
