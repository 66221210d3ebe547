"""What the tests of all rooms share: MLX made ready before anything imports it, a real Redis."""

from __future__ import annotations

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings
from redis_kit import Server

from engine.device import prepare
from scheduler.redis_client import connect

prepare()

SOAK = bool(os.environ.get("TANDEM_SOAK"))

# A busy machine is no defect: examples have no deadline, and none is too slow to make. `make test`
# tries the same ones every time; `make soak` looks for new ones.
settings.register_profile(
    "any", deadline=None, derandomize=not SOAK, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any")


def pytest_configure() -> None:
    # Once, before xdist starts its workers: they must choose the same tests, also at midnight.
    os.environ.setdefault("TANDEM_SEED", str(int(time.time()) // 86_400))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take of each family marked `rotate(days)` those whose day it is; `make soak` takes all.

    A family is one test function; its parameters are spread evenly over the days, so that after
    `days` days each has run. `TANDEM_SEED` is the number of the day.
    """
    if SOAK:
        return
    day = int(os.environ["TANDEM_SEED"])
    seen: dict[str, int] = defaultdict(int)
    kept, left = [], []
    for item in items:
        marker = item.get_closest_marker("rotate")
        if marker is None:
            kept.append(item)
            continue
        family = item.nodeid.partition("[")[0]
        place = seen[family] + zlib.crc32(family.encode())
        seen[family] += 1
        (left if (place + day) % marker.args[0] else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


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
