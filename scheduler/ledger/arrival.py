"""The notes of a request that has arrived and is no job yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from scheduler.ledger.notes import Notes

_NOW: ContextVar[tuple[float, Notes]] = ContextVar("tandem_arrival")


@contextmanager
def arriving() -> Iterator[Notes]:
    """A request arrives: everything that is done for it meanwhile finds its notes."""
    notes = Notes()
    token = _NOW.set((time.monotonic(), notes))
    try:
        yield notes
    finally:
        _NOW.reset(token)


def arrived() -> Notes:
    """The notes of the request that is being served, with its reception written down.

    Each call takes what has been noted: a second job of one request begins with nothing.
    """
    now = time.monotonic()
    began, notes = _NOW.get((now, Notes()))
    notes.add("receive", began, now)
    if _NOW.get(None) is not None:
        _NOW.set((now, Notes()))
    return notes
