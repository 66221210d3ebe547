"""Sampling against plain reference formulas, and its independence of the batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.sampling import SamplingParams, sample, top_tokens

LOGITS = np.random.default_rng(5).normal(size=200).astype(np.float32) * 3
P = np.exp(LOGITS - LOGITS.max()) / np.exp(LOGITS - LOGITS.max()).sum()
ORDER = np.argsort(-LOGITS)


def draw(params: SamplingParams, position: int, **extra: Any) -> int:
    token, _ = sample(mx.array(LOGITS), params, position, **extra)
    return int(np.array(token))


def support(count: int = 400, **values: Any) -> set[int]:
    params = SamplingParams(temperature=1.0, seed=9, **values)
    return {draw(params, position) for position in range(count)}


def test_greedy_is_the_largest_logit() -> None:
    assert draw(SamplingParams(), 3) == ORDER[0]


def test_the_same_seed_and_position_draw_the_same() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    first = [draw(params, position) for position in range(50)]
    assert first == [draw(params, position) for position in range(50)]
    assert first != [draw(SamplingParams(temperature=1.0, seed=8), p) for p in range(50)]
    assert len(set(first)) > 5


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=1.0, seed=1)
    counts = Counter(draw(params, position) for position in range(2000))
    for token in ORDER[:5]:
        assert abs(counts[int(token)] / 2000 - P[token]) < 5 * np.sqrt(P[token] / 2000)


def test_top_k() -> None:
    assert support(top_k=3) == set(ORDER[:3].tolist())
    assert support(50, top_k=1) == {int(ORDER[0])}


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.6])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float) -> None:
    size = int(np.searchsorted(np.cumsum(P[ORDER]), top_p)) + 1
    assert support(top_p=top_p) == set(ORDER[:size].tolist())


def test_min_p() -> None:
    allowed = set(np.flatnonzero(0.3 * P.max() <= P).tolist())
    assert support(min_p=0.3) == allowed


def test_low_temperature_approaches_greedy() -> None:
    params = SamplingParams(temperature=0.01, seed=2)
    assert {draw(params, position) for position in range(50)} == {int(ORDER[0])}


@pytest.mark.parametrize("temperature", [1e-7, 1e-38, 1e-45, 5e-324])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    assert draw(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), 3) == ORDER[0]


def test_bias_and_mask_decide() -> None:
    assert draw(SamplingParams(logit_bias={17: 100.0}), 0) == 17
    assert draw(SamplingParams(logit_bias={int(ORDER[0]): -100.0}), 0) == ORDER[1]
    mask = np.zeros(200, dtype=bool)
    mask[44] = True
    assert draw(SamplingParams(), 0, mask=mx.array(mask)) == 44


@given(st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
@settings(deadline=None, max_examples=25)
def test_penalties_follow_their_formulas(repeat: float, presence: float, frequency: float) -> None:
    seen, generated = [3, 9, 9, 44], Counter({9: 2, 44: 1})
    expected = LOGITS.astype(np.float64)
    for token in {3, 9, 44}:
        expected[token] = (
            expected[token] / repeat if expected[token] > 0 else expected[token] * repeat
        )
    for token, count in generated.items():
        expected[token] -= presence + frequency * count
    params = SamplingParams(
        repetition_penalty=repeat,
        presence_penalty=presence,
        frequency_penalty=frequency,
        top_logprobs=5,
    )
    token, logprobs = sample(mx.array(LOGITS), params, 0, seen, generated)
    assert logprobs is not None
    expected -= np.log(np.exp(expected).sum())
    assert np.allclose(np.array(logprobs), expected, atol=1e-4)
    best = top_tokens(logprobs, 5)
    assert [t for t, _ in best] == np.argsort(-expected)[:5].tolist()
    assert int(np.array(token)) == best[0][0]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 1 << 64},
        {"max_tokens": 0},
        {"repetition_penalty": 0},
        {"top_logprobs": 21},
        {"logit_bias": {512: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        SamplingParams(**values).check(512)


def test_json_and_back() -> None:
    params = SamplingParams(
        temperature=0.5, stop_ids=frozenset({2, 1}), stop=("a",), logit_bias={3: 1.5}
    )
    assert SamplingParams.from_json(params.to_json()) == params
    assert SamplingParams.from_json({}) == SamplingParams()
    with pytest.raises(ModelError, match="unknown sampling parameter 'best_of'"):
        SamplingParams.from_json({"best_of": 2})
