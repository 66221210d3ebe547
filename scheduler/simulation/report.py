"""What a simulated run says: times of requests, work of machines, bytes, and use of caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.simulation.cluster import Turn
from scheduler.simulation.pipeline import Pipeline


@dataclass(frozen=True)
class Goal:
    """What a request is promised: seconds to the first token, and between two tokens.

    Without `ttft`: 10 s and twice what the prompt takes alone.
    """

    ttft: float = 0.0
    tpot: float = 0.1

    def met(self, turn: Turn, own: float) -> bool:
        """Whether a turn whose prompt takes `own` seconds alone got it."""
        return turn.ttft <= (self.ttft or 10 + 2 * own) and turn.tpot <= self.tpot


def summarise(sim: Pipeline, goal: Goal | None = None) -> dict[str, Any]:
    """The figures of a run that has ended; seconds, bytes, tokens."""
    goal = goal or Goal()
    turns = sim.turns
    start, stop = min(t.at for t in turns), max(t.ended for t in turns)
    span = max(stop - start, 1e-9)
    machine = (sim.cluster.prefill or sim.cluster.decode)[0]
    own = [machine.profile.prefill_s(t.held, t.prompt - 1, machine.forward) for t in turns]
    good = sum(goal.met(turn, alone) for turn, alone in zip(turns, own, strict=True))
    output = sum(turn.output for turn in turns)
    return {
        "requests": len(turns),
        "span_s": round(span, 3),
        "output_tokens_s": round(output / span, 3),
        "ttft_s": spread(turn.ttft for turn in turns),
        "tpot_s": spread(turn.tpot for turn in turns if turn.output > 1),
        "itl_s": weighted(sim.gaps),
        "total_s": spread(turn.ended - turn.at for turn in turns),
        "goodput": {
            "share": round(good / len(turns), 4),
            "requests_s": round(good / span, 5),
            "ttft_s": goal.ttft or "10 + 2 x its own prefill",
            "tpot_s": goal.tpot,
        },
        "utilisation": {
            **{node.name: round(node.busy.seconds / span, 4) for node in sim.prefill},
            **{name: round(node.busy.seconds / span, 4) for name, node in sim.decode.items()},
            **{f"link-{name}": round(busy / span, 4) for name, busy in sim.link_busy.items()},
        },
        "waits_s": {
            "prefill": spread(t.begun - t.at for t in turns if t.stage == "prefill"),
            "link": spread(t.handed - t.prefilled for t in turns if t.handed >= 0),
            "decode": spread(
                t.admitted - (t.handed if t.stage == "prefill" else t.at)
                for t in turns
                if t.admitted >= 0
            ),
        },
        "bytes": {"link": round(sum(t.moved for t in turns)), "stored": round(sim.stock.written)},
        "cache": _cache(turns),
        "evictions": sim.stock.evicted,
        "store_high": round(sim.stock.high),
        "parked": sum(turn.parked for turn in turns),
    }


def _cache(turns: Sequence[Turn]) -> dict[str, Any]:
    """How often a state was there for those that continue something, and what it saved."""
    paths = Counter(turn.path for turn in turns)
    later = [turn for turn in turns if turn.previous is not None]
    hits = sum(turn.held > 0 for turn in later)
    return {
        "hit_rate": round(hits / len(later), 4) if later else None,
        "tokens_held": round(sum(t.held for t in turns) / sum(t.prompt for t in turns), 4),
        "paths": dict(sorted(paths.items())),
    }


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles, or None of nothing."""
    found = sorted(values)
    if not found:
        return None
    last = len(found) - 1
    return {
        "mean": round(sum(found) / len(found), 4),
        "p50": round(found[round(0.5 * last)], 4),
        "p95": round(found[round(0.95 * last)], 4),
        "p99": round(found[round(0.99 * last)], 4),
        "max": round(found[last], 4),
    }


def weighted(counts: Counter[float]) -> dict[str, float] | None:
    """The same of values that occur so many times each."""
    total = sum(counts.values())
    if not total:
        return None
    found: dict[str, float] = {
        "mean": round(sum(value * count for value, count in counts.items()) / total, 5)
    }
    for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        seen, wanted = 0, part * (total - 1)
        for value in sorted(counts):
            seen += counts[value]
            if seen > wanted:
                found[name] = value
                break
    return found
