"""Tiny models of mlx-vlm's own classes with random weights, small enough for any machine.

Every entry of `TINY` is one architecture, or one architecture with a cache list of its own, and
together they fill every cache class that the state format knows. The same name and seed give the
same weights in every process. Weights are quantised to 4 bit where a mixture of experts needs it
(MLX's CPU backend multiplies unquantised experts in float32 only); activations are bfloat16.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_vlm.models import cache as classes

VOCAB = 512
WINDOW = 48

_PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 32,
}
_MLA = {
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
}
_DELTA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_DSA = {
    **_MLA,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "index_head_dim": 64,
    "index_n_heads": 2,
    "index_topk": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "attention_bias": False,
}


@dataclass(frozen=True)
class Tiny:
    """One entry: how to build the language model, its cache list, and one forward."""

    name: str
    make: Callable[[], Any]
    caches: Callable[[Any], list[Any]] | None = None
    bits: int | None = 4
    forward: Callable[[Any, mx.array, list[Any]], mx.array] | None = None

    def build(self, seed: int = 0) -> Any:
        """The language model with random weights, evaluated."""
        model = _randomised(self.make(), seed)
        return _quantised(model, self.bits) if self.bits else model

    def fresh_cache(self, model: Any) -> list[Any]:
        """An empty cache list, as the model or this entry makes it."""
        if self.caches is not None:
            return self.caches(model)
        made: list[Any] = classes.make_prompt_cache(model)
        return made

    def step(self, model: Any, ids: Sequence[int], caches: list[Any]) -> mx.array:
        """Feed `ids`; the logits of the last of them, (1, vocab), caches evaluated."""
        tokens = mx.array([list(ids)])
        if self.forward is not None:
            logits = self.forward(model, tokens, caches)
        else:
            logits = model(tokens, cache=caches).logits
        last = logits[:, -1]
        mx.eval(last, [cache.state for cache in caches if cache is not None])
        return last


def _language(package: str, config: dict[str, Any], name: str = "ModelConfig") -> Any:
    language = importlib.import_module(f"mlx_vlm.models.{package}.language")
    configs = importlib.import_module(f"mlx_vlm.models.{package}.config")
    return language.LanguageModel(getattr(configs, name).from_dict(dict(config)))


def _randomised(model: Any, seed: int, scale: float = 0.12) -> Any:
    """Random weights, norms near one; bfloat16 where the model does not insist on float32."""
    mx.random.seed(seed)
    try:
        castable = getattr(model, "cast_predicate", None) or (lambda _: True)
    except TypeError:  # glm_moe_dsa of mlx-vlm 0.7.10 raises in the property itself
        castable = lambda _: True  # noqa: E731
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
            weights.append((name, value))
            continue
        noise = mx.random.normal(value.shape)
        if "norm" in name and name.endswith("weight"):
            made = 1 + 0.1 * noise
        elif "embed" in name or name == "shared.weight":
            made = noise
        elif name.endswith("lm_head.weight"):
            made = 0.3 * noise
        else:
            made = scale * noise
        weights.append((name, made.astype(mx.bfloat16 if castable(name) else value.dtype)))
    model.load_weights(weights, strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def _quantised(model: Any, bits: int, group: int = 32) -> Any:
    wanted = getattr(model, "quant_predicate", None)

    def choose(path: str, module: Any) -> Any:
        weight = getattr(module, "weight", None)
        if not hasattr(module, "to_quantized") or weight is None or weight.shape[-1] % group:
            return False
        return wanted(path, module) if wanted is not None else True

    nn.quantize(model, group_size=group, bits=bits, class_predicate=choose)
    mx.eval(model.parameters())
    return model


def _glm5_next(pool: int = 4) -> Any:
    from mlx_vlm.models import glm5_next

    config = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
        "index_topk": 32,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "linear_head_dim": 32,
        "linear_num_heads": 2,
        "index_kpool": pool,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "eos_token_id": [1],
    }
    return glm5_next.LanguageModel(glm5_next.TextConfig(**config))


def _llama() -> Any:
    return _language("llama", {**_PLAIN, "model_type": "llama", "tie_word_embeddings": False})


def _qwen3() -> Any:
    return _language(
        "qwen3",
        {
            **_PLAIN,
            "model_type": "qwen3",
            "max_position_embeddings": 4096,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
    )


def _gemma3() -> Any:
    return _language(
        "gemma3",
        {
            **_PLAIN,
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 32,
        },
        "TextConfig",
    )


def _gpt_oss() -> Any:
    return _language(
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW,
        },
    )


def _minimax_m3() -> Any:
    sparse = {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_index_dim": 32,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 4,
        "sparse_block_size": 16,
        "sparse_local_block": 1,
        "sparse_init_block": 0,
    }
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "dense_intermediate_size": 128,
        "shared_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": sparse,
    }
    return _language("minimax_m3_vl", config, "TextConfig")


def _kimi_linear() -> Any:
    linear = {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    }
    config = {
        **{name: value for name, value in _MLA.items() if name != "q_lora_rank"},
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "head_dim": 32,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": linear,
        "model_max_length": 4096,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
    }
    return _language("kimi_linear", config)


def _qwen3_next() -> Any:
    return _language(
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
    )


def _mrope_owner(model_type: str) -> SimpleNamespace:
    return SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=2),
        image_token_id=510,
        video_token_id=511,
        vision_start_token_id=509,
        model_type=model_type,
    )


_MROPE = {
    "type": "default",
    "mrope_section": [3, 3, 2],
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
}


def _qwen3_5() -> Any:
    from mlx_vlm.models.qwen3_5.config import TextConfig
    from mlx_vlm.models.qwen3_5.language import LanguageModel

    text = TextConfig.from_dict(
        {**_DELTA, "model_type": "qwen3_5_text", "rope_parameters": dict(_MROPE)}
    )
    return LanguageModel(text, _mrope_owner("qwen3_5"))


def _qwen4_exp() -> Any:
    from mlx_vlm.models.qwen4_exp.config import TextConfig
    from mlx_vlm.models.qwen4_exp.language import LanguageModel

    text = TextConfig.from_dict(
        {
            **_DELTA,
            **_EXPERTS,
            "model_type": "qwen4_exp_text",
            "hc_count": 2,
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_head_dim": 32,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "mtp_num_hidden_layers": 0,
            "rope_parameters": dict(_MROPE),
        }
    )
    return LanguageModel(text, _mrope_owner("qwen4_exp"))


def _with_rope_delta(model: Any, tokens: mx.array, caches: list[Any]) -> mx.array:
    # A fresh process must be told the offset that the model keeps outside its caches.
    logits: mx.array = model(tokens, cache=caches, rope_deltas=mx.zeros((1, 1))).logits
    return logits


def _mamba2() -> Any:
    return _language(
        "mamba2",
        {
            "model_type": "mamba2",
            "num_heads": 4,
            "head_dim": 32,
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "state_size": 32,
            "num_hidden_layers": 3,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            "time_step_limit": (0.0, 1e9),
            "time_step_rank": 4,
        },
    )


def _nemotron_h() -> Any:
    return _language(
        "nemotron_h",
        {
            "model_type": "nemotron_h",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 5,
            "max_position_embeddings": 4096,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": "M-M*-",
            "head_dim": 32,
        },
    )


def _falcon_h1() -> Any:
    return _language(
        "falcon_h1",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "head_dim": 32,
            "mamba_d_conv": 4,
            "mamba_d_head": 32,
            "mamba_d_ssm": 128,
            "mamba_d_state": 32,
            "mamba_n_heads": 4,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB,
            "mamba_n_groups": 1,
        },
    )


def _llama4() -> Any:
    return _language(
        "llama4",
        {
            "model_type": "llama4_text",
            "hidden_size": 64,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_local_experts": 4,
            "attention_chunk_size": 64,
        },
        "TextConfig",
    )


def _recurrent_gemma() -> Any:
    return _language(
        "recurrent_gemma",
        {
            "model_type": "recurrent_gemma",
            "attention_bias": False,
            "conv1d_width": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "logits_soft_cap": 30.0,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "attention_window_size": WINDOW,
            "vocab_size": VOCAB,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    )


def _deepseek_v4() -> Any:
    return _language(
        "deepseek_v4",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "n_routed_experts": 4,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "compress_ratios": [0, 4, 128, 4],
            "num_hash_layers": 1,
            "sliding_window": 32,
            "o_groups": 2,
            "o_lora_rank": 32,
            "index_n_heads": 4,
            "index_head_dim": 64,
            "index_topk": 16,
            "index_block": 4,
            "index_keep": 2,
            "num_nextn_predict_layers": 0,
        },
    )


def _deepseek_v41() -> Any:
    return _language(
        "deepseek_v41",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "head_dim": 64,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 64,
            "o_lora_rank": 32,
            "o_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "compress_ratios": [0, 2, 2, 1],
            "kv_source_layer_ids": [1, 2],
            "index_source_layer_ids": [1, 2, 3],
            "index_n_heads": 2,
            "index_head_dim": 64,
            "index_topk": 16,
            "candidate_source_layer_id": 2,
            "candidate_topk_blocks": 8,
            "candidate_block_size": 4,
            "hc_mult": 2,
            "engram_layer_ids": [],
            "engram_num_embeddings": [],
        },
    )


def _hy_v4() -> Any:
    # mlx-vlm 0.7.10 compiles this indexer's selection for any shape while its bound is fixed by
    # the first length that the process happens to see, so beyond `index_topk` tokens two
    # processes differ with or without a hand-off. The tests stay below it.
    config = {
        **_DSA,
        "num_key_value_heads": 1,
        "hc_mult": 2,
        "index_topk": 512,
        "indexer_types": ["full", "shared"] * 2,
    }
    return _language("hy_v4", config)


def _z1t() -> Any:
    return _language(
        "z1t",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "aft_heads": 4},
    )


def _unlimited_ocr() -> Any:
    return _language(
        "unlimited_ocr",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "sliding_window_size": 8,
        },
        "TextConfig",
    )


def _lfm2() -> Any:
    return _language(
        "lfm2",
        {
            "model_type": "lfm2",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "rope_theta": 1e6,
            "full_attn_idxs": [1, 3],
        },
    )


def _rwkv7() -> Any:
    return _language(
        "rwkv7",
        {
            "model_type": "rwkv7",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "norm_eps": 1e-5,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "a_low_rank_dim": 16,
            "v_low_rank_dim": 16,
            "gate_low_rank_dim": 16,
            "decay_low_rank_dim": 16,
        },
    )


def _florence2() -> Any:
    return _language(
        "florence2",
        {
            "d_model": 64,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "vocab_size": VOCAB,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "max_position_embeddings": 512,
        },
        "TextConfig",
    )


def _encoded(model: Any, tokens: mx.array, caches: list[Any]) -> mx.array:
    # The encoder's output is constant; what each side sees of it later is in the caches.
    states = mx.sin(mx.arange(7 * 64).reshape(1, 7, 64)).astype(mx.bfloat16)
    logits: mx.array = model(decoder_input_ids=tokens, encoder_outputs=states, cache=caches).logits
    return logits


def _of(kind: Callable[[], Any]) -> Callable[[Any], list[Any]]:
    return lambda model: [kind() for _ in model.layers]


def _quantised_kv(model: Any) -> list[Any]:
    """Uniform 8-bit KV as the library applies it: every layer but the last."""
    last = len(model.layers) - 1
    return [
        classes.KVCache() if index == last else classes.QuantizedKVCache(group_size=32, bits=8)
        for index in range(last + 1)
    ]


def _quantised_qsa(model: Any) -> list[Any]:
    from mlx_vlm.models.qwen4_exp.language import QSAKVCache, QSAQuantizedKVCache

    return [
        QSAQuantizedKVCache(group_size=32, bits=8) if isinstance(cache, QSAKVCache) else cache
        for cache in model.make_cache()
    ]


_ENTRIES = (
    Tiny("glm5_next", _glm5_next),
    Tiny("llama", _llama),
    Tiny("qwen3", _qwen3),
    Tiny("gemma3", _gemma3),
    Tiny("gpt_oss", _gpt_oss),
    Tiny("minimax_m3", _minimax_m3),
    Tiny("kimi_linear", _kimi_linear),
    Tiny("qwen3_next", _qwen3_next),
    Tiny("qwen3_5", _qwen3_5, forward=_with_rope_delta),
    Tiny("deepseek_v32", lambda: _language("deepseek_v32", {**_DSA, "model_type": "deepseek_v32"})),
    Tiny(
        "glm_moe_dsa",
        lambda: _language(
            "glm_moe_dsa",
            {
                **_DSA,
                "model_type": "glm_moe_dsa",
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            },
        ),
    ),
    Tiny("mamba2", _mamba2),
    Tiny("nemotron_h", _nemotron_h),
    Tiny("falcon_h1", _falcon_h1),
    Tiny("llama4", _llama4),
    Tiny("recurrent_gemma", _recurrent_gemma),
    Tiny("deepseek_v4", _deepseek_v4),
    Tiny("deepseek_v41", _deepseek_v41),
    Tiny("hy_v4", _hy_v4),
    Tiny("qwen4_exp", _qwen4_exp, forward=_with_rope_delta),
    Tiny("qwen4_exp_kv8", _qwen4_exp, caches=_quantised_qsa, forward=_with_rope_delta),
    Tiny("z1t", _z1t),
    Tiny("unlimited_ocr", _unlimited_ocr),
    Tiny("lfm2", _lfm2),
    Tiny("rwkv7", _rwkv7),
    Tiny("florence2", _florence2, forward=_encoded, bits=None),
    Tiny("llama_kv8", _llama, caches=_quantised_kv),
    Tiny("llama_concatenate", _llama, caches=_of(classes.ConcatenateKVCache)),
    Tiny("llama_static", _llama, caches=_of(lambda: classes.StaticPrefixKVCache(256))),
    Tiny(
        "llama_buffered",
        _llama,
        caches=_of(lambda: classes.BufferedRotatingKVCache(WINDOW, buffer_size=16)),
    ),
)
TINY = {entry.name: entry for entry in _ENTRIES}


def prompt(length: int, seed: int = 7) -> list[int]:
    """Token ids for a prompt, the same everywhere."""
    return [(index * 37 + seed * 11 + index * index) % (VOCAB - 16) + 3 for index in range(length)]
