"""After a start: the latest stored states are read once, so that the next resumes find them in
the page cache."""

from __future__ import annotations

import logging
import threading
import time
from itertools import islice

from store.errors import StoreError
from store.objects import ROOT
from store.store import Store

log = logging.getLogger(__name__)
_STATES = 1 << 16


class Warming:
    """Reads states, the latest used first, up to a number of bytes, on a thread of its own."""

    def __init__(self, store: Store, budget: int) -> None:
        self._store = store
        self._budget = budget
        self._stop = threading.Event()
        self.states = 0
        self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="store-warming", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and wait; to be called before the store is closed."""
        self._stop.set()
        self._thread.join()

    def wait(self) -> None:
        """Return when everything within the budget was read."""
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            with self._store.environment.read() as txn:
                latest = list(islice(self._store.states.latest_first(txn), _STATES))
            seen: set[bytes] = set()
            for turn in latest:
                if not self._read(turn, seen):
                    break
                self.states += 1
        except StoreError as error:
            log.warning("warming up ended early: %s", error)
        log.info(
            "warmed %d states, %d bytes in %.1f s",
            self.states, self.nbytes, time.monotonic() - began,
        )  # fmt: skip

    def _read(self, turn: str, seen: set[bytes]) -> bool:
        """Read one state; False where the budget ends or a stop is asked for."""
        store = self._store
        with store.environment.read() as txn:
            state = store.states.get(txn, turn)
            if state is None or state.continued or state.inside:
                return True  # the next turns of conversations do not begin there
            objects = []
            for ident in (state.snap, state.head):
                while ident != ROOT and ident not in seen:
                    record = store.blocks.get(txn, ident)
                    if record is None:
                        break
                    seen.add(ident)
                    objects.append((ident, record))
                    ident = record.parent
        for ident, record in objects:
            if self._stop.is_set() or self.nbytes + record.nbytes > self._budget:
                return False
            self.nbytes += record.nbytes
            # One value in each transaction: a save must not wait for pages that this one pins.
            for number in range(record.parts):
                with store.environment.read() as txn:
                    store.blocks.values.touch(txn, ident, number)
        return True
