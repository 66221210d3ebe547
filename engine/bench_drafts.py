"""`tandem bench drafts`: decoding with proposed tokens against decoding without."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.decode import Batch
    from engine.model import Model
    from engine.sampling import SamplingParams

TOKENS = 40  # of an answer
REPEATING = (
    "one apple, two pears, three plums, four figs, five limes, six dates, seven nuts, eight eggs, "
) * 3
NOVEL = "Tell me something about the sea that I have never heard before."


def measure(model: Model, seconds: float) -> dict[str, Any]:
    """`ratios.repeating_vs_plain`: greedy, in a text that repeats itself, where n-grams are right;
    `ratios.novel_vs_plain`: drawn at temperature 1, where they hardly propose anything.

    Both sides answer the same prompt in turn, each first in every other round; a ratio is the
    median over the rounds of tokens per second with proposals to those without.
    """
    from engine.sampling import SamplingParams
    from engine.text import load_tokenizer

    tokenizer = load_tokenizer(model.path)
    ratios: dict[str, float] = {}
    rates: dict[str, float] = {}
    facts: dict[str, Any] = {}
    for name, text, temperature in (("repeating", REPEATING, 0.0), ("novel", NOVEL, 1.0)):
        ids = tokenizer.encode(text.rstrip(), add_special_tokens=False)
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1)
        with_drafts, without, told = _rounds(model, ids, params, seconds / 2)
        pairs = zip(without, with_drafts, strict=True)
        ratios[f"{name}_vs_plain"] = statistics.median(plain / drafted for plain, drafted in pairs)
        rates[f"{name}_drafted"] = TOKENS / statistics.median(with_drafts)
        rates[f"{name}_plain"] = TOKENS / statistics.median(without)
        facts[name] = {**told, "rounds_timed": len(without)}
    return {"ratios": ratios, "tokens_per_second": rates, "speculation": facts}


def _rounds(
    model: Model, ids: list[int], params: SamplingParams, seconds: float
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Seconds of each answer with proposals and without, and what the drafter did."""
    from engine.decode import Batch
    from engine.drafters import NgramDrafter

    sides = (Batch(model, 1, drafter=NgramDrafter()), Batch(model, 1))
    times: tuple[list[float], list[float]] = ([], [])
    said: list[list[int]] = [[], []]
    deadline = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < deadline:
        for side in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            taken, said[side] = _answer(sides[side], ids, params)
            times[side].append(taken)
        if said[0] != said[1]:
            raise ModelError("the answers with and without proposals differ")
    return *times, sides[0].facts["speculation"]


def _answer(batch: Batch, ids: list[int], params: SamplingParams) -> tuple[float, list[int]]:
    """Seconds of decoding one answer, its prefill not counted, and its tokens."""
    from engine.prefill import Prefill
    from engine.rows import Row

    caches = Prefill(batch.model, ids).run()
    batch.add(Row(caches, ids[:-1], ids[-1:], params))
    tokens: list[int] = []
    begun = time.perf_counter()
    while len(batch):
        tokens += [event.token for event in batch.step() if event.token is not None]
    return time.perf_counter() - begun, tokens
