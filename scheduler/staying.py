"""Whether an answer goes on where its prompt was computed, or moves to the decode node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scheduler.redis_client import AWAY

Mode = Literal["late", "prompt"]

#: Seconds between two looks at who waits: a Redis round trip is a hundredth of that.
LOOK = 0.02


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided at a prompt's end, and why; the response's details show it."""

    stay: bool
    reason: str


def choose(mode: Mode, waiting: int, here: float, there: float) -> Choice:
    """Decode on at the prefill node, or hand off at the prompt's end.

    `waiting`: prompts that wait for this node. `here`, `there`: tokens/s that the answer would get
    on this node, and in the decode node's batch with one row more; 0 where not measured.

    The client of a lone request is served best by the faster decoder. Once something waits, a
    prefill node that decodes at a rate r holds up the queue's whole next prefill for each token,
    and decoding is what the other node is for.
    """
    if mode == "prompt":
        return Choice(False, "prefill.handoff is prompt")
    if waiting:
        return Choice(False, f"{waiting} waiting for this node")
    if not here or not there:
        return Choice(False, "rates are not measured: run `tandem calibrate` on both nodes")
    rates = f"{here:.3g} tokens/s here, {there:.3g} there"
    return Choice(here >= there, rates)


class Staying:
    """One answer on the prefill node: called before every decode step, true to go on here."""

    def __init__(
        self,
        check: Callable[[], None],
        waiting: Callable[[], int],
        choice: Callable[[int], Choice],
        begin: Callable[[], None],
    ) -> None:
        """`check` raises what ends a run; `waiting` counts who waits, and may fail while Redis is
        away; `choice(waiting)` is asked once, and `begin` called once if it is to stay."""
        self._check = check
        self._waiting = waiting
        self._choice = choice
        self._begin = begin
        self._looked = 0.0
        self.chosen: Choice | None = None
        self.left = ""

    @property
    def began(self) -> bool:
        """Whether decoding has begun here."""
        return self.chosen is not None and self.chosen.stay

    def __call__(self) -> bool:
        """Whether the next step is made here; raises what `check` raises."""
        self._check()
        if self.left or (self.chosen is not None and not self.chosen.stay):
            return False
        now = time.monotonic()
        if self.chosen is not None and now - self._looked < LOOK:
            return True
        self._looked = now
        try:
            waiting = self._waiting()
        except AWAY:
            waiting = 0 if self.chosen is not None else 1  # nobody can be admitted meanwhile
        if self.chosen is None:
            self.chosen = self._choice(waiting)
            if self.chosen.stay:
                self._begin()
            return self.chosen.stay
        if waiting:
            self.left = f"{waiting} waiting for this node"
        return not waiting

    def leave(self, reason: str) -> None:
        """Hand off at the next token, for example because the worker is to stop."""
        self.left = self.left or reason
