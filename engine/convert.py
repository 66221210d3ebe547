"""A quantised GGUF file of the llama family, rewritten as an ordinary MLX model directory.

Run in a process of its own (`python -P -m engine.convert FILE DIRECTORY`), so that the caller need
not load MLX.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP = 32  # weights that share a scale in GGUF's Q4 and Q8 formats
CONTROL = 3  # GGUF's token type of control tokens

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def rename(name: str) -> str:
    """The MLX name of a GGUF tensor; `KeyError` for a tensor that the llama family has not."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


def convert(source: Path, target: Path) -> None:
    """Write `source` (GGUF, llama architecture, Q4_0/Q4_1/Q8_0) as a model directory at `target`.

    Scales and norms are written as float16, packed weights unchanged. Raises `ValueError` for
    another architecture or tokenizer.
    """
    loaded: Any = mx.load(str(source), return_metadata=True)
    tensors, meta = loaded

    def value(key: str) -> Any:
        found = meta[key]
        return found.item() if isinstance(found, mx.array) else found

    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise ValueError("only llama models with a byte-level BPE tokenizer can be converted")
    weights = {rename(k): v for k, v in tensors.items()}
    weights = {k: v.astype(mx.float16) if v.dtype == mx.float32 else v for k, v in weights.items()}
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for name in sorted(weights):
        module = name.removesuffix(".scales")
        if module != name:
            # One uint32 holds 32 / bits weights, one scale stands for 32 weights.
            bits = weights[f"{module}.weight"].shape[-1] // weights[name].shape[-1]
            if bits != quantization["bits"]:
                quantization[module] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    eos = int(value("tokenizer.ggml.eos_token_id"))
    bos = int(value("tokenizer.ggml.bos_token_id"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(value("llama.embedding_length")),
        "num_hidden_layers": int(value("llama.block_count")),
        "intermediate_size": int(value("llama.feed_forward_length")),
        "num_attention_heads": int(value("llama.attention.head_count")),
        "num_key_value_heads": int(value("llama.attention.head_count_kv")),
        "rms_norm_eps": float(value("llama.attention.layer_norm_rms_epsilon")),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "rope_theta": float(value("llama.rope.freq_base")),
        # GGUF permutes the query and key rows for interleaved rotation.
        "rope_traditional": True,
        "max_position_embeddings": int(value("llama.context_length")),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "quantization": quantization,
        "quantization_config": quantization,
    }
    target.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    _write(target / "config.json", config)
    _write(target / "generation_config.json", {"bos_token_id": bos, "eos_token_id": [eos]})
    _write_tokenizer(target, meta, value)


def _write_tokenizer(target: Path, meta: dict[str, Any], value: Any) -> None:
    tokens = meta["tokenizer.ggml.tokens"]
    types = meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(target / "tokenizer.json"))

    def special(name: str) -> str:
        return str(tokens[int(value(f"tokenizer.ggml.{name}_token_id"))])

    _write(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special("bos"),
            "eos_token": special("eos"),
            "pad_token": special("padding"),
            "unk_token": special("unknown"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(value("llama.context_length")),
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
