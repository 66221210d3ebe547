"""A model without its weights: the shapes of a config.json, one layer of each kind, random numbers.

Where a checkpoint does not fit, or is not here, its layers still take the time that their shapes
take. The first layers that show every kind once are kept; the others are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs

from engine.device import Device
from engine.errors import ModelError
from engine.model import Model

_PARTS = ["text", "vision", "perceiver", "projector", "audio"]
_SCALE = 0.02


@dataclass(frozen=True)
class Shaped:
    """`model` has the first `kept` layers; `kinds` names each kept layer's kind, `counts` how many
    layers of each kind the whole model has."""

    model: Model
    kept: int
    layers: int
    kinds: list[str]
    counts: dict[str, int]
    factors: dict[int, float]
    """How many layers of the whole model each kept one stands for, by the id of its module."""


def build(config_file: Path, device: Device) -> Shaped:
    """The kept layers of the model that `config_file` describes, quantised as it says.

    Raises ModelError where the architecture is unknown or has no plain list of layers.
    """
    try:
        config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        arch, _ = get_model_and_args(config)
        settings = arch.ModelConfig.from_dict(config)
        whole = arch.Model(update_module_configs(settings, arch, config, _PARTS))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{config_file} describes no model that mlx-vlm knows ({error})"
        ) from error
    lm: Any = getattr(whole, "language_model", whole)
    # A property of this name only leads to where the list is.
    holder = next((m for m in lm.modules() if isinstance(m.get("layers"), list)), None)
    if holder is None:
        raise ModelError(f"{config_file}: this architecture has no plain list of layers")
    layers = list(holder.layers)
    signatures = [_signature(layer) for layer in layers]
    names = _names(signatures)
    kept = max(signatures.index(each) for each in set(signatures)) + 1
    holder.layers = layers[:kept]
    _check_room(lm, config_file, config.get("quantization"), device)
    _fill(lm, config.get("quantization"), device)
    if whole is not lm:  # nothing else of it is used, or may be evaluated
        whole = lm
    model = Model(config_file.parent, whole, config, device, fingerprint=bytes(16))
    counts = Counter(names[each] for each in signatures)
    kinds = [names[each] for each in signatures[:kept]]
    shown = Counter(kinds)
    factors = {
        id(layer): counts[kind] / shown[kind]
        for layer, kind in zip(layers[:kept], kinds, strict=True)
    }
    return Shaped(model, kept, len(layers), kinds, dict(counts), factors)


def _check_room(lm: Any, config_file: Path, quantization: Any, device: Device) -> None:
    """Refuse what would not fit, before a byte of it is made."""
    packed = isinstance(quantization, dict) and device.dtype != "float32"
    each = int(quantization.get("bits", 4)) / 8 + 0.1 if packed else 4.0
    sizes = [leaf.size for _, leaf in _leaves(lm)]
    wanted = int(each * sum(sizes)) + 8 * max(sizes)  # one at a time is made in full
    if wanted > device.working_set_bytes // 2:
        raise ModelError(
            f"one layer of each kind of {config_file} takes {wanted / 1e9:.1f} GB, and half of "
            f"this device's {device.working_set_bytes / 1e9:.1f} GB may be used: profile it on a "
            "larger machine"
        )


def _signature(layer: Any) -> tuple[Any, ...]:
    """What makes two layers of one kind: the classes in them and the shapes of their parameters."""
    classes = tuple(sorted(Counter(type(m).__name__ for m in layer.modules()).items()))
    shapes = tuple((name, leaf.shape) for name, leaf in _leaves(layer))
    return classes, shapes


def _names(signatures: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """A name for each kind: the most telling classes of its attention and its MLP."""
    found: dict[tuple[Any, ...], str] = {}
    for signature in signatures:
        if signature in found:
            continue
        words = [
            name
            for name, _ in signature[0]
            if any(part in name for part in ("Attention", "Delta", "Mamba", "MoE", "Moe", "MLP"))
        ]
        base = " + ".join(dict.fromkeys(words)) or "layer"
        taken = sum(name.partition(" #")[0] == base for name in found.values())
        found[signature] = base if not taken else f"{base} #{taken + 1}"
    return found


def _fill(lm: Any, quantization: Any, device: Device) -> None:
    """Random weights, quantised, evaluated one by one so that one at a time is in full size."""
    wide = mx.float32 if device.dtype == "float32" else mx.bfloat16
    made = []
    for name, leaf in _leaves(lm):
        if not mx.issubdtype(leaf.dtype, mx.floating):
            continue
        noise = _SCALE * mx.random.normal(leaf.shape)
        value = 1 + noise if "norm" in name and name.endswith("weight") else noise
        made.append((name, value.astype(wide)))
    lm.load_weights(made, strict=False)
    lm.eval()
    if isinstance(quantization, dict) and device.dtype != "float32":
        group, bits = int(quantization.get("group_size", 64)), int(quantization.get("bits", 4))
        wanted = getattr(lm, "quant_predicate", None)

        def choose(path: str, module: Any) -> Any:
            weight = getattr(module, "weight", None)
            if not hasattr(module, "to_quantized") or weight is None or weight.shape[-1] % group:
                return False
            return wanted(path, module) if wanted is not None else True

        quantize(lm, group_size=group, bits=bits, class_predicate=choose)
    for _, leaf in _leaves(lm):
        mx.eval(leaf)


def _leaves(module: Any) -> list[tuple[str, mx.array]]:
    flat: Callable[[Any], Any] = tree_flatten  # has no annotations
    return [(name, leaf) for name, leaf in flat(module.parameters()) if isinstance(leaf, mx.array)]
