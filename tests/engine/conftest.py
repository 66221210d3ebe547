"""Fixtures of the engine's tests: MLX made ready first, the default model, a small random one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.device import Device, prepare
from engine.library import DEFAULT_MODEL, resolve

if TYPE_CHECKING:
    from engine.model import Model

prepare()  # before any test module imports MLX


@pytest.fixture(scope="session")
def device() -> Device:
    return prepare()


@pytest.fixture(scope="session")
def default_path() -> Path:
    models = os.environ.get("TANDEM_MODELS") or str(Path.home() / ".cache" / "tandem" / "models")
    return resolve(DEFAULT_MODEL, Path(models))


@pytest.fixture(scope="session")
def default_model(default_path: Path, device: Device) -> Model:
    from engine.model import load

    return load(default_path, device)


@pytest.fixture(scope="session")
def tokenizer(default_path: Path) -> Any:
    from engine.text import load_tokenizer

    return load_tokenizer(default_path)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Model:
    """A llama of random weights, 512 words, 4,096 tokens of context; the same in every session."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.llama.config import ModelConfig
    from mlx_vlm.models.llama.language import LanguageModel

    from engine.model import Model

    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    lm = LanguageModel(ModelConfig.from_dict(config))
    mx.random.seed(3)
    lm.load_weights(
        [
            (k, 1 + mx.zeros(v.shape) if "norm" in k else 0.25 * mx.random.normal(v.shape))
            for k, v in tree_flatten(lm.parameters())
        ]
    )
    mx.eval(lm.parameters())
    return Model(
        tmp_path_factory.mktemp("small"), lm, config, device, fingerprint=b"small model 0001"
    )
