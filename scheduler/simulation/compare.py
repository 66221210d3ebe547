"""A simulated run against the recorded one: times to first token, and who was served when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.record import JobError
from scheduler.simulation.cluster import Turn
from scheduler.simulation.history import Past
from scheduler.simulation.report import spread


def against(pasts: Sequence[Past], turns: Sequence[Turn]) -> dict[str, Any]:
    """Recorded and simulated figures, their ratios, and the rank correlation of completions.

    `turns[k]` is the replay of `pasts[k]`. Raises JobError where too few say when they began.
    """
    pairs = [
        (past, turn)
        for past, turn in zip(pasts, turns, strict=True)
        if past.ttft is not None and past.ended is not None
    ]
    if len(pairs) < 2:
        raise JobError("the history has fewer than two requests that were answered")
    real = spread(past.ttft or 0.0 for past, _ in pairs)
    ours = spread(turn.ttft for _, turn in pairs)
    real_total = spread(past.ended or 0.0 for past, _ in pairs)
    our_total = spread(turn.ended - turn.at for _, turn in pairs)
    assert real
    assert ours
    assert real_total
    assert our_total
    return {
        "requests": len(pairs),
        "ttft_s": {"recorded": real, "simulated": ours},
        "total_s": {"recorded": real_total, "simulated": our_total},
        "ttft_mean_ratio": _ratio(ours["mean"], real["mean"]),
        "ttft_p95_ratio": _ratio(ours["p95"], real["p95"]),
        "total_mean_ratio": _ratio(our_total["mean"], real_total["mean"]),
        "completion_order": round(
            rank_correlation(
                [past.at + (past.ended or 0.0) for past, _ in pairs],
                [turn.ended for _, turn in pairs],
            ),
            4,
        ),
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: 1 where both put everything in the same order."""
    first, second = _ranks(one), _ranks(other)
    middle = (len(first) - 1) / 2
    top = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    whole = sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second)
    return float(top / whole**0.5) if whole else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in order of size; equals share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda k: values[k])
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for place in range(at, end + 1):
            ranks[order[place]] = (at + end) / 2
        at = end + 1
    return ranks


def _ratio(ours: float, real: float) -> float | None:
    return round(ours / real, 4) if real else None
