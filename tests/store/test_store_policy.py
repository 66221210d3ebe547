"""The eviction policy against plain LRU and against Marconi's rule, on a real trace.

The trace is replayed against a store that holds a tenth of the working set (all rows once and one
snapshot for each conversation). A request continues an earlier one when it shares all of that
one's whole blocks; the compute saved is that of the deepest stored ancestor. Sizes are those of
GLM-5.3-Flash. The first third of the trace fills the store and is not measured.

Marconi's rule: evict among states with at most one continuation that whose recency plus alpha times
FLOPs saved per byte, both scaled to [0, 1] over the candidates, is smallest. Alpha is the best of
a grid found on this very trace (soak), which favours it.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from store.reuse import Class, Reuse, class_of, cost, going_back

TRACE = Path(__file__).parents[1] / "data" / "mooncake" / "conversation.csv"
SNAPSHOT = 147_619_840
ROW = 11_451
BATCH = 16
ALPHAS = (0.03, 0.1, 0.3, 1.0) if os.environ.get("TANDEM_SOAK") else (0.1,)


@dataclass
class Request:
    at: float
    tokens_in: int
    tokens: int
    parent: int
    depth: int
    kind: Class


@dataclass
class Held:
    used: float
    below: int
    rows: int
    snapshot: bool = True
    continued: bool = False


def trace() -> list[Request]:
    requests: list[Request] = []
    with TRACE.open() as file:
        for row in csv.DictReader(file):
            tokens_in, shared = int(row["input_tokens"]), int(row["shared_blocks"])
            parent = int(row["nearest"])
            if parent >= 0:
                near = requests[parent]
                whole = near.tokens_in // 512
                if shared < max(whole, 2) or tokens_in < near.tokens_in or whole == 0:
                    parent = -1
            depth = requests[parent].depth + 1 if parent >= 0 else 0
            before = requests[parent].tokens if parent >= 0 else 0
            tokens = tokens_in + int(row["output_tokens"])
            kind = class_of(depth, tokens_in - before)
            requests.append(Request(float(row["seconds"]), tokens_in, tokens, parent, depth, kind))
    return requests


class Policy(Protocol):
    def turned(self, number: int, request: Request) -> None: ...
    def rank(self, replay: Replay, now: float) -> Callable[[int], object]: ...


@dataclass
class Replay:
    """A store of whole states over a tree of rows, each request's rows kept once."""

    requests: list[Request]
    capacity: float
    policy: Policy
    held: dict[int, Held] = field(default_factory=dict)
    above: Counter[int] = field(default_factory=Counter)
    used: float = 0
    saved: list[float] = field(default_factory=list)

    def run(self) -> float:
        for number, request in enumerate(self.requests):
            self.policy.turned(number, request)
            at = request.parent
            while at >= 0 and not (at in self.held and self.held[at].snapshot):
                at = self.requests[at].parent
            self.saved.append(cost(self.requests[at].tokens) if at >= 0 else 0.0)
            if at >= 0:
                self.held[at].used = request.at
                self.held[at].continued = True
            below = request.parent
            while below >= 0 and below not in self.held:
                below = self.requests[below].parent
            rows = ROW * (request.tokens - (self.requests[below].tokens if below >= 0 else 0))
            if not self.make_room(rows + SNAPSHOT, {at, below}, request.at):
                continue
            self.held[number] = Held(request.at, below, rows)
            self.above[below] += 1
            self.used += rows + SNAPSHOT
        return sum(self.saved[len(self.requests) // 3 :])

    def make_room(self, need: float, keep: set[int], now: float) -> bool:
        if self.used + need <= self.capacity:
            return True
        target = self.capacity * 0.99 - need  # a little ahead, as the store does
        while self.used > target:
            candidates = [n for n, one in self.held.items() if one.snapshot and n not in keep]
            if not candidates:
                return False
            for victim in sorted(candidates, key=self.policy.rank(self, now))[:BATCH]:  # type: ignore[arg-type]
                if self.used <= target:
                    break
                self.evict(victim)
        return True

    def evict(self, number: int) -> None:
        self.held[number].snapshot = False
        self.used -= SNAPSHOT
        while number in self.held and not self.above[number] and not self.held[number].snapshot:
            one = self.held.pop(number)
            self.used -= one.rows
            self.above[one.below] -= 1
            number = one.below

    def own(self, number: int) -> int:
        return SNAPSHOT + (0 if self.above[number] else self.held[number].rows)


class Lru:
    def turned(self, number: int, request: Request) -> None:
        pass

    def rank(self, replay: Replay, now: float) -> Callable[[int], object]:
        return lambda number: (replay.held[number].used, number)


class Marconi(Lru):
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def rank(self, replay: Replay, now: float) -> Callable[[int], object]:
        held = [n for n, one in replay.held.items() if one.snapshot and replay.above[n] <= 1]
        recency = {n: 1 / (now - replay.held[n].used + 1) for n in held}
        gain = {n: self.gain(replay, n) / replay.own(n) for n in held}

        def scaled(values: dict[int, float]) -> dict[int, float]:
            low, high = min(values.values()), max(values.values())
            return {n: (value - low) / ((high - low) or 1) for n, value in values.items()}

        recency, gain = scaled(recency), scaled(gain)
        return lambda n: recency[n] + self.alpha * gain[n] if n in recency else 1e9

    def gain(self, replay: Replay, number: int) -> float:
        below = replay.held[number].below
        while below >= 0 and not replay.held[below].snapshot:
            below = replay.held[below].below
        base = cost(replay.requests[below].tokens) if below >= 0 else 0.0
        return cost(replay.requests[number].tokens) - base


class Ours(Lru):
    """What `store.eviction` ranks by: continued states first, then the least worth."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.reuse = Reuse()

    def turned(self, number: int, request: Request) -> None:
        parent = str(request.parent) if request.parent >= 0 else None
        self.reuse.turned(str(number), parent, request.kind, request.at)

    def rank(self, replay: Replay, now: float) -> Callable[[int], object]:
        def key(number: int) -> object:
            one, request = replay.held[number], self.requests[number]
            age = now - one.used
            own = SNAPSHOT + one.rows
            if one.continued:
                new = request.tokens_in - self.before(request)
                return False, going_back(request.tokens, new, age, own), one.used
            return True, self.reuse.worth(request.kind, age, request.tokens, own), one.used

        return key

    def before(self, request: Request) -> int:
        return self.requests[request.parent].tokens if request.parent >= 0 else 0


def test_more_compute_is_saved_than_by_lru_and_marconi() -> None:
    requests = trace()
    rows = sum(
        one.tokens - (requests[one.parent].tokens if one.parent >= 0 else 0) for one in requests
    )
    working_set = ROW * rows + SNAPSHOT * sum(one.parent < 0 for one in requests)
    capacity = working_set / 10
    lru = Replay(requests, capacity, Lru()).run()
    ours = Replay(requests, capacity, Ours(requests)).run()
    marconi = max(Replay(requests, capacity, Marconi(alpha)).run() for alpha in ALPHAS)
    print(f"compute saved against LRU: ours {ours / lru:.3f}, Marconi {marconi / lru:.3f}")
    assert ours >= 1.2 * lru
    assert ours >= marconi


def test_what_was_learned_survives_packing() -> None:
    requests = trace()[:3000]
    policy = Ours(requests)
    for number, request in enumerate(requests):
        policy.turned(number, request)
    policy.reuse.turned("last", None, (0, 0), requests[-1].at)
    packed = policy.reuse.pack()
    again = Reuse()
    again.unpack(packed)
    policy.reuse._refresh()
    for kind in {request.kind for request in requests}:
        for age in (0, 10, 100, 1000, 10_000):
            assert abs(again.rate(kind, age) - policy.reuse.rate(kind, age)) < 1e-12
    # Deep conversations are likelier to go on; nothing stays worth its place for ever.
    assert again.rate((5, 6), 60) > again.rate((0, 12), 60)
    assert again.rate((5, 6), 20_000) < again.rate((5, 6), 60) / 10
