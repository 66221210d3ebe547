"""The stock dashboard and ours beside each other, looking at one Redis."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import redis
from api_stack import Stack
from rq import Queue

from scheduler.redis_client import connect
from scheduler.serializer import Msgpack

# One for all requests: making one costs more than a request.
HTTP = httpx.Client(follow_redirects=True)


class Pickled:
    """The serializer that RQ uses where nobody names one; ours takes it out of reach."""

    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def loads(data: bytes) -> Any:
        raise AssertionError("nothing here unpickles")


class Side:
    """One of the two dashboards. `serializer`: the one whose jobs it can read."""

    def __init__(self, base: str, no_delete: str, client: redis.Redis, serializer: Any) -> None:
        self.base = base
        self.no_delete = no_delete
        self.client = client
        self.serializer = serializer

    def queue(self, name: str = "holes") -> Queue:
        return Queue(name, connection=self.client, serializer=self.serializer)

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.base + path)

    def listed(self, queue: str, registry: str, per: int = 8, page: int = 1) -> list[str]:
        path = f"/0/data/jobs/{queue}/{registry}/{per}/asc/{page}.json"
        return [job["id"] for job in self.get(path).json()["jobs"]]


@contextmanager
def stock(redis_url: str) -> Iterator[tuple[str, str]]:
    """Addresses of rq-dashboard as it comes, and of one that was told not to delete."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RQ_")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", Path(__file__).with_name("stock_dashboard.py"),
         redis_url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        plain, kept = process.stdout.readline().split()
        yield f"http://127.0.0.1:{plain}", f"http://127.0.0.1:{kept}"
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@contextmanager
def sides(redis_url: str) -> Iterator[tuple[Side, Side, Stack]]:
    """(the stock dashboard, ours, the stack that ours is mounted in)."""
    with connect(redis_url) as client, stock(redis_url) as (plain, kept), Stack(redis_url) as stack:
        ours = f"{stack.url}/rq"
        yield Side(plain, kept, client, Pickled), Side(ours, ours, client, Msgpack), stack
