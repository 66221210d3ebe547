"""A decode node that is to stop, and another one that goes on with its answers.

While there is such a node, what the leaving one runs or has waiting is sent on, an answer at its
present token: the state over the link, as at the end of a prefill, after the conversation's records
are in the other store. The event log is all that moves besides. A step of Redis then changes the
job's node and the conversation's home at once (`scheduler.homes`); before it nothing has happened,
and after it the old copies go. What cannot be sent on is finished here or handed back, as without
another node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from scheduler.execution import Execution
from scheduler.record import Job

log = logging.getLogger("tandem.decode")

#: Answers on their way at once: each holds a copy of its state, and the others go on meanwhile.
AT_ONCE = 2

#: Sends the state; returns the facts of the hand-off once the other node has all of it.
Tail = Callable[[], Mapping[str, Any]]


class Stays(Exception):
    """This answer cannot be sent on; the message says why."""


class Mover(Protocol):
    """What a decode node has for leaving. Any thread; may raise what Redis and the store raise."""

    def heir(self) -> str:
        """The decode node that takes over now, "" for none."""
        ...

    def prepare(self, job: Job, heir: str) -> None:
        """Bring the records of the job's conversation into the other store. Raises Stays."""
        ...

    def still(self, job: Job, heir: str) -> AbstractContextManager[None]:
        """Meanwhile nobody changes the conversation's records, which are at `heir` as well."""
        ...

    def left(self, job: Job) -> None:
        """The job and its conversation are at home elsewhere: what is here of them goes."""
        ...


class Leaver(Protocol):
    """An engine whose answers can be sent on; called between two steps."""

    def leave(self, execution: Execution, heir: str) -> Tail | None:
        """Take a row out with its state, for decode node `heir`; None where it is not ready."""
        ...


class Leaving:
    """Which answers of a loop may go where. Thread-safe: every field is replaced whole."""

    def __init__(self, mover: Mover | None) -> None:
        self._mover = mover
        self._ready: dict[str, str] = {}
        self._stay: set[str] = set()
        self.under_way: set[str] = set()
        self.heir = ""
        self.possible = mover is not None
        self.searched = not self.possible

    def look(self) -> str:
        """Find out who takes over now; "" where nobody does."""
        heir = ""
        if self._mover is not None:
            try:
                heir = self._mover.heir()
            except Exception as error:
                log.warning("no other decode node can be looked for: %s", error)
        if heir != self.heir:
            log.info("decode node %s takes over", heir or "none any more")
        self.heir, self.searched = heir, True
        return heir

    def prepare(self, rows: Iterable[Execution]) -> None:
        """Make those answers ready that are not yet. Called in the background."""
        if self._mover is None or not self.heir:
            return
        for row in rows:
            if self._ready.get(row.id) == self.heir or row.id in self._stay:
                continue
            try:
                self._mover.prepare(row.job, self.heir)
                self._ready[row.id] = self.heir
            except Exception as error:
                self.stays(row, error)

    def next(self, rows: Iterable[Execution]) -> Execution | None:
        """The next answer that may go, if there is room under way."""
        if not self.heir or len(self.under_way) >= AT_ONCE:
            return None
        return next((row for row in rows if self._may(row)), None)

    def _may(self, row: Execution) -> bool:
        return self._ready.get(row.id) == self.heir and row.id not in self._stay

    def stays(self, row: Execution, why: object) -> None:
        """This one is finished here."""
        log.info("%s is finished here: %s", row.job.id, why)
        self._stay.add(row.id)

    def reaches(self, row: Execution, heir: str) -> bool:
        """Whether `heir`, which did not get the state of this answer, is there and has its records;
        else neither goes to a node that may not come back."""
        assert self._mover is not None
        try:
            self._mover.prepare(row.job, heir)
        except Exception as error:
            log.warning("%s waits here: decode node %s is not reached: %s", row.job.id, heir, error)
            self._stay.add(row.id)
            return False
        return True

    def still(self, job: Job, heir: str) -> AbstractContextManager[None]:
        """See Mover. Entering it raises what keeps the records from being the same there."""
        assert self._mover is not None
        return self._mover.still(job, heir)

    def left(self, job: Job) -> None:
        """See Mover; within `still`."""
        assert self._mover is not None
        try:
            self._mover.left(job)
        except Exception as error:
            log.warning("a copy of what %s is about stays until the next start: %s", job.id, error)


def facts_of(job: Job, heir: str, sent: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of all hand-offs of a job, after it went from its node to `heir`.

    `sent`: those of this one. They stand in `moved`; beside it those of the hand-off from prefill,
    if there was one.
    """
    before = dict(job.handoff or {})
    told = {"from": job.node, "to": heir, **sent}
    facts: dict[str, Any] = {**before, "moved": [*(before.get("moved") or []), told]}
    if before.get("path") in (None, "none"):
        facts |= {key: sent[key] for key in ("path", "bytes", "seconds", "error") if key in sent}
    return facts
