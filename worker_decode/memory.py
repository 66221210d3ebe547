"""One budget for all model state that waits in memory: received, or between two turns."""

from __future__ import annotations

import threading
import time


class Memory:
    """A number of bytes that is promised before it is used. Thread-safe.

    `wanted` tells the owner of what could be given up (idle conversations) how many bytes somebody
    is waiting for.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._wanted: list[int] = []
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        return self._used

    @property
    def wanted(self) -> int:
        """Bytes over the limit that those who wait now would need, 0 when nobody waits."""
        with self._changed:
            return max(0, self._used + sum(self._wanted) - self.limit) if self._wanted else 0

    def reserve(self, nbytes: int, wait: float = 0.0) -> bool:
        """Promise `nbytes`, waiting up to `wait` seconds for others to release; False if not."""
        if nbytes > self.limit:
            return False
        end = time.monotonic() + wait
        with self._changed:
            self._wanted.append(nbytes)
            try:
                while self._used + nbytes > self.limit:
                    left = end - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(left)
                self._used += nbytes
                return True
            finally:
                self._wanted.remove(nbytes)

    def spare(self, nbytes: int) -> bool:
        """Promise `nbytes` at once, where there is as much beside what all who wait need."""
        with self._changed:
            if self._used + sum(self._wanted) + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def take(self, nbytes: int) -> None:
        """Account for bytes that exist already, whether they fit or not."""
        with self._changed:
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        """Give bytes back. Raises ValueError for more than are in use: an account is wrong."""
        with self._changed:
            if nbytes > self._used:
                raise ValueError(f"{nbytes} bytes given back of {self._used} in use")
            self._used -= nbytes
            self._changed.notify_all()
