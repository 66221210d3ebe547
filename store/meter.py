"""What is counted while work goes on: bytes of the control plane, and work that was done again.

A thread counts into its own meter, so that counting takes no lock; `charge` names the one that
gets what is counted meanwhile, a request's for instance. What nobody is charged for is this
process's own (heartbeats, looking for work). Stands here because every room may import the store.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Meter:
    """Counts of one request or one process. Only its own thread may add; `take` is locked.

    `commands`, `trips` (round trips), `sent` and `received` (bytes) are Redis'; `work` counts what
    a server should do once and not once a request (tokenizers loaded, grammars compiled, ...).
    """

    __slots__ = ("_lock", "commands", "received", "sent", "trips", "work")

    def __init__(self) -> None:
        self.commands = 0
        self.trips = 0.0
        self.sent = 0
        self.received = 0
        self.work: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, other: Meter, share: float = 1.0) -> None:
        """Add what `other` counted, or this share of its round trips and bytes. Any thread."""
        if share != 1.0:
            other = other.part(share)
        with self._lock:
            self.commands += other.commands
            self.trips += other.trips
            self.sent += other.sent
            self.received += other.received
            if other.work:  # adding nothing would take longer than all the rest
                self.work.update(other.work)

    def part(self, share: float) -> Meter:
        """This share of the round trips and bytes, with all of the work."""
        made = Meter()
        made.commands = round(self.commands * share)
        made.trips = self.trips * share
        made.sent = round(self.sent * share)
        made.received = round(self.received * share)
        made.work = self.work
        return made

    def control(self) -> dict[str, float]:
        """What went to Redis and came from there."""
        return {
            "commands": self.commands,
            "round_trips": round(self.trips, 2),
            "sent": self.sent,
            "received": self.received,
        }


class _Local(threading.local):
    meter: Meter | None = None
    base: Meter | None = None


_local = _Local()
_lock = threading.Lock()
_bases: list[Meter] = []
_charged = Meter()


def current() -> Meter:
    """The meter that this thread counts into."""
    meter = _local.meter or _local.base
    if meter is None:
        meter = _local.base = Meter()
        with _lock:
            _bases.append(meter)
    return meter


@contextmanager
def charge(payer: Meter) -> Iterator[Meter]:
    """What this thread counts meanwhile is added to `payer` at the end; yields the part itself."""
    outer, part = _local.meter, Meter()
    _local.meter = part
    try:
        yield part
    finally:
        _local.meter = outer
        payer.take(part)
        _charged.take(part)


def work(name: str, count: int = 1) -> None:
    """Note that something was done which a server should do once, not once a request."""
    if count:
        current().work[name] += count


def totals() -> dict[str, Any]:
    """Everything that this process has counted so far, charged or not."""
    whole = Meter()
    whole.take(_charged)
    with _lock:
        bases = list(_bases)
    for base in bases:
        whole.take(base)
    return {**whole.control(), "work": dict(whole.work)}
