"""Whether proposing tokens is faster than plain decoding, by the clock."""

from __future__ import annotations

import statistics
from collections import deque

REST_ROUNDS = 64  # steps without proposals after they did not pay
# Rounds are compared with plain steps of the same width; each time they lose they rest for longer.
PLAIN_STEPS, TRIED_ROUNDS, LONGEST_REST = 2, 8, 4096


class Pace:
    """Whether rounds of one batch width give more tokens a second than plain steps."""

    def __init__(self, width: int) -> None:
        self.rest = 0
        self._width = width
        self._plain: deque[float] = deque(maxlen=TRIED_ROUNDS)
        self._rounds: deque[tuple[int, float]] = deque(maxlen=TRIED_ROUNDS)
        self._next_rest = REST_ROUNDS

    @property
    def known(self) -> bool:
        """Whether there is something to compare rounds with."""
        return len(self._plain) >= PLAIN_STEPS

    def plain(self, seconds: float) -> None:
        """A plain step took so long."""
        self._plain.append(seconds)

    def round(self, tokens: int, seconds: float) -> None:
        """A round with proposals gave so many tokens, over all rows, in so many seconds."""
        self._rounds.append((tokens, seconds))
        if len(self._rounds) < TRIED_ROUNDS or not self.known:
            return
        given, spent = (sum(column) for column in zip(*self._rounds, strict=True))
        if given * statistics.median(self._plain) >= self._width * spent:
            self._next_rest = REST_ROUNDS
            return
        self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._rounds.clear()
        self._plain.clear()
