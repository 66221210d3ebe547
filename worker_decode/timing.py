"""Where a row's time goes between its start and its last token, at a few clock reads a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.rows import Event
from scheduler.ledger.notes import Notes


class Sums(NamedTuple):
    """Seconds of the engine's loop so far: forwards and choosing, prompt chunks among the steps,
    telling what came, looking after conversations between turns; and steps."""

    forward: float = 0.0
    chunks: float = 0.0
    tell: float = 0.0
    care: float = 0.0
    steps: int = 0


class Loop:
    """Adds up what the steps of one engine are made of."""

    def __init__(self) -> None:
        self.sums = Sums()

    def step(self, began: float, stepped: float, told: float, extended: float, now: float) -> None:
        """One step: its forwards until `stepped`, of which `extended` s for a prompt's chunk."""
        sums = self.sums
        self.sums = Sums(
            sums.forward + (stepped - began - extended),
            sums.chunks + extended,
            sums.tell + (told - stepped),
            sums.care + (now - told),
            sums.steps + 1,
        )


class Watch:
    """The stages of one row, written into its run's notes."""

    def __init__(self, notes: Notes, loop: Loop) -> None:
        self._notes = notes
        self._loop = loop
        self._mark = time.monotonic()
        self._first: float | None = None
        self._before = Sums()
        self._tokens = 0

    def chunk(self, tokens: int, began: float, ended: float) -> None:
        """A chunk of the row's own prompt; until then the other rows had their turn."""
        self._notes.chunk(self._mark, (began - self._mark, ended - began), tokens)
        self._mark = ended

    def token(self, at: float) -> None:
        """A token has been chosen."""
        if self._first is None:
            self._notes.add("first decode", self._mark, at)
            self._first = self._mark = at
            self._before = self._loop.sums
        self._tokens += 1

    def end(self, at: float | None = None) -> None:
        """The row has ended, by itself or by somebody else."""
        now = time.monotonic() if at is None else at
        if self._first is None:
            self._notes.add("first decode", self._mark, now, tokens=0)
        elif now > self._mark:
            self._notes.add("decode", self._mark, now, **self._parts(now))
        self._mark = now

    def _parts(self, now: float) -> dict[str, Any]:
        """What the time since the first token was made of."""
        after, before = self._loop.sums, self._before
        parts = {
            name: round(getattr(after, name) - getattr(before, name), 6)
            for name in ("forward", "chunks", "tell", "care")
        }
        spent = sum(parts.values())
        return {
            "tokens": self._tokens - 1,
            "steps": after.steps - before.steps,
            "of": {**parts, "loop": round(max(0.0, now - self._mark - spent), 6)},
        }


def note_forks(notes: Notes, facts: Mapping[str, Any], drafting: str, event: Event) -> None:
    """Which ways a row's decoding took; `facts` are the batch's, `drafting` says why no drafter."""
    if any(width > 1 for width in event.widths):
        notes.fork("decode", "batched")
    else:
        notes.fork("decode", "one row", str(facts["reason"]) or "no other row was there")
    speculation = facts.get("speculation")
    if speculation is None:
        notes.fork("drafter", "none", drafting)
    elif event.drafted:
        notes.fork("drafter", str(speculation["drafter"]), drafting)
    else:
        notes.fork("drafter", "not used", str(speculation["reason"]) or "slower, or no guess")
