"""Redis TIME on a local clock: what two processes compare is told in it, durations never are."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import redis

#: How fast two clocks may part: a hundred parts in a million is more than quartz does.
DRIFT = 1e-4
_KEEP = 32
#: An answer that is known to within this many seconds needs no further question.
GOOD = 0.001


class _Sample(NamedTuple):
    at: float
    offset: float
    width: float


class Clock:
    """Turns moments of this process's monotonic clock into seconds of Redis TIME. Thread-safe.

    Every answer of Redis that carries its time is a sample: it was read between sending and
    receiving, so the shortest round trip tells the offset best (Cristian's algorithm).
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_KEEP)
        self._lock = threading.Lock()

    def sample(self, before: float, server: float, after: float) -> None:
        """Redis read `server` between the local moments `before` and `after`."""
        middle, width = (before + after) / 2, (after - before) / 2
        with self._lock:
            self._samples.append(_Sample(middle, server - middle, width))

    def ask(self, client: redis.Redis, times: int = 1) -> None:
        """Ask Redis for its time, so many round trips. Raises what Redis raises."""
        for _ in range(times):
            before = time.monotonic()
            seconds, micros = cast("Sequence[Any]", client.time())
            self.sample(before, int(seconds) + int(micros) / 1e6, time.monotonic())

    def settle(self, client: redis.Redis) -> None:
        """Ask only where the time is not known well by now."""
        if self.error > GOOD:
            self.ask(client, 1 if self._samples else 3)

    def redis(self, moment: float) -> float:
        """Seconds of Redis TIME at a moment of `time.monotonic`."""
        return moment + self.offset

    @property
    def offset(self) -> float:
        """Redis TIME less `time.monotonic`; the machine's own clock where nothing was heard yet."""
        best = self._best()
        return time.time() - time.monotonic() if best is None else best.offset

    @property
    def error(self) -> float:
        """By how many seconds the offset may be wrong; infinite before the first sample."""
        best = self._best()
        return float("inf") if best is None else _error(best, time.monotonic())

    def _best(self) -> _Sample | None:
        now = time.monotonic()
        with self._lock:
            return min(self._samples, key=lambda sample: _error(sample, now), default=None)


def _error(sample: _Sample, now: float) -> float:
    return sample.width + DRIFT * abs(now - sample.at)
