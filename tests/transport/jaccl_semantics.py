"""Gives the ring backend the failure semantics of JACCL's mesh, as measured on its own source.

A send returns only when the peer has posted the matching receive. Nothing is ever raised: a lost
peer means waiting for ever. Sizes that differ give garbage or an endless wait. Two operations in
flight on one group crash the process. Both ranks exchange the sizes over a socket of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def frames(nbytes: int) -> int:
    """How many RDMA frames a message of this size is cut into."""
    size = next((4096 << k for k in range(7, 0, -1) if nbytes >= 4096 << k), 4096)
    return -(-nbytes // size)


class Mesh:
    """The wrapped operations of one rank."""

    def __init__(self, group: Any, path: str) -> None:
        self.group = group
        self.busy = threading.Lock()
        self.plain_send, self.plain_recv = mx.distributed.send, mx.distributed.recv
        self.side = self._meet(group.rank(), path)

    def _meet(self, rank: int, path: str) -> socket.socket:
        side = socket.socket(socket.AF_UNIX)
        if rank == 0:
            with side:
                side.bind(path)
                side.listen()
                peer = side.accept()[0]
                os.unlink(path)
                return peer
        while True:
            try:
                side.connect(path)
                return side
            except OSError:
                time.sleep(0.02)

    def _hang(self) -> None:
        while True:
            time.sleep(60)

    def _other_size(self, mine: int) -> int:
        try:
            self.side.sendall(struct.pack("<q", mine))
            data = b""
            while len(data) < 8:
                got = self.side.recv(8 - len(data))
                if not got:
                    self._hang()
                data += got
            return int(struct.unpack("<q", data)[0])
        except OSError:
            self._hang()
            raise

    def _alone(self, nbytes: int, work: Callable[[int], Any]) -> Any:
        if not self.busy.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGSEGV)
        try:
            return work(self._other_size(nbytes))
        except RuntimeError:
            self._hang()
        finally:
            self.busy.release()

    def send(self, x: Any, dst: int, *, group: Any = None, stream: Any = None) -> Any:
        mx.eval(x)

        def work(other: int) -> Any:
            if other == x.nbytes:
                mx.eval(self.plain_send(x, dst, group=self.group))
            elif frames(x.nbytes) > frames(other):
                self._hang()
            return x

        return self._alone(x.nbytes, work)

    def recv(
        self, shape: Any, dtype: Any, src: int, *, group: Any = None, stream: Any = None
    ) -> Any:
        nbytes = dtype.size
        for size in shape:
            nbytes *= size

        def work(other: int) -> Any:
            if other == nbytes:
                got = self.plain_recv(shape, dtype, src, group=self.group)
            elif frames(other) < frames(nbytes):
                self._hang()
            else:
                got = mx.full(shape, 0xEE, dtype=dtype)
            mx.eval(got)
            return got

        return self._alone(nbytes, work)


def install(path: str) -> None:
    """Wrap mx.distributed: the first group formed gets these semantics."""
    plain_init = mx.distributed.init

    def init(*arguments: Any, **more: Any) -> Any:
        group = plain_init(*arguments, **more)
        mesh = Mesh(group, path)
        mx.distributed.send, mx.distributed.recv = mesh.send, mesh.recv
        return group

    mx.distributed.init = init
