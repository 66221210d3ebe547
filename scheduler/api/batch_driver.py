"""The thread that advances all batches of this node, one at a time and each a little."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path

from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.batch_run import BatchRun
from scheduler.batches import Batch
from scheduler.files import FilesError

log = logging.getLogger("tandem.batches")

BUSY_SECONDS = 0.1
"""Between looks at lines that run."""
IDLE_SECONDS = 2.0
"""Between looks for batches that another process has accepted."""
AWAY_SECONDS = 1.0
_SWEEP_EVERY = 600.0
MAX_FAILURES = 5
"""Errors of ours after which a batch is given up."""


class BatchDriver:
    """Owns the journals of a data directory: where two APIs share one, one of them drives."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dir = backend.config.data_dir / "batches"
        self._runs: dict[str, BatchRun] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)
        self._swept = 0.0
        self._failures: Counter[str] = Counter()

    def start(self) -> None:
        """Begin; unfinished batches go on."""
        self._thread.start()

    def kick(self) -> None:
        """There is a new batch, or one to cancel."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; what was submitted goes on without it."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _loop(self) -> None:
        lock = self._lock()
        if lock is None:
            return
        try:
            while not self._ended.is_set():
                self._wake.clear()
                try:
                    moved = self._tick()
                    pause = 0.0 if moved else BUSY_SECONDS if self._runs else IDLE_SECONDS
                except (RedisError, OSError) as error:
                    log.warning("batches wait: %s", error)
                    pause = AWAY_SECONDS
                if pause:
                    self._wake.wait(pause)
        finally:
            for run in self._runs.values():
                run.close()
            os.close(lock)

    def _lock(self) -> int | None:
        """The lock of the journals, as soon as no other process has it; None at the end."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._dir / "driver.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while not self._ended.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._ended.wait(IDLE_SECONDS)
            else:
                return lock
        os.close(lock)
        return None

    def _tick(self) -> bool:
        """One step of each batch; whether any of them moved."""
        backend = self._backend
        waiting = backend.batches.unfinished(backend.config.node)
        moved = False
        for batch in waiting:
            if self._ended.is_set():
                return False
            try:
                moved = self._advance(batch) or moved
            except (RedisError, OSError):
                self._drop(batch.id)
                raise
            except Exception:
                # One batch's trouble must end neither the others nor this thread.
                log.exception("%s cannot go on", batch.id)
                self._drop(batch.id)
                self._trouble(batch)
        self._sweep(waiting)
        return moved

    def _advance(self, batch: Batch) -> bool:
        run = self._runs.get(batch.id)
        if run is None and (run := self._take_up(batch)) is None:
            return False
        moved = run.step()
        if run.batch.ended:
            self._drop(batch.id)
            run.path.unlink(missing_ok=True)
        return moved

    def _drop(self, ident: str) -> None:
        """Forget a run; it is made anew from its journal."""
        if (run := self._runs.pop(ident, None)) is not None:
            run.close()

    def _trouble(self, batch: Batch) -> None:
        self._failures[batch.id] += 1
        if self._failures[batch.id] >= MAX_FAILURES:
            told = {"code": "internal_error", "line": None, "param": None}
            told["message"] = "internal error; the API's log has the details"
            self._backend.batches.move(batch, "failed", errors=[told])

    def _take_up(self, batch: Batch) -> BatchRun | None:
        try:
            run = self._runs[batch.id] = BatchRun(self._backend, batch, self._dir)
        except FilesError as error:
            told = {"code": "input_file_gone", "message": str(error), "line": None, "param": None}
            self._backend.batches.move(batch, "failed", errors=[told])
            return None
        return run

    def _sweep(self, waiting: list[Batch]) -> None:
        """Now and then: files whose time is over, journals of batches that have ended."""
        if self._swept and time.monotonic() - self._swept < _SWEEP_EVERY:
            return
        self._swept = time.monotonic()
        self._backend.files.sweep({batch.input_file for batch in waiting})
        known = {batch.id for batch in waiting}
        for path in self._dir.glob("batch_*"):
            if path.name not in known and not self._unfinished(path):
                path.unlink(missing_ok=True)

    def _unfinished(self, path: Path) -> bool:
        batch = self._backend.batches.get(path.name)
        return batch is not None and not batch.ended
