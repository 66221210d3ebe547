"""Conversations whose records stand still for the moment in which their home changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from store.errors import StoreUnavailable

T = TypeVar("T")
_WAIT = 10.0


class Seals:
    """Who changes a conversation's record, and who has it stand still. Thread-safe.

    Between the last comparison of a record with its copy at another node, the step that makes that
    copy the conversation, and the deletion of this one, a change here would be lost. It waits, and
    finds afterwards that the conversation is not here: whoever asks looks for it again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sealed: Counter[str] = Counter()
        self._changing: Counter[str] = Counter()
        self.waiting = 0

    @contextmanager
    def sealed(self, ident: str) -> Iterator[None]:
        """Nobody changes conversation `ident` meanwhile. Raises StoreUnavailable where a change of
        it does not end."""
        with self._changed:
            self._sealed[ident] += 1
        try:
            self._until(ident, lambda: not self._changing[ident])
            yield
        finally:
            self._less(self._sealed, ident)

    def change(self, ident: str, work: Callable[[], T]) -> T:
        """Do `work`, which changes conversation `ident`. Raises StoreUnavailable while it is moved
        for long, and what `work` raises."""
        with self._changed:
            self._until(ident, lambda: not self._sealed[ident])
            self._changing[ident] += 1
        try:
            return work()
        finally:
            self._less(self._changing, ident)

    def _until(self, ident: str, free: Callable[[], bool]) -> None:
        with self._changed:
            self.waiting += 1
            try:
                if not self._changed.wait_for(free, _WAIT):
                    raise StoreUnavailable(f"{ident} is moving to another node: try again")
            finally:
                self.waiting -= 1

    def _less(self, counts: Counter[str], ident: str) -> None:
        with self._changed:
            counts[ident] -= 1
            if counts[ident] <= 0:
                del counts[ident]
            self._changed.notify_all()
