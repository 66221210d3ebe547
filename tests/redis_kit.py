"""A real Redis of the tests' own, and waiting for a condition."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.exceptions import RedisError

from scheduler.host.redis_server import find
from scheduler.redis_client import connect


class Server:
    """A Redis on a private socket."""

    def __init__(self, *, durable: bool = False) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="tq-"))
        self.url = f"unix://{self.dir}/r.sock"
        self.durable = durable
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.dir / "r.sock").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                str(find().path), "--port", "0", "--unixsocket", str(self.dir / "r.sock"),
                "--save", "", "--appendonly", "yes" if self.durable else "no",
                # Written before each answer, whatever the disk does meanwhile: with "everysec" a
                # slow fsync delays that by up to two seconds, and SIGKILL then loses it.
                "--appendfsync", "no", "--dir", str(self.dir), "--daemonize", "no",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        client = connect(self.url, patience=0)
        try:
            eventually(lambda: _pings(client), "Redis does not answer")
        finally:
            client.close()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def eventually(condition: Callable[[], Any], message: str, seconds: float = 60.0) -> Any:
    """The condition's first true value; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline  # looked at before: a stall costs no last look
        if value := condition():
            return value
        if late:
            raise AssertionError(f"{message} (after {seconds:g} s)")
        time.sleep(0.01)
