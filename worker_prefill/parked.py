"""Unfinished prefills that may go on: set aside for a better job, or given up by their client."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.prefill import Prefill


@dataclass(frozen=True)
class _Entry:
    run: Prefill
    nbytes: int
    since: float


class Parked:
    """A few states of prompt beginnings, within bounds of number, bytes and seconds.

    A recurrent state cannot be cut back, so one serves only prompts that begin with exactly the
    tokens it holds. Used by the engine's thread alone.
    """

    def __init__(
        self,
        limit: int,
        nbytes: int,
        lifetime: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._bytes = nbytes
        self._lifetime = lifetime
        self._clock = clock
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""
        return sum(entry.nbytes for entry in self._entries)

    def put(self, run: Prefill, nbytes: int) -> bool:
        """Keep `run` as it stands, at the cost of the oldest; False where it is too large."""
        self._expire()
        if not self.limit or not run.position or nbytes > self._bytes:
            return False
        while len(self._entries) >= self.limit or self.nbytes + nbytes > self._bytes:
            del self._entries[0]
        self._entries.append(_Entry(run, nbytes, self._clock()))
        return True

    def take(self, ids: Sequence[int]) -> Prefill | None:
        """The one that holds most of the beginning of `ids`, which leaves; None without any."""
        self._expire()
        fitting = [
            entry
            for entry in self._entries
            if entry.run.position < len(ids)
            and entry.run.ids[: entry.run.position] == list(ids[: entry.run.position])
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda entry: entry.run.position)
        self._entries.remove(best)
        return best.run

    def _expire(self) -> None:
        oldest = self._clock() - self._lifetime
        self._entries = [entry for entry in self._entries if entry.since >= oldest]
