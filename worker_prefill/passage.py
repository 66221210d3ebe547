"""One prompt's state on its way through this node: computed, packed and sent part by part.

Whole blocks leave as soon as they are computed, those of an answer that is begun here as well, so
that at the end only the last rows and the snapshot remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from engine.model import Caches
from engine.prefill import Prefill, append_schedule, ends_of
from scheduler.ledger.notes import Notes
from store.codec.header import Piece
from store.codec.layout import Layout
from store.codec.pack import Exporter
from worker_decode.marks import Marks
from worker_prefill.handoff import Handoff
from worker_prefill.late import Live


@dataclass
class Begun:
    """A prefill as it is taken up: `known` tokens of its beginning are at the decode node too."""

    run: Prefill
    schedule: list[list[int]] = field(default_factory=list)
    rope_delta: int = 0
    known: int = 0
    borrowed: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    passed: list[Piece] = field(default_factory=list)
    """Snapshots at marks before `run` as it is taken up, which another hand-off did not bring."""

    def first(self, layout: Layout) -> int:
        """The first token whose rows travel."""
        return self.known - self.known % layout.block_tokens

    @property
    def apart(self) -> list[int]:
        """The marks at which a snapshot is still to be taken."""
        return [mark for mark in self.marks.before if mark > self.run.position]

    def nbytes(self, layout: Layout, tokens: int) -> int:
        """The most bytes that travel of a state that grows to `tokens` tokens."""
        return layout.state_bytes(tokens) - layout.rows_bytes(0, self.first(layout))

    def apart_bytes(self, layout: Layout) -> int:
        """Bytes of the snapshots at the marks."""
        passed = sum(piece.payload.nbytes for piece in self.passed)
        return passed + sum(
            layout.state_bytes(mark) - layout.rows_bytes(0, mark) for mark in self.apart
        )


class Passage:
    """Used on the thread that loaded the model, until `last` has returned."""

    def __init__(
        self,
        begun: Begun,
        ids: Sequence[int],
        layout: Layout,
        handoff: Handoff,
        notes: Notes,
        *,
        answers: bool,
    ) -> None:
        """`ids` are the prompt's, `answers` says whether its answer may be begun here."""
        self.handoff = handoff
        self.run = begun.run
        self.schedule = begun.schedule
        self.begun_at = begun.run.position
        self.live: Live | None = None
        self.stands = True
        """Whether the state is still that of the prompt, so that it can be kept for another."""
        self.apart: list[Piece] = list(begun.passed)
        """Snapshots at marks of the prompt, as far as it has come."""
        self._begun = begun
        self._places = begun.apart
        self._notes = notes
        self._layout = layout
        self._answers = answers
        self._ids = list(ids)  # grows with an answer that is begun here
        self._prompt = len(ids)
        self._exporter = Exporter(layout, self._ids, begun.first(layout))

    @property
    def _extra(self) -> dict[str, Any]:
        return {
            "schedule": [list(entry) for entry in self.schedule],
            "rope_delta": self._begun.rope_delta,
        }

    def held(self) -> None:
        """Send what was there before the first forward."""
        if self.run.position:
            with self._notes.stage("pack"):
                self._send(self.run.caches, self.run.position, ends_of(self.schedule))
                # Whole blocks lie before them, which have just been sent.
                self.handoff.send(self._begun.passed)

    def forward(self, working: Callable[[], AbstractContextManager[Any]], began: float) -> int:
        """Compute the next chunk and send what is whole of it; the position then.

        `began`: when this chunk's turn came, before anybody was asked about it.
        """
        moments = [began, time.monotonic()]
        with working():
            start, end = self.run.step()
        append_schedule(self.schedule, end - start)
        moments.append(time.monotonic())
        last = not self._answers and not self.run.remaining
        ends = ends_of(self.schedule)
        rows = self._exporter.rows(self.run.caches, end, last=last, ends=ends)
        moments.append(time.monotonic())
        self.handoff.send(rows)
        del rows  # the hand-off alone keeps them
        moments.append(time.monotonic())
        parts = [after - before for before, after in pairwise(moments)]
        self._notes.chunk(moments[0], parts, end - start)
        if end in self._places:
            # Its rows are whole blocks, so that only the snapshot comes on top.
            with self._notes.stage("pack"):
                self.apart.append(self._exporter.snapshot(self.run.caches, self._extra))
                self.handoff.send(self.apart[-1:])
        return end

    def grown(self, caches: Caches, said: Sequence[int]) -> None:
        """Send the blocks that an answer begun here has filled; the last of `said` is in none."""
        held = self._prompt + len(said) - 1
        if held - held % self._layout.block_tokens <= self._exporter.position:
            return
        self._ids[self._prompt :] = said
        self._send(caches, held, [*ends_of(self.schedule), *range(self._prompt, held + 1)])

    def last(self) -> Piece:
        """Send the last rows; returns the snapshot, with which the state is whole."""
        live, run = self.live, self.run
        if live is None:
            caches, held = run.caches, self._prompt - 1
            extra = {**self._extra, "rope_delta": run.rope_delta}
        else:
            caches, held = live.caches, len(live.ids)
            extra = {"schedule": live.schedule, "rope_delta": 0}
            self._ids[:] = live.ids
        if self._begun.known:
            extra["lent"] = self._begun.known
        with self._notes.stage("pack"):
            self._send(caches, held, ends_of(extra["schedule"]), last=True)
            return self._exporter.snapshot(caches, extra)

    def facts(self, kernels: str) -> dict[str, Any]:
        """What the hand-off's report says of the computing."""
        first, inherited = self._begun.first(self._layout), self.run.inherited
        borrowed = self._begun.borrowed
        return {
            "schedule": self.schedule,
            "computed_tokens": self._prompt - 1 - self.begun_at,
            "kernels": kernels,
            **({"start": first} if first else {}),
            **({"shared": inherited} if inherited else {}),
            **({"borrowed": borrowed} if borrowed else {}),
        }

    def _send(self, caches: Caches, held: int, ends: Sequence[int], *, last: bool = False) -> None:
        self.handoff.send(self._exporter.rows(caches, held, last=last, ends=ends))
