"""Defects of the pinned mlx-vlm that make a model's results depend on what ran before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def apply(model_type: str) -> None:
    """Correct what is known to be wrong in the code of `model_type`, for the whole process."""
    if model_type.startswith("hy_v4"):
        from mlx_vlm.models.hy_v4 import indexer

        indexer._partition_scores = _partition_scores


def _partition_scores(top_k: int, masked: bool) -> Callable[..., mx.array]:
    """hy_v4's choice of keys, not compiled.

    mlx-vlm 0.7.10 compiles it without shapes, which fixes the `kth` of `argpartition` to the number
    of keys of the first call in the process: every later length selects other keys than the best.
    """

    def partition(q: mx.array, k: mx.array, weights: mx.array, mask: Any = None) -> mx.array:
        scores = mx.maximum(q @ k.swapaxes(-1, -2), 0)
        scores = scores * weights.swapaxes(-1, -2)[..., None]
        scores = scores.sum(axis=1, keepdims=True)
        if masked:
            scores = mx.where(mask, scores, -float("inf"))
        return mx.argpartition(scores, kth=-top_k, axis=-1)

    return partition
