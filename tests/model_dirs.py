"""A model directory that loads within a second: random weights, a small real tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "scheduler"))
from api_kit import make_model_dir


def make_tiny_model(
    path: Path, *, seed: int = 5, family: str = "chatml", context: int = 4096, **tokens: Any
) -> Path:
    """Write a llama of four layers with a context of `context` tokens; returns `path`.

    `tokens`: what the tokenizer is made of (see `make_model_dir`).
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.llama.config import ModelConfig
    from mlx_vlm.models.llama.language import LanguageModel

    make_model_dir(path, family, context=context, **tokens)
    file = path / "config.json"
    config = {
        **json.loads(file.read_text()),
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    file.write_text(json.dumps(config))
    mx.random.seed(seed)
    weights = {
        name: 1 + mx.zeros(leaf.shape) if "norm" in name else 0.3 * mx.random.normal(leaf.shape)
        for name, leaf in tree_flatten(LanguageModel(ModelConfig.from_dict(config)).parameters())
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return path
