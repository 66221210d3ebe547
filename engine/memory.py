"""What a forward may need, estimated before it is started, against what the device has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.model import Model

# Head widths for which Metal has an attention kernel that never forms the score matrix.
FUSED_HEADS = (64, 80, 128)
# Below this a chunk is not halved any further: the forward would be mostly overhead.
LEAST_CHUNK = 64
# Hidden-width arrays that are alive at once inside a layer (input, normalised, q, k, v, output,
# residual and one to spare), and MLP-width ones (gate, up, product).
HIDDEN_ARRAYS = 8
MLP_ARRAYS = 3
SCORE_ARRAYS = 3  # scores, mask applied, softmax


def chunk_bytes(model: Model, chunk: int, position: int) -> int:
    """An upper estimate of what a forward of `chunk` tokens at `position` needs for a while.

    Activations of one layer: chunk x (8 hidden + 3 MLP width) x item size, and, where attention is
    not fused, 3 score matrices of heads x chunk x keys in float32. A sparse attention reads at most
    its `index_topk` keys per query. Excludes weights and the state itself.
    """
    config = {**model.config, **(model.config.get("text_config") or {})}

    def number(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return 0

    hidden = number("hidden_size", "d_model")
    heads = number("num_attention_heads", "num_heads") or 1
    experts = number("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
    mlp = max(
        number("intermediate_size_mlp", "intermediate_size", "dense_intermediate_size"),
        experts * number("moe_intermediate_size", "intermediate_size"),
        4 * hidden if not number("intermediate_size") else 0,
    )
    item = 4 if model.device.dtype == "float32" else 2
    width = max(hidden, heads * number("head_dim", "v_head_dim"))
    activations = chunk * (HIDDEN_ARRAYS * width + MLP_ARRAYS * mlp) * item
    head = number("head_dim") or (hidden // heads)
    scores = 0
    if not (model.device.kind == "metal" and head in FUSED_HEADS):
        keys = position + chunk
        if number("index_topk"):
            keys = min(keys, number("index_topk") + chunk)
        scores = SCORE_ARRAYS * heads * chunk * keys * 4
    return activations + scores


def growth_bytes(model: Model, chunk: int, position: int) -> int:
    """What the state itself needs more for `chunk` tokens at `position`.

    Buffers grow in steps of 256 rows and by copying, so that for a moment one layer's rows exist
    twice; twice the new rows plus an eighth of the old ones covers models of eight layers or more.
    """
    rows = model.layout.row_bytes
    return 2 * max(chunk, 256) * rows + position * rows // 8


def active() -> int:
    """Bytes MLX holds for arrays at this moment."""
    return int(mx.get_active_memory())


def fit_chunk(model: Model, chunk: int, position: int) -> int:
    """The largest of chunk, chunk / 2, ... whose forward fits beside what is in memory now.

    Raises `ModelError` when not even 64 tokens fit.
    """
    left = model.device.working_set_bytes - active()
    size = chunk
    while True:
        need = chunk_bytes(model, size, position) + growth_bytes(model, size, position)
        if need <= left:
            return size
        if size // 2 < LEAST_CHUNK:
            raise ModelError(
                f"a prefill chunk of {size} tokens at token {position} needs about "
                f"{need / 1e9:.1f} GB and {max(left, 0) / 1e9:.1f} GB are left; end other "
                "conversations or use a smaller model"
            )
        size //= 2


def fits(model: Model, tokens: int) -> dict[str, Any]:
    """Whether weights, one state of `tokens` tokens and its last, smallest chunk fit the device.

    Returns the parts in bytes and `fits`.
    """
    parts = {
        "weights": model.nbytes,
        "state": model.layout.state_bytes(tokens),
        "chunk": chunk_bytes(model, LEAST_CHUNK, max(tokens - LEAST_CHUNK, 0)),
    }
    left = model.device.working_set_bytes - sum(parts.values())
    return {**parts, "working_set": model.device.working_set_bytes, "fits": left >= 0}
