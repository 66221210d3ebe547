"""One run of a job inside a worker process: what its engine is given to hold on to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.events import Replay
from scheduler.ledger.notes import Notes
from scheduler.record import Job, Result
from scheduler.serializer import pack


@dataclass(eq=False, slots=True)
class Execution:
    """A job under a run of ours. Flags are set from other threads; reading them is free.

    `replay`: what an earlier run of the same decode has emitted already. `notes`: where its time
    and bytes go; they travel with the step that ends the run.
    """

    job: Job
    replay: Replay = field(default_factory=Replay)
    _emit: Callable[[Execution, list[Pending]], None] | None = None
    _progress: Callable[[], None] | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _lost: threading.Event = field(default_factory=threading.Event)
    prefilled: int = -1
    #: Packed events of this run in order, and the number of the first one.
    log: list[Pending] = field(default_factory=list)
    first: int = 0
    notes: Notes = field(default_factory=Notes)

    @property
    def id(self) -> str:
        """The run: RQ's execution id and our fence."""
        return self.job.run

    @property
    def cancelled(self) -> bool:
        """True once the job's client has cancelled it."""
        return self._cancelled.is_set()

    @property
    def lost(self) -> bool:
        """True once the job belongs to another run: nothing done here counts any more."""
        return self._lost.is_set()

    def emit(self, *events: Mapping[str, Any]) -> None:
        """Queue events for the job's log, in order. Blocks only while the outbox is full."""
        if self._emit is None:
            raise RuntimeError("this execution has no event log: only decode executions emit")
        self._emit(self, [Pending(pack(dict(event)), bool(event.get("ids"))) for event in events])

    def progress(self, prefilled_tokens: int) -> None:
        """Tell how many prompt tokens are prefilled; written in the background."""
        self.prefilled = prefilled_tokens
        if self._progress is not None:
            self._progress()

    def mark_cancelled(self) -> None:
        """Called by the worker when the job is cancelled."""
        self._cancelled.set()

    def mark_lost(self) -> None:
        """Called by the worker when the fence says so."""
        self._lost.set()


@dataclass(frozen=True, slots=True)
class Pending:
    """A packed event; `tokens`: it carries token ids."""

    data: bytes
    tokens: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """How an execution ended in the engine: with a result, or with an error.

    `commit` makes the turn durable. It runs on a background thread after the job's events are
    written and before its terminal event is; when it raises, the job fails. What it returns is
    told with the result's path. `noted` is told, once
    the job has ended: the job as it was taken, the result, this run's packed notes, and when that
    was in Redis TIME.
    """

    execution: Execution
    result: Result | None = None
    error: Exception | None = None
    commit: Callable[[], Mapping[str, Any] | None] | None = None
    noted: Callable[[Job, Result, bytes, float], None] | None = None
