"""Preambles that only turns brought which are not kept yet: with the last of these they go.

A preamble is stored while its prompt is computed, for all that begin alike. Where its turn is not
kept, what was said in it is to be forgotten, and that is part of it: unless a turn that is kept
begins so too. It goes after a while only, since a client that gives up often asks again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from store.errors import StoreError
from store.store import Store
from worker_decode.saver import Saver

log = logging.getLogger("tandem.decode")


class Loose:
    """Names of such preambles, and the turns under way that begin with them. Used by the engine's
    thread alone."""

    def __init__(
        self,
        store: Store,
        saver: Saver,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: seconds between the end of a turn that was not kept and that of what it
        brought; `clock` is what they are measured by."""
        self._store = store
        self._saver = saver
        self._patience = patience
        self.clock = clock
        self._loose: set[str] = set()
        self._begin: dict[str, set[str]] = {}
        self._due: deque[tuple[float, str, str]] = deque()
        self._kept: deque[str] = deque()

    def brought(self, turn: str, name: str) -> None:
        """A turn that is under way has a preamble stored under `name`."""
        self._loose.add(name)
        self.used(turn, name)

    def used(self, turn: str, name: str) -> None:
        """A turn that is under way begins with what is stored under `name`, now or when another
        turn has brought it. Harmless for what is no preamble."""
        self._begin.setdefault(turn, set()).add(name)

    def ended(self, turn: str, *, kept: bool) -> None:
        """A turn is durable, or is not kept. That a run of it was lost may be told before that a
        later one is durable."""
        for name in self._begin.pop(turn, ()):
            if name in self._loose:
                self._due.append((self.clock() + self._patience, turn, name))
        if kept:
            names = {name for _, one, name in self._due if one == turn}
            self._due = deque(entry for entry in self._due if entry[2] not in names)
            self._loose -= names
            self._kept.extend(names)

    def look_after(self, *, wait: bool = False) -> None:
        """Have those dropped whose time has come, while the saver has room; all of them where this
        node is to stop and so may `wait` for it."""
        while self._kept and (wait or self._saver.room):
            self._saver.do(partial(self._tell, self._kept.popleft(), True))
        # Until then it is loose: a turn that begins with it while the saver is full keeps it.
        while self._due and (wait or (self._due[0][0] <= self.clock() and self._saver.room)):
            _, _, name = self._due.popleft()
            if not self._wanted(name):
                self._loose.discard(name)
                self._saver.do(partial(self._tell, name, False))

    def _wanted(self, name: str) -> bool:
        """Whether a turn under way begins with it, or one did that has ended later."""
        under_way = any(name in names for names in self._begin.values())
        return under_way or any(name == later for _, _, later in self._due)

    def _tell(self, name: str, kept: bool) -> None:
        """On the saver's thread, behind the save."""
        try:
            self._store.settle_preamble(name, kept=kept)
        except StoreError as error:
            log.warning("whether a preamble is kept is settled at the next start: %s", error)
