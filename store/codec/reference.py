"""GLM-5.3-Flash's cache list without its weights: the yardstick of sizes and rates.

The list comes from the real class and the real configuration; the model's parameters are
described but never evaluated. It is filled the way the model fills it, through the cache
classes' own update methods. Imports mlx-vlm, so only benches and tests load this module.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

MODEL_TYPE = "glm5_next"
FIXED_BYTES = 147_619_840
"""34 layers of recurrent state (64, 128, 128) float32 and convolution window (3, 24576) bf16."""


def law(tokens: int, pool: int) -> int:
    """Bytes of a state of `tokens` tokens with index pool `pool`, without the open pool's rest."""
    return FIXED_BYTES + 11 * (1025 * tokens + 256 * (tokens // pool))


def fresh(pool: int) -> list[Any]:
    """The empty cache list of the real configuration with index pool `pool`."""
    from mlx_vlm.models.glm5_next import LanguageModel, TextConfig

    made: list[Any] = LanguageModel(TextConfig(index_kpool=pool)).make_cache()
    return made


def fill(caches: list[Any], tokens: int, chunk: int = 2048, seed: int = 1) -> None:
    """Run `tokens` tokens of random bits through `caches`, the projected slot left empty."""
    bits = np.random.default_rng(seed)

    def noise(*shape: int) -> mx.array:
        raw = bits.integers(0, 1 << 16, shape, np.uint16)
        # Keep the exponent's top bit clear: random bits, but neither infinite nor NaN.
        return mx.array(raw & 0xBFFF).view(mx.bfloat16)

    for cache in caches:
        if hasattr(cache, "cache"):
            cache[0] = noise(1, 3, 3 * 64 * 128)
            cache[1] = noise(1, 64, 128, 2 * 128).view(mx.float32)
            mx.eval(cache.state)
            continue
        latent, valid, pooling, _ = cache.caches
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            latent.update_and_fetch(
                noise(1, 1, count, 512), mx.zeros((1, 1, count, 0), mx.bfloat16)
            )
            valid.update_and_fetch(
                mx.ones((1, 1, count, 1), mx.bool_), mx.zeros((1, 1, count, 0), mx.bool_)
            )
            ready, _, _ = pooling.accumulate_windows(
                noise(1, count, 128), noise(1, count, 128), start
            )
            rows = ready.shape[1] // pooling.ratio
            pooling.update_and_fetch(ready[:, : rows * pooling.ratio : pooling.ratio])
            mx.eval(latent.state, valid.state, [a for a in pooling.state if a is not None])
