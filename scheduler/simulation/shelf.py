"""The simulated store: which states are there, and which go, by the product's own scores."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.simulation.cluster import Shelf, Turn
from store.environment import LIVE_CEILING
from store.eviction import STATES_PER_COMMIT
from store.reuse import Class, Reuse, class_of, going_back

#: States compared in one step, from the longest unused on.
SCAN = 128
#: Turns after which reuse is learned anew: less often than in the product, which has more time.
LEARN = 1000


@dataclass(slots=True)
class _State:
    turn: Turn
    tokens: int
    rows: float
    fixed: float
    used: float
    saved: float
    kind: Class
    parent: int | None
    continued: bool = False

    @property
    def own(self) -> float:
        return self.rows + self.fixed


class Stock:
    """States of turns by number. A state covers the prompt and the answer but its last token."""

    def __init__(self, shelf: Shelf, state: tuple[float, float]) -> None:
        """`state`: bytes of an empty one, and per token."""
        self._shelf = shelf
        self._fixed, self._per_token = state
        self._states: dict[int, _State] = {}
        self.reuse = Reuse(LEARN)
        self.used = 0.0
        self.evicted = 0
        self.written = 0.0
        self.high = 0.0

    def nearest(self, turn: Turn, turns: list[Turn], now: float) -> tuple[int, str, float]:
        """(tokens held, path, seconds to read it) for a turn that continues another.

        `hot`: it is in memory; `restored`; `recomputed`: neither it nor an earlier one is there.
        """
        number = turn.previous
        if number is None and turn.cached > 0:  # its conversation began before this run
            return turn.cached, "restored", self._reading(turn.cached)
        while number is not None and turn.cached:
            state = self._states.get(number)
            if state is not None:
                state.used = now
                self._states[number] = self._states.pop(number)  # the longest unused come first
                held = min(state.tokens, turn.prompt - 1)
                if turn.cached > 0 and number == turn.previous:
                    held = min(held, turn.cached)
                if number == turn.previous and now - state.saved < self._shelf.hot_s:
                    return held, "hot", 0.0
                return held, "restored", self._reading(held)
            number = turns[number].previous
        return 0, "recomputed", 0.0

    def _reading(self, tokens: int) -> float:
        rate = self._shelf.read_rate
        return (self._fixed + self._per_token * tokens) / rate if rate else 0.0

    def put(self, turn: Turn, now: float) -> None:
        """Keep the state of a turn that has ended, making room for it first."""
        tokens = turn.prompt + turn.output - 1
        parent = self._states.get(turn.previous) if turn.previous is not None else None
        shared = min(parent.tokens, tokens) if parent else 0
        rows = self._per_token * (tokens - shared)
        self._make_room(rows + self._fixed, now)
        if parent is not None and parent.turn.number not in self._states:
            rows, parent = self._per_token * tokens, None  # it had to go meanwhile
        kind = class_of(turn.depth, turn.prompt - turn.held)
        self._states[turn.number] = _State(
            turn, tokens, rows, self._fixed, now, now, kind, parent.turn.number if parent else None
        )
        if parent is not None:
            parent.continued = True
        self.used += rows + self._fixed
        self.written += rows + self._fixed
        self.high = max(self.high, self.used)
        name = str(turn.number)
        before = None if turn.previous is None else str(turn.previous)
        self.reuse.turned(name, before, kind, now)

    def _make_room(self, need: float, now: float) -> None:
        size = self._shelf.size
        if not size or self.used + need <= size * LIVE_CEILING:
            return
        target = size * (LIVE_CEILING - 0.01) - need
        while self._states and self.used > target:
            oldest = []
            for state in self._states.values():
                oldest.append((self._standing(state, now), state.used, state.turn.number))
                if len(oldest) == SCAN:
                    break
            for _, _, number in sorted(oldest)[:STATES_PER_COMMIT]:
                if self.used <= target:
                    break
                self._drop(number)

    def _standing(self, state: _State, now: float) -> tuple[bool, float]:
        """As the product's evictor ranks: first what a later state continues, then by worth."""
        if state.continued:
            new = state.turn.prompt - state.turn.held
            return False, going_back(state.tokens, new, now - state.used, int(state.own))
        return True, self.reuse.worth(state.kind, now - state.used, state.tokens, int(state.own))

    def _drop(self, number: int) -> None:
        """Its rows stay for a state that goes on from it."""
        state = self._states.pop(number)
        self.evicted += 1
        heir = None
        if state.continued:
            heir = next((s for s in self._states.values() if s.parent == number), None)
        if heir is not None:
            heir.rows += state.rows
            heir.parent = state.parent
            self.used -= state.fixed
        else:
            self.used -= state.own
