"""Pieces of event logs that are kept for a while, for others who read the same."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from scheduler.events import Event, Logged

KEPT_BYTES = 4 << 20
"""Of all pieces together, as the logs have them: in memory they take ten times as much."""
KEPT_FOR = 60.0
"""Seconds after its last use for which a piece is kept."""

Name = tuple[str, float, int]
"""Whose log (the response and when it was created), and the number that the piece comes after."""


class Slice(list[Event]):
    """Events that were read from a log together; whoever reads a long one may get the same.

    `size`: their bytes in the log. `told`: what a client is told of them, made by the first who
    needed it.
    """

    __slots__ = ("size", "told", "used")

    def __init__(self, new: list[Event]) -> None:
        super().__init__(new)
        self.size = new.size if isinstance(new, Logged) else 0
        self.told: tuple[list[bytes], str] | None = None
        self.used = time.monotonic()


class Slices:
    """The pieces that are kept, the least lately used first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Name, Slice] = OrderedDict()
        self._size = 0
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def epoch(self) -> int:
        """Changes when something is forgotten: what was read before must not be kept after."""
        return self._epoch

    def get(self, name: Name) -> Slice | None:
        """The piece, for one more reader."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                found.used = time.monotonic()
            return found

    def put(self, name: Name, made: Slice, epoch: int) -> None:
        """Keep a piece that was read when `epoch` was the present one."""
        with self._lock:
            if epoch != self._epoch:
                return
            self._remove(name)
            self._kept[name] = made
            self._size += made.size
            while self._size > KEPT_BYTES:
                self._remove(next(iter(self._kept)))

    def forget(self, response: str | None = None) -> None:
        """Drop what is kept of a response, or everything."""
        with self._lock:
            self._epoch += 1
            for name in list(self._kept):
                if response in (None, name[0]):
                    self._remove(name)

    def age(self) -> None:
        """Drop what nobody has used for long; cheap, to be called now and then."""
        late = time.monotonic() - KEPT_FOR
        with self._lock:
            while self._kept and next(iter(self._kept.values())).used < late:
                self._remove(next(iter(self._kept)))

    def _remove(self, name: Name) -> None:
        gone = self._kept.pop(name, None)
        self._size -= gone.size if gone else 0
