"""The choice of the next token: greedy, or drawn from (seed, position)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx

from engine.errors import ModelError

MAX_TOP_LOGPROBS = 20
MAX_BIAS = 1024
COLDEST = 1e-6
"""Temperatures below this choose as 0 does: dividing by less could overflow float32."""
Top = list[tuple[int, float]]


@dataclass(frozen=True)
class SamplingParams:
    """How the answer of one row is chosen and where it ends.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `stop_ids` end the answer
    as the model's own end tokens do (the caller puts those in). `stop` strings end it before they
    appear. `logit_bias` is added to logits by token id. Penalties: `repetition_penalty` divides
    positive and multiplies negative logits of every token seen so far; `presence_penalty` and
    `frequency_penalty` are subtracted for generated tokens, the latter per occurrence.
    `top_logprobs` asks for that many alternatives, -1 for no log probabilities at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = -1

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SamplingParams:
        """From a JSON object with these names; raises `ModelError` for an unknown one."""
        unknown = set(data) - {item.name for item in fields(cls)}
        if unknown:
            raise ModelError(f"unknown sampling parameter {sorted(unknown)[0]!r}; remove it")
        values = dict(data)
        if "stop_ids" in values:
            values["stop_ids"] = frozenset(int(token) for token in values["stop_ids"])
        if "stop" in values:
            values["stop"] = tuple(values["stop"])
        if "logit_bias" in values:
            values["logit_bias"] = {int(k): float(v) for k, v in values["logit_bias"].items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["stop_ids"] = sorted(self.stop_ids)
        data["stop"] = list(self.stop)
        data["logit_bias"] = {str(k): v for k, v in self.logit_bias.items()}
        return data

    def check(self, vocab_size: int) -> None:
        """Raise `ModelError` for a value out of range or a token id outside the vocabulary."""
        limits: list[tuple[str, float, float]] = [
            ("temperature", 0, 100),
            ("top_p", 0, 1),
            ("top_k", 0, 1 << 31),
            ("min_p", 0, 1),
            ("seed", 0, (1 << 64) - 1),
            ("max_tokens", 1, 1 << 31),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -100, 100),
            ("frequency_penalty", -100, 100),
            ("top_logprobs", -1, MAX_TOP_LOGPROBS),
        ]
        for name, low, high in limits:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ModelError(f"{name} is {value}; it must lie between {low} and {high}")
        if len(self.logit_bias) > MAX_BIAS:
            raise ModelError(f"logit_bias has {len(self.logit_bias)} entries; {MAX_BIAS} at most")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise ModelError(
                    f"logit_bias names token {token}, outside the vocabulary of {vocab_size}"
                )
            if not math.isfinite(bias):
                raise ModelError(f"logit_bias of token {token} is not a finite number")

    @property
    def plain(self) -> bool:
        """Whether the choice is the largest of the model's own logits and nothing else is asked."""
        return (
            self.temperature == 0
            and not self.logit_bias
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.top_logprobs < 0
        )


def draw_key(seed: int, position: int) -> mx.array:
    """The random key of one token: blake2b of (seed, position), the same in every process."""
    data = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8, person=b"tandem-draw").digest()
    return mx.random.key(int.from_bytes(digest, "little"))


def sample(
    logits: mx.array,
    params: SamplingParams,
    position: int,
    seen: Sequence[int] = (),
    generated: Counter[int] | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Choose the token at `position` from `logits` (vocabulary,); nothing is evaluated.

    `seen` are all tokens so far, `generated` counts those of this answer; `mask` (vocabulary, bool)
    allows tokens. Returns the token (scalar) and, where asked for, the log probabilities
    (vocabulary,; float32) before temperature and filters.
    """
    logits = logits.astype(mx.float32)
    if params.repetition_penalty != 1 and seen:
        at = mx.array(sorted(set(seen)), dtype=mx.int32)
        old = logits[at]
        logits[at] = mx.where(
            old > 0, old / params.repetition_penalty, old * params.repetition_penalty
        )
    if generated and (params.presence_penalty or params.frequency_penalty):
        at = mx.array(list(generated), dtype=mx.int32)
        counts = mx.array(list(generated.values()), dtype=mx.float32)
        logits[at] = logits[at] - (params.presence_penalty + params.frequency_penalty * counts)
    if params.logit_bias:
        at = mx.array(list(params.logit_bias), dtype=mx.int32)
        logits[at] = logits[at] + mx.array(list(params.logit_bias.values()), dtype=mx.float32)
    if mask is not None:
        logits = mx.where(mask, logits, -mx.inf)
    logprobs = None
    if params.top_logprobs >= 0:
        logprobs = logits - mx.logsumexp(logits)
    if params.temperature < COLDEST:
        return mx.argmax(logits), logprobs
    logits = _filter(logits / params.temperature, params)
    return mx.random.categorical(logits, key=draw_key(params.seed, position)), logprobs


def _filter(logits: mx.array, params: SamplingParams) -> mx.array:
    """Exclude what top-k, top-p and min-p exclude, in this order."""
    if 0 < params.top_k < logits.size:
        least = mx.min(mx.topk(logits, params.top_k))
        logits = mx.where(logits < least, -mx.inf, logits)
    if params.top_p < 1:
        order = mx.argsort(-logits)
        probabilities = mx.softmax(logits[order])
        # A token stays while those before it have not reached top_p; the first always stays.
        before = mx.cumsum(probabilities) - probabilities
        kept = mx.where((before < params.top_p) | (mx.arange(before.size) == 0), 0.0, -mx.inf)
        logits[order] = logits[order] + kept
    if params.min_p > 0:
        logits = mx.where(logits < mx.max(logits) + math.log(params.min_p), -mx.inf, logits)
    return logits


def top_tokens(logprobs: mx.array, count: int) -> Top:
    """The `count` most probable tokens with their log probabilities, best first."""
    if count < 1:
        return []
    best = mx.argpartition(-logprobs, count - 1)[:count]
    pairs = zip(_ints(best), _floats(logprobs[best]), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def _ints(values: mx.array) -> list[int]:
    found: Any = values.tolist()
    return [int(value) for value in found]


def _floats(values: mx.array) -> list[float]:
    found: Any = values.tolist()
    return [float(value) for value in found]


def number(value: mx.array) -> float:
    """A scalar array's value; evaluates it."""
    found: Any = value.item()
    return float(found)
