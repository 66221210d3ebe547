"""Cache trees of every class, filled through the library's own methods, from a plain recipe.

A recipe is JSON: a list of nodes, each None, {"list": [nodes], "as": "CacheList" | "tuple"} or
{"class": name, ...settings}. The same recipe builds the same empty tree in any process, and the
same lengths and seed fill it with the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx_vlm.models import cache as classes
from mlx_vlm.models.deepseek_v41.language import DeepseekV41Cache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache, QSAQuantizedKVCache
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache
from mlx_vlm.models.z1t.language import Z1TCache

from store.codec.transient import NullKVCache

Recipe = dict[str, Any]
FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Bits:
    """Random bits as arrays: every pattern, subnormals and NaNs included."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def __call__(self, shape: Sequence[int], dtype: str) -> mx.array:
        width = FLOATS[dtype]
        raw = self._generator.integers(0, 1 << (8 * width), tuple(shape), _RAW[width])
        return mx.array(raw).view(getattr(mx, dtype))

    def normal(self, shape: Sequence[int], dtype: str) -> mx.array:
        """Numbers, for what is quantised on the way in."""
        made = mx.array(self._generator.standard_normal(tuple(shape)).astype(np.float32))
        return made.astype(getattr(mx, dtype))


def fresh(node: Any) -> Any:
    """The empty cache or tree of a recipe."""
    if node is None:
        return None
    if isinstance(node, list):
        return [fresh(member) for member in node]
    if "list" in node:
        members = [fresh(member) for member in node["list"]]
        return tuple(members) if node["as"] == "tuple" else classes.CacheList(*members)
    return _MAKERS[node["class"]](node)


_MAKERS: dict[str, Callable[[Recipe], Any]] = {
    "KVCache": lambda node: classes.KVCache(),
    "HyV4KVCache": lambda node: HyV4KVCache(),
    "ConcatenateKVCache": lambda node: classes.ConcatenateKVCache(),
    "QuantizedKVCache": lambda node: classes.QuantizedKVCache(node["group"], node["bits"]),
    "RotatingKVCache": lambda node: classes.RotatingKVCache(node["window"], node["keep"]),
    "BufferedRotatingKVCache": lambda node: classes.BufferedRotatingKVCache(
        node["window"], node["keep"], node["buffer"]
    ),
    "ChunkedKVCache": lambda node: classes.ChunkedKVCache(node["window"]),
    "RingSlidingKVCache": lambda node: RingSlidingKVCache(node["window"]),
    "StaticPrefixKVCache": lambda node: classes.StaticPrefixKVCache(node["window"], 16),
    "SimpleKVCache": lambda node: classes.SimpleKVCache(),
    "ArraysCache": lambda node: classes.ArraysCache(len(node["slots"])),
    "PoolingCache": lambda node: classes.PoolingCache(node["ratio"]),
    "MiniMaxM3KVCache": lambda node: MiniMaxM3KVCache(),
    "DeepseekV41Cache": lambda node: DeepseekV41Cache(len(node["ratios"])),
    "Z1TCache": lambda node: Z1TCache(),
    "QSAKVCache": lambda node: QSAKVCache(),
    "QSAQuantizedKVCache": lambda node: QSAQuantizedKVCache(node["group"], node["bits"]),
    "NullKVCache": lambda node: NullKVCache(),
}


def fill(tree: Any, node: Any, lengths: Sequence[int], seed: int, start: int = 0) -> None:
    """Feed runs of `lengths` tokens, after `start` tokens already held, and evaluate."""
    for leaf, recipe in _pairs(tree, node):
        position = start
        bits = Bits(seed + 7919 * recipe.get("salt", 0) + start)
        for count in lengths:
            if not recipe.get("unset"):
                _feed(leaf, recipe, count, position, bits)
            position += count
    mx.eval([array for leaf, _ in _pairs(tree, node) for array in _arrays(vars(leaf))])


def _pairs(tree: Any, node: Any) -> Iterator[tuple[Any, Recipe]]:
    if node is None:
        return
    if isinstance(node, list):
        for member, recipe in zip(tree, node, strict=True):
            yield from _pairs(member, recipe)
    elif "list" in node:
        members = tree if isinstance(tree, tuple) else tree.caches
        for member, recipe in zip(members, node["list"], strict=True):
            yield from _pairs(member, recipe)
    else:
        yield tree, node


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _arrays(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _arrays(member)
    elif isinstance(value, classes.KVCache):
        yield from _arrays(vars(value))


def _feed(cache: Any, node: Recipe, count: int, position: int, bits: Bits) -> None:
    kind, dtype = node["class"], node.get("dtype", "float32")

    def heads(width: int, rows: int = count, *, number: bool = False) -> mx.array:
        shape = (1, node["heads"], rows, width)
        return bits.normal(shape, dtype) if number else bits(shape, dtype)

    if kind in ("KVCache", "HyV4KVCache", "ConcatenateKVCache", "StaticPrefixKVCache"):
        cache.update_and_fetch(heads(node["keys"]), heads(node["values"]))
    elif kind in ("RotatingKVCache", "BufferedRotatingKVCache", "RingSlidingKVCache"):
        # A ring takes a chunk or a token; what is longer than a token may exceed the window.
        cache.update_and_fetch(heads(node["keys"]), heads(node["values"]))
    elif kind == "ChunkedKVCache":
        cache.maybe_trim_front()
        cache.update_and_fetch(heads(node["keys"]), heads(node["values"]))
    elif kind == "QuantizedKVCache":
        cache.update_and_fetch(heads(node["keys"], number=True), heads(node["values"], number=True))
    elif kind == "SimpleKVCache":
        if node["cross"]:
            if position == 0:
                cache.update(heads(node["keys"], 5), heads(node["values"], 5))
        else:
            cache.update_and_fetch(heads(node["keys"]), heads(node["values"]))
    elif kind == "ArraysCache":
        for index, shape in enumerate(node["slots"]):
            cache[index] = None if shape is None else bits(shape, dtype)
        if node["padded"]:
            cache.left_padding = mx.array([3])
            cache.advance(count)
    elif kind == "PoolingCache":
        width = node["keys"]
        ready, _, _ = cache.accumulate_windows(
            bits((1, count, width), dtype), bits((1, count, width), dtype), position
        )
        cache.update_and_fetch(ready[:, :: node["ratio"]])
    elif kind == "MiniMaxM3KVCache":
        cache.update_and_fetch(heads(node["keys"]), heads(node["values"]))
        if node["indexed"]:
            cache.update_index_and_fetch(bits((1, 1, count, node["keys"]), dtype))
    elif kind == "DeepseekV41Cache":
        _feed_v41(cache, node, count, position, bits)
    elif kind == "Z1TCache":
        for name in ("cum_eKV", "cum_eK", "win_eKV", "win_eK"):
            setattr(cache, name, bits((1, 3, node["keys"]), dtype))
        cache.offset += count
    elif kind in ("QSAKVCache", "QSAQuantizedKVCache"):
        number = kind == "QSAQuantizedKVCache"
        cache.update_and_fetch(
            heads(node["keys"], number=number), heads(node["values"], number=number)
        )
        places = mx.arange(position, position + count)[None]
        if node["images"] and position:
            places = mx.broadcast_to(places[None], (3, 1, count))
        cache.update_indexer(bits((1, count, node["keys"]), dtype), places)
        if node["blocks"]:
            cache.index_block_keys = bits((1, 1 + position // 4, node["keys"]), dtype)
            cache.index_block_ratio = 4


def _feed_v41(cache: Any, node: Recipe, count: int, position: int, bits: Bits) -> None:
    width = node["keys"]
    for layer, ratio in enumerate(node["ratios"]):
        cache.window[layer] = bits((1, min(8, position + count), width), "bfloat16")
        if not ratio:
            continue
        rows = (position + count) // ratio - position // ratio
        if rows:
            cache.append_compressed(layer, bits((1, rows, width), "bfloat16"))
            cache.append_index_keys(layer, bits((1, rows, 4), "bfloat16"))
        cache.kv_state[layer] = bits((1, ratio, width), "float32")
    cache.index_k = cache.keys[-1]
    cache.topk_idxs = mx.arange(position, position + count)[None]
    cache.advance(count)


def told(tree: Any, node: Any) -> list[Any]:
    """What the library itself says each cache holds, live rows only, with digests of all bits."""
    return [[type(leaf).__name__, *_told(leaf)] for leaf, _ in _pairs(tree, node)]


def _told(cache: Any) -> list[Any]:
    if isinstance(cache, NullKVCache):
        return []
    if isinstance(cache, classes.ChunkedKVCache):
        # The class's own state is wrong once its front is trimmed.
        filled = cache.offset - cache.start_position
        state = [
            None if part is None else part[..., :filled, :] for part in (cache.keys, cache.values)
        ]
        return [_digest(state), [cache.chunk_size, cache.start_position, cache.offset]]
    if isinstance(cache, classes.RotatingKVCache) and cache.keys is not None and cache.keep:
        filled = min(cache.offset, cache.keys.shape[2])
        state = [part[..., :filled, :] for part in (cache.keys, cache.values)]
        return [_digest(state), list(cache.meta_state)]
    if isinstance(cache, classes.ArraysCache):
        return [_digest(list(cache.cache)), _digest([cache.left_padding, cache.lengths])]
    empty = isinstance(cache, classes.QuantizedKVCache) and cache.keys is None
    state = None if empty else cache.state
    meta = cache.meta_state
    return [_digest(state), list(meta) if isinstance(meta, (list, tuple)) else meta]


def _digest(value: Any) -> Any:
    if isinstance(value, mx.array):
        width = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[value.dtype.size]
        flat = mx.contiguous(value)
        data = b"" if flat.size == 0 else bytes(memoryview(flat.view(width)))
        return [str(value.dtype), list(value.shape), hashlib.blake2b(data).hexdigest()]
    if isinstance(value, (list, tuple)):
        return [_digest(member) for member in value]
    return value


_dtypes = st.sampled_from(sorted(FLOATS))
_salt = st.integers(0, 1 << 16)
_small = st.integers(1, 5)


def _node(name: str, **settings: st.SearchStrategy[Any]) -> st.SearchStrategy[Recipe]:
    common = {"class": st.just(name), "dtype": _dtypes, "salt": _salt}
    return st.fixed_dictionaries({**common, **settings})


_key_value = {"heads": st.integers(1, 3), "keys": _small, "values": st.integers(0, 5)}
_wide = {
    "heads": st.integers(1, 2),
    "keys": st.sampled_from([32, 64]),
    "values": st.sampled_from([32, 64]),
    "group": st.just(32),
    "bits": st.sampled_from([4, 8]),
}
_unset = {"unset": st.sampled_from([False, False, False, True])}
_window = {"window": st.integers(4, 40)}
_shapes = st.none() | st.lists(_small, min_size=1, max_size=3).map(lambda shape: [1, *shape])
_indexer = {"images": st.booleans(), "blocks": st.booleans()}

LEAVES: dict[str, st.SearchStrategy[Recipe]] = {
    "KVCache": _node("KVCache", **_key_value, **_unset),
    "HyV4KVCache": _node("HyV4KVCache", **_key_value),
    "ConcatenateKVCache": _node("ConcatenateKVCache", **_key_value, **_unset),
    "QuantizedKVCache": _node("QuantizedKVCache", **_wide, **_unset),
    "RotatingKVCache": _node(
        "RotatingKVCache", **_key_value, **_window, keep=st.integers(0, 3), **_unset
    ),
    "BufferedRotatingKVCache": _node(
        "BufferedRotatingKVCache",
        **_key_value,
        **_window,
        keep=st.sampled_from([0, 0, 2]),
        buffer=st.integers(0, 9),
        **_unset,
    ),
    "ChunkedKVCache": _node("ChunkedKVCache", **_key_value, **_window, **_unset),
    "RingSlidingKVCache": _node("RingSlidingKVCache", **_key_value, **_window, **_unset),
    "StaticPrefixKVCache": _node(
        "StaticPrefixKVCache", **_key_value, window=st.integers(1, 200), **_unset
    ),
    "SimpleKVCache": _node("SimpleKVCache", **_key_value, cross=st.booleans(), **_unset),
    "ArraysCache": _node(
        "ArraysCache",
        slots=st.lists(_shapes, min_size=1, max_size=4),
        padded=st.sampled_from([False, False, True]),
        **_unset,
    ),
    "PoolingCache": _node("PoolingCache", keys=_small, ratio=st.sampled_from([2, 4, 16]), **_unset),
    "MiniMaxM3KVCache": _node("MiniMaxM3KVCache", **_key_value, indexed=st.booleans(), **_unset),
    "DeepseekV41Cache": _node(
        "DeepseekV41Cache",
        keys=_small,
        ratios=st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=3),
        **_unset,
    ),
    "Z1TCache": _node("Z1TCache", keys=_small, **_unset),
    "QSAKVCache": _node("QSAKVCache", **_key_value, **_indexer, **_unset),
    "QSAQuantizedKVCache": _node("QSAQuantizedKVCache", **_wide, **_indexer, **_unset),
    "NullKVCache": _node("NullKVCache"),
}

_leaf = st.one_of(list(LEAVES.values()))
nodes = st.recursive(
    _leaf | st.none(),
    lambda inner: st.fixed_dictionaries(
        {
            "list": st.lists(inner, min_size=1, max_size=3),
            "as": st.sampled_from(["CacheList", "CacheList", "tuple"]),
        }
    ),
    max_leaves=5,
)
trees = st.lists(nodes, min_size=1, max_size=4).filter(lambda tree: bool(list(_recipes(tree))))
runs = st.lists(st.integers(1, 37) | st.just(1), min_size=1, max_size=7)


def _recipes(node: Any) -> Iterator[Recipe]:
    if isinstance(node, list):
        for member in node:
            yield from _recipes(member)
    elif node is not None and "list" in node:
        yield from _recipes(node["list"])
    elif node is not None:
        yield node
