"""How often each owner may ask: a bucket of tokens that fills evenly."""

from __future__ import annotations

import time
from collections.abc import Callable


class Rates:
    """Requests per minute by owner, in this process. A full minute's worth may come at once.

    Not thread-safe: lives in the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait(self, owner: str, per_minute: int) -> float:
        """Count one request; seconds to wait where it is one too many, 0 where it is not."""
        if per_minute <= 0:
            return 0.0
        now, each = self._clock(), 60.0 / per_minute
        left, at = self._buckets.get(owner, (float(per_minute), now))
        left = min(float(per_minute), left + (now - at) / each)
        if left < 1.0:
            self._buckets[owner] = (left, now)
            return (1.0 - left) * each
        self._buckets[owner] = (left - 1.0, now)
        return 0.0
