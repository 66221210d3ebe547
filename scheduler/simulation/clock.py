"""Simulated time: what happens next, in order of time and then of who asked first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A queue of calls to come. Times are seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time that is not past."""
        heapq.heappush(self._due, (max(when, self.now), next(self._order), call))

    def run(self) -> None:
        """Make every call, until none is left."""
        due = self._due
        while due:
            self.now, _, call = heapq.heappop(due)
            call()


class Busy:
    """The times for which a machine works."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.spans: list[tuple[float, float]] = []

    def add(self, start: float, stop: float) -> None:
        """It works from `start` to `stop`; spans come in order."""
        self.seconds += stop - start
        if self.spans and start - self.spans[-1][1] < 1e-9:
            self.spans[-1] = (self.spans[-1][0], stop)
        elif stop > start:
            self.spans.append((start, stop))
