"""Ledgers of ended turns on their way into the store, a few in one transaction."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from scheduler.ledger.clock import Clock
from scheduler.ledger.keeping import freeze
from scheduler.ledger.notes import Notes
from scheduler.record import Job, Result
from store.errors import StoreError
from store.store import Store
from worker_decode.saver import Saved

log = logging.getLogger("tandem.decode")

#: Name of the piece that tells of the state's way into the store.
SAVE = "save"
#: Saves that are remembered until the end of their turn has been noted.
_EARLY = 64


class Ledgers:
    """Holds a turn's ledger until its state is saved, or has gone on with the next turn.

    Until then Redis has it. Nothing of it is on a decode step's path. Thread-safe.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        node: str,
        tell: Callable[[str, str, bytes], None] = lambda turn, name, piece: None,
    ) -> None:
        """`tell(turn, name, piece)` adds a piece to the record that Redis has."""
        self._store = store
        self._clock = clock
        self._node = node
        self._tell = tell
        self._lock = threading.Lock()
        self._ended: dict[str, tuple[Job, Result, bytes, float]] = {}
        self._copied: dict[str, tuple[float, float]] = {}
        self._saves: OrderedDict[str, bytes] = OrderedDict()

    def ended(self, job: Job, result: Result, run: bytes, at: float) -> None:
        """A job has ended: what its record says now, and when that was."""
        with self._lock:
            self._ended[job.id] = (job, result, run, at)

    def copied(self, turn: str, began: float, ended: float) -> None:
        """A turn's state was copied out of the model's memory, to be saved."""
        with self._lock:
            self._copied[turn] = (began, ended)

    def waiting(self) -> list[str]:
        """Turns whose ledgers are not in the store yet."""
        with self._lock:
            return list(self._ended)

    def saved(self, saved: Saved) -> None:
        """A state is in the store, or is not; its ledger follows. Called on the saver's thread."""
        if not saved.turn:
            return  # the state of a shared beginning
        notes = Notes()
        with self._lock:
            copied = self._copied.pop(saved.turn, None)
        if copied is not None:
            notes.add("copy", *copied)
        facts = {} if saved.report is None else {"bytes": saved.report.bytes_written}
        notes.add("save", saved.began, time.monotonic(), **facts)
        if saved.report is not None:
            notes.facts["store_written"] = saved.report.bytes_written
        else:
            notes.fork("save", "not saved", str(saved.error))
        piece = notes.packed(self._clock, lane="store", node=self._node)
        try:
            self._tell(saved.turn, SAVE, piece)
        except Exception as error:  # the store has it all the same
            log.info("the record of %s does not say how it was saved: %s", saved.turn, error)
        with self._lock:
            # A state may be saved as soon as its turn is durable, before Redis knows of the end.
            self._saves[saved.turn] = piece
            while len(self._saves) > _EARLY:
                self._saves.popitem(last=False)
        self.write([saved.turn])

    def write(self, turns: Iterable[str]) -> None:
        """Put the ledgers of those of these turns that have ended into the store, in one
        transaction."""
        with self._lock:
            found = {turn: self._ended.pop(turn) for turn in turns if turn in self._ended}
            saves = {turn: self._saves.pop(turn) for turn in found if turn in self._saves}
        if not found:
            return
        later = {turn: {SAVE: piece} for turn, piece in saves.items()}
        try:
            self._store.annotate(
                {turn: freeze(*ended, later=later.get(turn)) for turn, ended in found.items()}
            )
        except StoreError as error:
            log.warning("%d ledgers stay in Redis alone: %s", len(found), error)
