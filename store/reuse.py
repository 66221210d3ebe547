"""How likely a stored state is to be used again, learned from the conversations themselves.

A conversation that has gone on for many turns goes on far more often than one that was just
begun, and most continuations come within minutes. For each class of turns (how deep in its
conversation, how long its new input) the hazard of being continued is counted by age in
logarithmic steps; thin classes lean on the class of their depth, and that on all turns. The worth
of keeping a state is its best expected rate of reuse over any horizon (the Gittins index of a job
that may end at any step), times the compute that a reuse saves, over the bytes it takes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any

STEPS = 20
FIRST_SECONDS = 8.0
GROWTH = 1.5
MAX_DEPTH = 5
ATTENTION_TOKENS = 100_000
"""Length at which the quadratic part of a prefill's cost equals half of its linear part."""
MAX_OPEN = 50_000
BACK_SECONDS = 60.0
"""Added to the time that a state was not used which is only gone back to."""
REFRESH = 200
_STARTS = [FIRST_SECONDS * GROWTH**step for step in range(STEPS - 1)]
_EDGES = [0.0] + [FIRST_SECONDS * GROWTH**step for step in range(STEPS)]
_PRIOR, _PRIOR_WEIGHT = 0.05, 2.0
_LEAN_DEPTH, _LEAN_CLASS = 10.0, 10.0

Class = tuple[int, int]


def class_of(depth: int, new_tokens: int) -> Class:
    """(turns before this one, capped; log2 of the new input tokens)."""
    return min(depth, MAX_DEPTH), int(math.log2(max(new_tokens, 0) + 1))


def step_of(age: float) -> int:
    """The logarithmic step that an age in seconds falls into."""
    return bisect_right(_STARTS, age)


def cost(tokens: int) -> float:
    """Compute of a prefill of `tokens` tokens, in tokens of a short one."""
    return tokens * (1 + tokens / (2 * ATTENTION_TOKENS))


def going_back(tokens: int, new: int, age: float, nbytes: int) -> float:
    """What keeping a state is worth per byte that only an edit, a branch or a repeated turn would
    use: the compute of its last `new` tokens, over the time it was not used."""
    gain = cost(tokens) - cost(max(0, tokens - new))
    return gain / max(nbytes, 1) / (max(age, 0.0) + BACK_SECONDS)


class Reuse:
    """Counts of turns and of their continuations; not thread-safe.

    `refresh`: turns after which the rates are computed anew.
    """

    def __init__(self, refresh: int = REFRESH) -> None:
        self._refresh_after = refresh
        self._open: dict[str, tuple[Class, float]] = {}
        self._reached: dict[Class, list[float]] = {}
        self._reused: dict[Class, list[float]] = {}
        self._rates: dict[Class, list[float]] = {}
        self._default: list[float] = _rates([_PRIOR] * STEPS)
        self._since = 0
        self._now = 0.0

    def turned(self, turn: str, parent: str | None, kind: Class, now: float) -> None:
        """A turn was stored at `now` (seconds) after `parent`."""
        self._now = max(self._now, now)
        if parent is not None and parent in self._open:
            parent_kind, born = self._open.pop(parent)
            step = step_of(now - born)
            self._count(self._reached, parent_kind, range(step + 1))
            self._count(self._reused, parent_kind, [step])
        self._open[turn] = (kind, now)
        if len(self._open) > MAX_OPEN:
            oldest, (old_kind, born) = next(iter(self._open.items()))
            del self._open[oldest]
            self._count(self._reached, old_kind, range(step_of(now - born)))
        self._since += 1
        if self._since >= self._refresh_after:
            self._refresh()

    def rate(self, kind: Class, age: float) -> float:
        """Best expected uses per second of a state unused for `age` seconds."""
        return self._rates.get(kind, self._default)[step_of(age)]

    def worth(self, kind: Class, age: float, tokens: int, nbytes: int) -> float:
        """What keeping a state is worth per byte: rate of use times compute saved by a use."""
        return self.rate(kind, age) * cost(tokens) / max(nbytes, 1)

    def pack(self) -> list[Any]:
        """What was learned, as plain msgpack types; open turns count as not continued so far."""
        reached = self._exposures()
        return [[[*kind, reached[kind], self._reused.get(kind, [0.0] * STEPS)] for kind in reached]]

    def unpack(self, data: list[Any]) -> None:
        """Go on from what `pack` gave."""
        for depth, new, reached, reused in data[0]:
            if len(reached) == len(reused) == STEPS:
                self._reached[depth, new] = list(reached)
                self._reused[depth, new] = list(reused)
        self._refresh()

    # ------------------------------------------------------------------ counting

    def _count(self, table: dict[Class, list[float]], kind: Class, steps: Iterable[int]) -> None:
        counts = table.setdefault(kind, [0.0] * STEPS)
        for step in steps:
            counts[step] += 1

    def _exposures(self) -> dict[Class, list[float]]:
        """For each class, how many turns were still unused at the end of each step, or reused in
        it: those decided and those still open."""
        result = {kind: list(counts) for kind, counts in self._reached.items()}
        ages = Counter((kind, step_of(self._now - born)) for kind, born in self._open.values())
        for (kind, age), number in ages.items():
            counts = result.setdefault(kind, [0.0] * STEPS)
            for step in range(age):
                counts[step] += number
        return result

    def _refresh(self) -> None:
        self._since = 0
        reached = self._exposures()
        everything = _summed(reached.values()), _summed(self._reused.values())
        general = _hazard(*everything, [_PRIOR] * STEPS, _PRIOR_WEIGHT)
        by_depth = {}
        for depth in range(MAX_DEPTH + 1):
            kinds = [kind for kind in reached if kind[0] == depth]
            counts = (
                _summed(reached[kind] for kind in kinds),
                _summed(self._reused[kind] for kind in kinds if kind in self._reused),
            )
            by_depth[depth] = _hazard(*counts, general, _LEAN_DEPTH)
        none = [0.0] * STEPS
        self._rates = {
            kind: _rates(
                _hazard(counts, self._reused.get(kind, none), by_depth[kind[0]], _LEAN_CLASS)
            )
            for kind, counts in reached.items()
        }
        self._default = _rates(general)


def _summed(tables: Iterable[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*tables, strict=True)] or [0.0] * STEPS


def _hazard(
    reached: list[float], reused: list[float], prior: list[float], weight: float
) -> list[float]:
    """Probability of being used in each step, given it was not before."""
    return [
        min(0.95, (reused[step] + prior[step] * weight) / (reached[step] + weight))
        for step in range(STEPS)
    ]


def _rates(hazard: list[float]) -> list[float]:
    """For each age step, max over horizons of P(use by then) / E(seconds until use or then)."""
    result = []
    for first in range(STEPS):
        best, alive, gained, spent = 0.0, 1.0, 0.0, 0.0
        for step in range(first, STEPS):
            wide = _EDGES[step + 1] - _EDGES[step]
            gained += alive * hazard[step]
            spent += alive * wide * (0.5 if step == first else 1.0) * (1 - hazard[step] / 2)
            alive *= 1 - hazard[step]
            best = max(best, gained / spent)
        result.append(best)
    return result
