"""Fixtures of the scheduler's tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import httpx
import pytest
from redis_kit import Server

# A busy machine is no defect: what has no limit of its own gets more than httpx's five seconds.
_limit: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
_limit.connect = _limit.read = _limit.write = _limit.pool = 120.0


@pytest.fixture
def durable_redis() -> Iterator[Server]:
    """A Redis of the test's own, append-only, that may be killed and started again."""
    with Server(durable=True) as server:
        yield server
