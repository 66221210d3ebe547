"""The logits of a fixed prompt, small enough to compare between two machines.

Chips of different generations round differently, and so do builds: their logits for the same
tokens differ a little. How much is told, because it bounds how equal a recomputed state can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from engine.model import Model

TOKENS = 16
KEPT = 32


def sample(model: Model) -> dict[str, Any]:
    """Ids and logits (float32) of the KEPT best next tokens after a fixed prompt of TOKENS ids.

    The prompt is 7, 18, 29, ... modulo the vocabulary: ids that every model has. One forward.
    """
    ids = [(7 + 11 * i) % model.vocab_size for i in range(TOKENS)]
    caches = model.fresh_cache()
    logits = model.forward(mx.array([ids]), caches, [0])[0, -1].astype(mx.float32)
    best = mx.argsort(-logits)[:KEPT]
    kept: Any = logits[best].tolist()
    ids_kept: Any = best.tolist()
    return {
        "ids": [int(value) for value in ids_kept],
        "logits": [round(float(value), 6) for value in kept],
        "device": model.device.name,
    }
