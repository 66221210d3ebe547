"""Fixtures of the scheduler's tests: a real Redis of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from jobs_kit import Server

from scheduler.redis_client import connect


@pytest.fixture(scope="session")
def _redis_process() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def redis_url(_redis_process: Server) -> str:
    """URL of an empty Redis, shared by the session."""
    client = connect(_redis_process.url)
    client.flushall()
    client.close()
    return _redis_process.url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A connection to an empty Redis."""
    with connect(redis_url) as connection:
        yield connection


@pytest.fixture
def durable_redis() -> Iterator[Server]:
    """A Redis of the test's own, append-only, that may be killed and started again."""
    with Server(durable=True) as server:
        yield server
