"""What the tests of all rooms share: MLX made ready before anything imports it, a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis_kit import Server

from engine.device import prepare
from scheduler.redis_client import connect

prepare()


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
