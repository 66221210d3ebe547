"""A connected socket whose every wait ends: exact reads, whole writes, a kill from any thread."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

from transport.errors import LinkError

_TIMEVAL = struct.Struct("@ll")
SOCKET_BUFFER = 4 << 20
FLOOR = 8 << 20
"""Bytes per second below which a peer counts as too slow."""


class Connection:
    """Owns one socket. Only the thread that uses it closes it; others `kill` it."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self.set_deadline(deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # macOS refuses sizes above its limit
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)

    @classmethod
    def dial(cls, address: tuple[str, int], deadline: float) -> Connection:
        """Connect within `deadline` seconds; raises LinkError."""
        try:
            return cls(socket.create_connection(address, timeout=deadline), deadline)
        except OSError as error:
            raise LinkError(f"cannot reach {address[0]}:{address[1]}: {error}") from None

    @classmethod
    def taken(cls, sock: socket.socket, deadline: float) -> Connection | None:
        """Of an accepted socket; None, and the socket closed, where who connected has hung up."""
        try:
            return cls(sock, deadline)
        except OSError:  # macOS says so at once
            sock.close()
            return None

    def set_deadline(self, deadline: float) -> None:
        """Change how long one wait may take (seconds)."""
        self.deadline = deadline
        # The kernel's own timeouts on a blocking socket: one call moves a whole part, where
        # Python's timeouts poll before every few hundred kilobytes.
        self._socket.settimeout(None)
        seconds, fraction = divmod(max(deadline, 0.001), 1)
        value = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def read(self, nbytes: int) -> bytearray:
        """Exactly `nbytes` (small and bounded by the caller); raises LinkError."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data))
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill the whole view; raises LinkError if the peer closes, stalls or trickles."""
        self._fill(view, 0)

    def read_idle(self, view: memoryview) -> bool:
        """Like read_into, but False if nothing at all came within the deadline."""
        try:
            first = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            raise LinkError(f"connection lost: {error}") from None
        if first == 0:
            raise LinkError("the peer closed the connection")
        self._fill(view, first)
        return True

    def _fill(self, view: memoryview, done: int) -> None:
        total = len(view)
        limit = time.monotonic() + self.deadline + total / FLOOR
        receive = self._socket.recv_into
        try:
            while done < total:
                got = receive(view[done:], 0, socket.MSG_WAITALL)
                if got == 0:
                    raise LinkError("the peer closed the connection")
                done += got
                if done < total and time.monotonic() > limit:
                    raise LinkError(f"peer is too slow: {done} of {total} bytes in time")
        except (BlockingIOError, TimeoutError):
            raise LinkError(
                f"nothing came for {self.deadline:g} s; peer frozen or cut off"
            ) from None
        except OSError as error:
            raise LinkError(f"connection lost: {error}") from None

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        """Send all buffers in order; raises LinkError if the peer closes, stalls or trickles."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        limit = time.monotonic() + self.deadline + sum(map(len, views)) / FLOOR
        try:
            while views:
                views = _advance(views, self._socket.sendmsg(views))
                if views and time.monotonic() > limit:
                    raise LinkError("peer is too slow in taking what is sent")
        except (BlockingIOError, TimeoutError):
            raise LinkError(
                f"peer took nothing for {self.deadline:g} s; it is frozen or cut off"
            ) from None
        except OSError as error:
            raise LinkError(f"connection lost: {error}") from None

    def kill(self) -> None:
        """Wake whoever is blocked in this connection; safe from any thread, any number of times."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket; only by its user, when no thread is inside read or write."""
        self._socket.close()


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket, of any free port where `port` is 0; raises LinkError."""
    try:
        return socket.create_server((host, port), backlog=backlog)
    except OSError as error:
        where = f"{host}:{port}" if port else host
        raise LinkError(f"cannot listen on {where}: {error}", "failed") from None


def _advance(views: Sequence[memoryview], sent: int) -> list[memoryview]:
    left = list(views)
    while left and sent >= len(left[0]):
        sent -= len(left[0])
        left.pop(0)
    if left and sent:
        left[0] = left[0][sent:]
    return left
