"""Whether rows decoded together give what each gives alone, measured when a model is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine.merged import NotMergeableError, merge
from engine.sampling import number
from store.codec.header import CodecError

if TYPE_CHECKING:
    from engine.model import Caches, Model

STEPS = 3
SHORT_PROBE = 40
# A sparse attention is exercised only where there is more to choose from than it selects.
LONGEST_PROBE = 4096
# Rounding differs between shapes: up to 1 % of the logits' range was seen with bfloat16. Models
# whose batched path is wrong are off by a third of the range and more.
TOLERANCE = 0.06
PROBES = ".tandem-probes"  # beside the model; without a suffix, so that no digest takes it in
PROBES_VERSION = 1


@dataclass(frozen=True)
class Batching:
    """What the probe found: `reason` is empty where rows may be batched.

    `noise` is the largest difference of a logit between a merged and a single row, `range` the
    spread of the logits it is to be compared with; both 0 where nothing could be compared.
    """

    reason: str
    noise: float = 0.0
    range: float = 0.0
    tokens: int = 0

    @property
    def ok(self) -> bool:
        return not self.reason

    def facts(self) -> dict[str, Any]:
        """The same for reports."""
        return {
            "batched": self.ok,
            "reason": self.reason,
            "noise": self.noise,
            "range": self.range,
            "tokens": self.tokens,
        }


def remembered(model: Model, name: str, measure: Callable[[], Batching]) -> Batching:
    """What was found under `name` for these files, device and libraries before, or `measure()`.

    Kept beside the model, in one file; where that cannot be written every start measures anew.
    """
    if not (model.path / "config.json").is_file():
        return measure()
    device = model.device
    key = {
        "version": PROBES_VERSION,
        "fingerprint": model.fingerprint.hex(),
        "device": device.name,
        "blas": device.blas,
        "dtype": device.dtype,
        "mlx": device.mlx,
        "mlx_vlm": version("mlx-vlm"),
    }
    path = model.path / PROBES
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] == key:
            known = data["found"]
            return Batching(**known[name])
    found = measure()
    known = {**known, name: asdict(found)}
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=model.path, prefix=PROBES, delete=False) as file:
            json.dump({"key": key, "found": known}, file)
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
    return found


def probe_tokens(config: dict[str, Any]) -> int:
    """Tokens of the probe's longer row, so that every selection the config names has to select."""
    needed = SHORT_PROBE
    for part in (config, config.get("text_config") or {}):
        sparse = part.get("sparse_attention_config") or part
        blocks, size = sparse.get("sparse_topk_blocks"), sparse.get("sparse_block_size")
        if blocks and size:
            needed = max(needed, int(blocks) * int(size) + 2 * int(size))
        for name in ("index_topk", "sliding_window", "attention_window_size"):
            value = part.get(name)
            if isinstance(value, int):
                needed = max(needed, value + 17)
    return min(needed, LONGEST_PROBE)


def probe(model: Model) -> Batching:
    """Decode two rows apart and merged and compare their logits, then one row taken out again."""
    from engine.prefill import Prefill

    length = min(probe_tokens(model.config), model.context_length - STEPS - 2)
    if length < 2:
        return Batching("the context is too short to probe batching")
    prompts = [token_ids(model, length, 1), token_ids(model, max(2, length * 3 // 5), 2)]
    forced = [token_ids(model, STEPS + 1, 3), token_ids(model, STEPS + 1, 4)]

    def states() -> list[Caches]:
        return [Prefill(model, prompt).run() for prompt in prompts]

    single = states()
    expected = [
        mx.concatenate([_step(model, caches, [tokens[i]]) for i in range(STEPS + 1)])
        for caches, tokens in zip(single, forced, strict=True)
    ]
    mx.eval(expected)
    try:
        together = merge(states(), [len(prompt) - 1 for prompt in prompts])
        found = [_step(model, together, [t[i] for t in forced]) for i in range(STEPS)]
        mx.eval(found)
        alone = [entry.extract(0) for entry in together]
        last = _step(model, alone, [forced[0][STEPS]])
        mx.eval(last)
    except NotMergeableError as error:
        return Batching(str(error), tokens=length)
    except Exception as error:  # whatever a model raises on merged rows
        line = str(error).strip().splitlines()
        return Batching(
            f"merged rows fail: {line[0] if line else type(error).__name__}", 0, 0, length
        )
    try:
        model.check_classes(alone)
    except CodecError as error:
        return Batching(f"a merged row comes out changed: {error}", tokens=length)
    pairs = [(expected[row][i], found[i][row]) for i in range(STEPS) for row in range(2)]
    pairs.append((expected[0][STEPS], last[0]))
    noise, spread = largest(pairs)
    if not noise <= TOLERANCE * spread:  # also where either is not a number
        reason = (
            f"merged rows differ from single ones by {noise:.3g} of a logit range of {spread:.3g}"
        )
        return Batching(reason, noise, spread, length)
    return Batching("", noise, spread, length)


def largest(pairs: Sequence[tuple[mx.array, mx.array]]) -> tuple[float, float]:
    """The largest difference within the pairs of logits, and the widest range of the first ones."""
    wide = [(a.astype(mx.float32), b.astype(mx.float32)) for a, b in pairs]
    noise = max(number(mx.max(mx.abs(a - b))) for a, b in wide)
    return noise, max(number(mx.max(a) - mx.min(a)) for a, _ in wide)


def _step(model: Model, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Feed one token per row; returns the logits (rows, vocabulary) as float32."""
    logits = model.forward(
        mx.array([[token] for token in tokens], dtype=mx.int32), caches, [0] * len(tokens)
    )
    last: mx.array = logits[:, -1].astype(mx.float32)
    return last


def token_ids(model: Model, length: int, seed: int) -> list[int]:
    """Token ids that are the same everywhere; a plain congruential sequence is varied enough."""
    state, ids = seed, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append((state >> 33) % model.vocab_size)
    return ids
