"""A loaded model, and everything the engine has to know about it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.quant_utils import dequantize_model
from mlx_vlm.utils import load_model

from engine import corrections, library
from engine.device import Device
from engine.errors import ModelError
from engine.memory import fits
from engine.names import SEEN
from engine.probe import Batching, probe, remembered
from engine.profile import find
from store.codec.classes import is_transient
from store.codec.fingerprint import fingerprint
from store.codec.header import CodecError
from store.codec.layout import Layout, position, walk
from store.codec.transient import NullKVCache

Caches = list[Any]
# Widened weights may take this share of the working set; a larger model stays as it is stored.
WIDEN_SHARE = 0.5
# A model that has no room for one conversation of this length is refused.
SERVED_TOKENS = 8192


class Model:
    """A language model with its caches, ready to run in the thread that made it.

    `lm` is mlx-vlm's language model, `model` the whole (with a vision tower where there is one).
    `mrope` says that positions have an offset which the model keeps outside its cache and which
    every call must pass. `eos_ids` are the tokens that end an answer.
    `chunk` is the prefill chunk and `merge_from` the least number of rows to merge, both from the
    profile that was measured here, else the device's defaults; `compiled` is what the profile says
    of a compiled decode step.
    """

    def __init__(
        self,
        path: Path,
        model: Module,
        config: dict[str, Any],
        device: Device,
        fingerprint: bytes | None = None,
        make_cache: Callable[[Any], Caches] | None = None,
    ) -> None:
        """`fingerprint` is given for a model that does not come from files, `make_cache` where the
        cache list is not the one the language model makes (a quantised KV cache, for instance).

        Raises `ModelError` when the model makes a cache class that cannot be stored.
        """
        self.path = path
        self.model = model
        self.device = device
        self.config = config
        self.lm: Any = getattr(model, "language_model", model)
        text = config.get("text_config") or {}
        self.model_type = str(config.get("model_type", ""))
        self.vocab_size = int(text.get("vocab_size") or config.get("vocab_size") or 0)
        if not self.vocab_size:
            self.vocab_size = int(getattr(getattr(self.lm, "config", None), "vocab_size", 0))
        length = text.get("max_position_embeddings") or config.get("max_position_embeddings")
        self.context_length = int(length) if length else 1 << 31
        self.eos_ids = _eos_ids(path, config, text)
        corrections.apply(str(getattr(self.lm, "model_type", self.model_type)))
        profile = find(path, device)
        self.chunk = (profile.chunk if profile else 0) or device.chunk
        self.merge_from = profile.merge_from if profile else 2
        self.compiled = profile.compiled if profile else {}
        self.mrope = hasattr(self.lm, "_rope_deltas")
        self.image_token = _image_token(model, config)
        self._fingerprint = fingerprint
        self._make_cache: Callable[[Any], Caches] = make_cache or make_prompt_cache
        self._skip_logits = "skip_logits" in inspect.signature(type(self.lm).__call__).parameters
        try:
            self._unmeasured = Layout.of(self.fresh_cache(), self.model_type)
        except CodecError as error:
            raise ModelError(f"{path.name} cannot be served: {error}") from error

    def fresh_cache(self) -> Caches:
        """An empty cache list for one row, as the model makes it, without its transient slots.

        Those would speed a prefill up, but its last bits differ with them, and whether there is
        memory for them would decide about an answer.
        """
        caches: Caches = self._make_cache(self.lm)
        for path, siblings, _ in list(walk(caches)):
            if is_transient(self.model_type, path, siblings):
                members = list(caches[path[0]].caches)
                members[path[1]] = NullKVCache()
                caches[path[0]].caches = tuple(members)
        return caches

    def forward(
        self,
        ids: mx.array,
        caches: Caches,
        rope_deltas: Sequence[int],
        *,
        logits: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `ids` (rows, tokens; int32) through the model, growing `caches`; all is lazy.

        `rope_deltas` has one offset per row. Returns the logits (rows, tokens, vocabulary), or
        something meaningless with `logits=False`. `arguments` go to the language model (embeddings
        with images among them, for instance).
        """
        extra = {**self.arguments(rope_deltas), **(arguments or {})}
        if not logits and self._skip_logits:
            extra["skip_logits"] = True
        output = self.lm(ids, cache=caches, **extra)
        return output.logits

    def check_position(self, caches: Caches, tokens: int) -> None:
        """Raise `CodecError` when `caches` hold another number of tokens than `tokens`."""
        found = position(self._unmeasured, caches)
        if found is not None and found != tokens:
            raise CodecError(f"the caches hold {found} tokens instead of {tokens}")

    def arguments(self, rope_deltas: Sequence[int]) -> dict[str, Any]:
        """What every call of the language model needs beside tokens and caches."""
        if not self.mrope:
            return {}
        # A prompt's positions stay on the module and would be taken for the next prompt's.
        self.lm._position_ids = None
        return {"rope_deltas": mx.array(list(rope_deltas), dtype=mx.int32)[:, None]}

    def check_classes(self, caches: Caches) -> None:
        """Raise `CodecError` when `caches` are not built as this model's own are."""
        for _ in self._unmeasured.match(caches):
            pass

    @functools.cached_property
    def verifying(self) -> Batching:
        """Whether proposed tokens may be verified together on this device, measured once."""
        from engine.speculate import probe_verify

        return remembered(self, "verifying", lambda: probe_verify(self, 1))

    @functools.cached_property
    def verifying_rows(self) -> Batching:
        """The same for several rows, of which each keeps another number of tokens."""
        from engine.speculate import probe_verify

        return remembered(self, "verifying_rows", lambda: probe_verify(self, 2))

    def tokens(self, ids: Sequence[int]) -> mx.array:
        """`ids` as the model takes them (1, tokens; int32): parts of images are its image token."""
        image = self.image_token or 0
        return mx.array([[image if token >= SEEN else token for token in ids]], dtype=mx.int32)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse token ids outside the vocabulary: MLX would read beyond the table."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                if token >= SEEN and self.image_token is not None:
                    continue
                raise ModelError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size}; "
                    "tokenise the prompt with this model's tokenizer"
                )

    @functools.cached_property
    def layout(self) -> Layout:
        """How this model's state is cut for the wire and the store."""
        # Widths are known once every growing array has a row, which takes this many tokens.
        caches = self.fresh_cache()
        tokens = mx.zeros((1, self._unmeasured.unit), dtype=mx.int32)
        self.forward(tokens, caches, [0], logits=False)
        evaluate(caches)
        return Layout.of(caches, self.model_type, self.fingerprint)

    @functools.cached_property
    def batching(self) -> Batching:
        """Whether rows may be decoded together on this device, measured once."""
        return remembered(self, "batching", lambda: probe(self))

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that change with anything that changes this model's states."""
        if self._fingerprint is not None:
            return self._fingerprint
        try:
            return fingerprint(
                self.path, extra={"mlx_vlm": version("mlx-vlm"), "dtype": self.device.dtype}
            )
        except CodecError as error:
            raise ModelError(str(error)) from error

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all parameters as loaded."""
        return nbytes(self.model)


def nbytes(module: Module) -> int:
    """Bytes of all parameters of a module."""
    return sum(leaf.nbytes for _, leaf in _leaves(module))


def evaluate(caches: Caches) -> None:
    """Evaluate everything that `caches` hold."""
    mx.eval([cache.state for cache in caches])


def load(path: Path, device: Device) -> Model:
    """Load the model directory `path` and prepare it for `device`.

    On a CPU weights are widened to float32 where memory allows. Raises `ModelError` for a directory
    that is incomplete, an architecture mlx-vlm does not know, or a model that does not fit.
    """
    library.check(path)
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if stored > device.working_set_bytes:
        raise ModelError(
            f"{path.name} has {stored / 1e9:.1f} GB of weights and this {device.kind} device may "
            f"hold {device.working_set_bytes / 1e9:.1f} GB; use a smaller or more quantised model"
        )
    try:
        model: Module = load_model(path, lazy=False)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        line = str(error).strip().splitlines()
        raise ModelError(
            f"mlx-vlm cannot load {path} ({line[0] if line else type(error).__name__}); "
            "check that the directory is complete and the architecture supported"
        ) from error
    if device.dtype == "float32":
        widen(model, device)
    loaded = Model(path, model, config, device)
    parts = fits(loaded, min(loaded.context_length, SERVED_TOKENS))
    if not parts["fits"]:
        raise ModelError(
            f"{path.name} needs {parts['weights'] / 1e9:.1f} GB of weights, "
            f"{parts['state'] / 1e9:.1f} GB for a conversation of {SERVED_TOKENS} tokens and "
            f"{parts['chunk'] / 1e9:.1f} GB to prefill it, more than the "
            f"{parts['working_set'] / 1e9:.1f} GB of this device; use a smaller model"
        )
    return loaded


def widen(model: Module, device: Device) -> None:
    """Dequantise and cast to float32 what fits; otherwise cast only what is not packed.

    On a CPU products of float32 run at the speed of BLAS, all others 10 to 50 times slower.
    """
    packed = sum(
        leaf.size * (32 // _bits(model, name))
        for name, leaf in _leaves(model)
        if leaf.dtype == mx.uint32
    )
    plain = sum(leaf.size for _, leaf in _leaves(model) if leaf.dtype != mx.uint32)
    if 4 * (packed + plain) <= WIDEN_SHARE * device.working_set_bytes:
        _cast(model)  # scales first, so that products are formed in float32
        dequantize_model(model)
    _cast(model)
    mx.eval([leaf for _, leaf in _leaves(model)])


def _cast(model: Module) -> None:
    wide = [
        (name, leaf.astype(mx.float32))
        for name, leaf in _leaves(model)
        if leaf.dtype in (mx.float16, mx.bfloat16)
    ]
    model.load_weights(wide, strict=False)


def _bits(model: Module, name: str) -> int:
    """Bits per weight of the packed parameter `name`; 4 where the module does not say."""
    found: Any = model
    for part in name.split(".")[:-1]:
        with contextlib.suppress(IndexError, KeyError, AttributeError, TypeError):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
    return int(getattr(found, "bits", 4))


def _leaves(model: Module) -> list[tuple[str, mx.array]]:
    # Neither function has annotations.
    flat: Callable[[Any], Any] = tree_flatten
    parameters: Callable[[], Any] = model.parameters
    return [(name, leaf) for name, leaf in flat(parameters()) if isinstance(leaf, mx.array)]


def _image_token(model: Module, config: dict[str, Any]) -> int | None:
    """The token at the places of images, None for a model that takes none."""
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "language_model"):
        return None
    whole = getattr(model, "config", None)
    for name in ("image_token_id", "image_token_index"):
        for value in (config.get(name), getattr(whole, name, None)):
            if isinstance(value, int):
                return value
    return None


def _eos_ids(path: Path, config: dict[str, Any], text: dict[str, Any]) -> frozenset[int]:
    """The union of what the generation config and the model config name as end of sequence."""
    generation: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        generation = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    found: set[int] = set()
    for source in (generation, config, text):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(int(token) for token in value)
    return frozenset(found)
