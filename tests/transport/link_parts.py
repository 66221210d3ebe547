"""Pieces, a recording sink and peers in processes of their own, for the link's tests."""

from __future__ import annotations

import contextlib
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from store.codec.header import Header, Kind, Leaf, Piece
from transport.protocol import Offer
from transport.receiver import Receiver
from transport.sender import Report, Sender
from transport.session import Session
from transport.sink import Grant, Refusal

SECRET = b"0123456789abcdef0123456789abcdef"
FINGERPRINT = bytes(range(16))
LONG = 30.0
"""Deadline (seconds) between ends that are sound: a machine that stalls is no fault of theirs."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def make_piece(kind: Kind, start: int, stop: int, payload: bytes, note: object = None) -> Piece:
    """A piece with a right header around any payload."""
    head = Header(
        kind=kind,
        fingerprint=FINGERPRINT,
        start=start,
        stop=stop,
        chain=stop.to_bytes(16, "big"),
        parent=start.to_bytes(16, "big"),
        leaves=(Leaf((0,), "keys", "uint8", (len(payload),)),) if payload else (),
        digest=xxhash.xxh3_64_intdigest(payload),
        extra={} if note is None else {"note": note},
    )
    return Piece(head, memoryview(payload))


def make_state(sizes: list[int], seed: int = 0) -> list[Piece]:
    """Rows of the given payload sizes and, with the last size, a snapshot."""
    source = random.Random(seed)
    payloads = [source.randbytes(size) for size in sizes]
    pieces = [make_piece("rows", 16 * i, 16 * (i + 1), data) for i, data in enumerate(payloads)]
    pieces[-1] = make_piece("snapshot", 16 * (len(sizes) - 1), 16 * (len(sizes) - 1), payloads[-1])
    return pieces


def contents(pieces: list[Piece]) -> list[tuple[bytes, bytes]]:
    """Header and payload bytes, for comparing."""
    return [(piece.header.pack(), bytes(piece.payload)) for piece in pieces]


def deliver(sender: Sender, name: str, state: list[Piece], attempt: int = 1) -> Report:
    """Offer, send and finish one state."""
    nbytes = sum(len(piece.payload) for piece in state)
    transfer = sender.offer(
        name, fingerprint=FINGERPRINT, tokens=64, nbytes=nbytes, attempt=attempt
    )
    for piece in state[:-1]:
        transfer.send([piece])
    return transfer.finish(state[-1])


class MemorySink:
    """Keeps what it is given; `events` is the exact order of calls by transfer."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.models = {FINGERPRINT}
        self.held = 0
        self.lock = threading.Lock()
        self.pieces: dict[str, list[Piece]] = {}
        self.grants: dict[str, int] = {}
        self.finished: dict[str, list[Piece]] = {}
        self.events: list[tuple[str, str]] = []
        self.aborted: list[tuple[str, str]] = []
        self.changed = threading.Condition(self.lock)

    def admit(self, offer: Offer) -> Grant | Refusal:
        with self.changed:
            self._note("admit", offer.transfer)
            if offer.fingerprint not in self.models:
                return Refusal("another model is loaded here", "fingerprint")
            if self.held + offer.nbytes > self.limit:
                return Refusal(f"no room for {offer.nbytes} bytes")
            assert offer.transfer not in self.grants
            self.held += offer.nbytes
            self.grants[offer.transfer] = offer.nbytes
            self.pieces[offer.transfer] = []
            return Grant(offer.nbytes)

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        assert transfer in self.grants
        return memoryview(bytearray(nbytes))

    def piece(self, transfer: str, piece: Piece) -> None:
        with self.changed:
            self._note("piece", transfer)
            self.pieces[transfer].append(piece)

    def done(self, transfer: str) -> None:
        with self.changed:
            self._note("done", transfer)
            self.finished[transfer] = self.pieces.pop(transfer)
            self.held -= self.grants.pop(transfer)

    def abort(self, transfer: str, reason: str) -> None:
        with self.changed:
            self._note("abort", transfer)
            self.aborted.append((transfer, reason))
            self.pieces.pop(transfer, None)
            self.held -= self.grants.pop(transfer, 0)

    def _note(self, what: str, transfer: str) -> None:
        self.events.append((what, transfer))
        self.changed.notify_all()

    def wait_for(self, what: str, transfer: str, count: int = 1, seconds: float = 60) -> None:
        """Until the call happened `count` times (a safety net, not a measurement)."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.events.count((what, transfer)) >= count, seconds
            ), f"no {what} of {transfer}: {self.events}"


@contextlib.contextmanager
def receiving(
    sink: object, deadline: float = LONG, port: int = 0, **more: object
) -> Iterator[Receiver]:
    """A receiver on loopback that is closed, and must be clean, afterwards."""
    receiver = Receiver("127.0.0.1", port, SECRET, sink, deadline, **more)  # type: ignore[arg-type]
    try:
        yield receiver
    finally:
        receiver.close()
        left = receiver.stats()
        assert (left["transfers"], left["threads"]) == (0, 0), left


def session_of(receiver: Receiver, node: str) -> Session:
    """The receiving end of the link from `node`, as soon as its Hello has been taken down there.

    With another `deadline` from now on, it gives up a sender that is silent so long.
    """
    limit = time.monotonic() + 60
    while True:
        for session in list(receiver._sessions.values()):
            if session.peer is not None and session.peer.node == node:
                return session
        assert time.monotonic() < limit, f"no link from {node}"
        time.sleep(0.005)


def open_files() -> int:
    """How many descriptors this process holds."""
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def link_threads() -> list[str]:
    """Names of the link's threads that stay alive: one that has done its work may still be going.

    (A safety net of 60 s.)
    """
    limit = time.monotonic() + 60
    while True:
        names = [each.name for each in threading.enumerate() if each.name.startswith("link-")]
        if not names or time.monotonic() > limit:
            return names
        time.sleep(0.005)


class Peer:
    """A helper process of these tests, spoken to by lines."""

    def __init__(
        self,
        role: str,
        *arguments: object,
        program: str = "link_peer.py",
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-P", str(HERE / program), role, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select sees every line that is there
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
        )

    def line(self, seconds: float = 60) -> str:
        """The peer's next line."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "the peer said nothing in time"
        return self.process.stdout.readline().decode().strip()

    def say(self, text: str) -> None:
        """Tell the peer something."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to this peer's process."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill it and release its pipes."""
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
