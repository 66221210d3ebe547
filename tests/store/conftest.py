"""A clock for the tests in which the order of use decides what is evicted."""

from __future__ import annotations

import itertools
import time

import pytest


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond passes between two looks at the clock, however long the work takes.

    By the rates that a new store begins with, a state unused for 8 to 18 seconds is worth more than
    one of a moment ago: on a slow disk, or after a stall, others would go than the oldest.
    """
    began, count = time.time(), itertools.count()
    monkeypatch.setattr(time, "time", lambda: began + next(count) / 1000)
