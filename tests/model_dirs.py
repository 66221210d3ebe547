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


def make_mtp_model(path: Path, *, seed: int = 8) -> Path:
    """Write the tiny glm5_next with its multi-token-prediction layer, as checkpoints have it."""
    import dataclasses

    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.speculative.drafters.glm5_next_mtp.config import Glm5NextMTPConfig
    from mlx_vlm.speculative.drafters.glm5_next_mtp.glm5_next_mtp import Glm5NextMTPDraftModel
    from tiny_models import TINY

    make_model_dir(path, "chatml")
    model = TINY["glm5_next"].build()
    head = Glm5NextMTPDraftModel(Glm5NextMTPConfig(text_config=model.args, block_size=3))
    weights = {f"language_model.{name}": leaf for name, leaf in tree_flatten(model.parameters())}
    layer = f"language_model.model.layers.{model.args.num_hidden_layers}."
    mx.random.seed(seed)
    for name, leaf in tree_flatten(head.parameters()):
        own = name.removeprefix("mtp_block.").replace("shared_head_norm", "shared_head.norm")
        made = 1 + mx.zeros(leaf.shape) if "norm" in name else 0.1 * mx.random.normal(leaf.shape)
        weights[layer + own] = made
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    file = path / "config.json"
    config = {
        **json.loads(file.read_text()),
        "model_type": "glm5_next",
        "text_config": {**dataclasses.asdict(model.args), "num_nextn_predict_layers": 1},
        "vocab_size": model.args.vocab_size,
        "quantization": {"group_size": 32, "bits": 4},
    }
    file.write_text(json.dumps(config))
    return path


IMAGE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_image_model(path: Path, *, seed: int = 5, context: int = 4096) -> Path:
    """Write a qwen2_vl of random weights: images are patches of 4 by 4, 2 by 2 of them a token."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.qwen2_vl import Model
    from mlx_vlm.models.qwen2_vl.config import ModelConfig, TextConfig, VisionConfig
    from transformers import AutoTokenizer

    make_model_dir(path, "chatml", context=context)
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = IMAGE_TEMPLATE
    tokenizer.save_pretrained(str(path))
    start, _, image, video = (tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    file = path / "config.json"
    vision = {
        "model_type": "qwen2_vl", "depth": 2, "num_heads": 4, "embed_dim": 64, "hidden_size": 64,
        "patch_size": 4, "spatial_patch_size": 4, "in_channels": 3, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }  # fmt: skip
    config = {
        **json.loads(file.read_text()),
        "model_type": "qwen2_vl",
        "vocab_size": len(tokenizer),
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_config": vision,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    file.write_text(json.dumps(config))
    sizes = {"shortest_edge": 64, "longest_edge": 4096}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096, "size": sizes,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    whole = ModelConfig.from_dict(config)
    whole.text_config = TextConfig.from_dict(config)
    whole.vision_config = VisionConfig.from_dict(vision)
    mx.random.seed(seed)
    weights = {
        name: 1 + mx.zeros(leaf.shape)
        if "norm" in name and name.endswith("weight")
        else 0.25 * mx.random.normal(leaf.shape)
        for name, leaf in tree_flatten(Model(whole).parameters())
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return path
