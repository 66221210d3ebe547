"""A private, throw-away Redis for benchmarks and simulations: never the one that serves."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator

from redis.exceptions import RedisError

from scheduler.host.redis_server import RedisUnavailable, find
from scheduler.redis_client import connect

_START_DEADLINE = 20.0


@contextlib.contextmanager
def scratch_redis(*, durable: bool = False) -> Iterator[str]:
    """URL of a fresh server that ends with the block. `durable`: append-only, as in service."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        socket = f"{folder}/r.sock"
        command = [
            str(find().path), "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700",
            "--dir", folder, "--save", "", "--daemonize", "no",
            "--appendonly", "yes" if durable else "no", "--appendfsync", "everysec",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"unix://{socket}"
            _await(url, process)
            yield url
        finally:
            process.terminate()
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_DEADLINE
    with connect(url, patience=0) as client:
        while True:
            with contextlib.suppress(RedisError):
                if client.ping():
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                raise RedisUnavailable(f"a private Redis at {url} did not start")
            time.sleep(0.01)
