"""Conversations between two turns, kept in the model's memory until they are idle."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from worker_decode.memory import Memory


@dataclass
class Held:
    """The state after a turn: `caches` hold exactly `ids`; `pending` follows and is not in them.

    `schedule` says by which forwards the state came about ([length, count], ...).
    """

    turn: str
    caches: list[Any]
    ids: list[int]
    pending: list[int]
    schedule: list[list[int]]
    rope_delta: int
    nbytes: int
    stored: int = 0
    """Tokens of which the store holds the rows already."""
    base: str | None = None
    """The turn under which the store holds them."""
    used: float = field(default_factory=time.monotonic)


class Hot:
    """Held states by turn, least recently used first. Used by the engine's thread alone."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: OrderedDict[str, Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, turn: str) -> bool:
        return turn in self._held

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    def put(self, held: Held) -> None:
        """Keep a state; its memory is in use already, so it is counted even beyond the budget.

        One of the same turn, from a run that was repeated, gives way.
        """
        self.take(held.turn)
        self._memory.take(held.nbytes)
        self._held[held.turn] = held

    def get(self, turn: str) -> Held | None:
        """The state after `turn`, which stays here."""
        return self._held.get(turn)

    def take(self, turn: str) -> Held | None:
        """Take a state out: whoever continues it owns its caches from then on."""
        held = self._held.pop(turn, None)
        if held is not None:
            self._memory.release(held.nbytes)
        return held

    def idle(self, seconds: float) -> list[str]:
        """Turns whose state nobody has continued for so many seconds, oldest first."""
        limit = time.monotonic() - seconds
        return [turn for turn, held in self._held.items() if held.used <= limit]

    def oldest(self) -> str | None:
        """The turn whose state has waited longest."""
        return next(iter(self._held), None)

    def turns(self) -> list[str]:
        """All turns held, oldest first."""
        return list(self._held)
