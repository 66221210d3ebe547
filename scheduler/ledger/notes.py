"""What one process writes down of one request while it works on it.

Moments are the local monotonic clock's; only packing turns them into Redis TIME, by one offset for
all, so that every duration stays exact. What is kept does not grow with the request: chunks of a
long prompt are merged pairwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from scheduler.ledger.clock import Clock
from scheduler.serializer import pack, unpack
from store.meter import Meter, charge

#: Field of a job's record under which a piece lies, before the run or another name.
FIELD = "l:"
#: Parts of a chunk, in their order; `between` is what happened since the chunk before.
PARTS = ("between", "prefill", "pack", "send")
_CHUNKS = 256
_SPANS = 400


class Span(NamedTuple):
    """A stretch of one stage: begun `start` s of Redis TIME, of `seconds`, with facts about it."""

    stage: str
    start: float
    seconds: float
    facts: dict[str, Any]


class Notes:
    """The notes of one run of a job in this process. Lanes: api, prefill, decode, store."""

    __slots__ = ("_chunks", "_factor", "_forks", "_spans", "facts", "meter", "on")

    def __init__(self, *, on: bool = True) -> None:
        """Without `on` nothing is kept: the other side when the ledger's own cost is measured."""
        self.on = on
        self.facts: dict[str, Any] = {}
        self.meter = Meter()
        self._spans: list[tuple[str, float, float, dict[str, Any]]] = []
        self._chunks: list[list[float]] = []
        self._factor = 1
        self._forks: list[tuple[str, str, str]] = []

    def add(self, stage: str, began: float, ended: float, **facts: Any) -> None:
        """A stage that lasted from `began` to `ended` (time.monotonic)."""
        if self.on and len(self._spans) < _SPANS:
            self._spans.append((stage, began, ended, facts))

    @contextmanager
    def stage(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Time what is done meanwhile, and count it as this run's; yields facts to be added to."""
        began = time.monotonic()
        try:
            with charge(self.meter):
                yield facts
        finally:
            self.add(name, began, time.monotonic(), **facts)

    def chunk(self, began: float, parts: Sequence[float], tokens: int) -> None:
        """One forward of a prompt: its `PARTS` in seconds, one after the other."""
        if not self.on:
            return
        row = [began, *parts, *([0.0] * (len(PARTS) - len(parts))), float(tokens), 1.0]
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last[-1] < self._factor:
            _merge(last, row)
            return
        self._chunks.append(row)
        if len(self._chunks) > _CHUNKS:
            self._factor *= 2
            for into, row in zip(self._chunks[::2], self._chunks[1::2], strict=False):
                _merge(into, row)
            self._chunks = self._chunks[::2]

    def fork(self, name: str, took: str, why: str = "") -> None:
        """Which way was taken where there were several, and why."""
        if self.on:
            self._forks.append((name, took, why[:300]))

    def packed(self, clock: Clock, **about: Any) -> bytes:
        """All of it as bytes, ended now. `about`: lane, node and whatever else tells of the run."""
        if not self.on:
            return b""
        now = time.monotonic()
        offset, error = clock.offset, clock.error
        moments = [now, *(span[1] for span in self._spans), *(row[0] for row in self._chunks)]
        base = min(moments)
        return pack(
            {
                **about,
                "base": base + offset,
                "sent": now - base,
                "error": min(error, 1e9),
                "spans": [
                    [stage, began - base, ended - began, facts]
                    for stage, began, ended, facts in self._spans
                ],
                "chunks": [[row[0] - base, *row[1:]] for row in self._chunks],
                "forks": [list(fork) for fork in self._forks],
                "facts": self.facts,
                "control": self.meter.control(),
                "work": dict(self.meter.work),
            }
        )


class Piece:
    """The notes of one run as they are read back."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        self.name = name
        self.data = data
        self.base = float(data.get("base") or 0.0)

    @classmethod
    def read(cls, name: str, packed: bytes) -> Piece | None:
        """The piece, or None where its bytes say nothing."""
        try:
            data = unpack(packed)
            return cls(name, data) if isinstance(data, dict) else None
        except (ValueError, TypeError):
            return None

    def text(self, name: str) -> str:
        """A field of the piece that is text; empty where there is none."""
        return str(self.data.get(name) or "")

    def number(self, name: str) -> float | None:
        """A field of the piece that is a number."""
        value = self.data.get(name)
        return float(value) if isinstance(value, int | float) else None

    @property
    def sent(self) -> float:
        """When it was packed, just before Redis was told, in Redis TIME."""
        return self.base + (self.number("sent") or 0.0)

    def spans(self) -> list[Span]:
        """All stretches, each part of each chunk among them."""
        found = [
            Span(str(stage), self.base + start, max(0.0, seconds), dict(facts))
            for stage, start, seconds, facts in self.data.get("spans") or ()
        ]
        tokens = 0
        for start, *parts, count, merged in self.data.get("chunks") or ():
            at, tokens = self.base + start, tokens + int(count)
            about = {"tokens": int(count), "to": tokens, "forwards": int(merged)}
            for stage, seconds in zip(PARTS, parts, strict=True):
                if seconds:
                    found.append(Span(stage, at, seconds, about if stage == "prefill" else {}))
                at += seconds
        return found


def _merge(into: list[float], row: list[float]) -> None:
    for index in range(1, len(into)):
        into[index] += row[index]
