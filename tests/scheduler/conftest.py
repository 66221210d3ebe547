"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_kit import Server


@pytest.fixture
def durable_redis() -> Iterator[Server]:
    """A Redis of the test's own, append-only, that may be killed and started again."""
    with Server(durable=True) as server:
        yield server
