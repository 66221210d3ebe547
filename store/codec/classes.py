"""The table of cache classes: one row for every class that a conversation's state can hold.

Keyed by the class's full name, so that neither this module nor any data ever imports one.
What a row says is in `cacheclass`. A class outside the table is refused by name, at start-up.
"""

from __future__ import annotations

from typing import Any

from store.codec.cacheclass import CacheClass
from store.codec.header import CodecError
from store.codec.kv import QSA, KeyValue, MiniMaxM3, QSAQuantized, Quantized
from store.codec.recurrent import Z1T, Arrays, DeepseekV41, Pooling, Transient
from store.codec.windows import (
    BufferedRotating,
    Chunked,
    RingSliding,
    Rotating,
    Simple,
    StaticPrefix,
)

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
