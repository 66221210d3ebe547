"""One cell of the fault matrix: who does what wrong, when, and over what; and how it is done.

A fault is done to a link that stands, by the hands of the end that is at fault: its sockets, its
child process, its sink. What that end would say next is changed, kept back or said twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from link_parts import MemorySink, session_of

from store.codec.header import Piece
from transport import protocol
from transport.errors import LinkError
from transport.link import Link
from transport.protocol import Offer
from transport.receiver import Receiver
from transport.sender import Sender
from transport.session import Session
from transport.sink import Grant, Refusal
from transport.wire import Connection

FAULTS = (
    "die", "freeze", "stall", "short", "long", "corrupt", "epoch", "duplicate", "reorder",
    "refuse", "abort",
)  # fmt: skip
STAGES = ("idle", "offer", "ready", "mid", "ack")
SIDES = ("sender", "receiver")
WAYS = ("tcp", "ring", "jaccl")
MANGLED = ("short", "long", "corrupt", "duplicate", "reorder")
Side = Literal["sender", "receiver"]


@dataclass(frozen=True)
class Cell:
    """One case; `id` names it."""

    fault: str
    stage: str
    side: str
    way: str

    @property
    def id(self) -> str:
        return f"{self.way}-{self.side}-{self.stage}-{self.fault}"

    @property
    def by_data(self) -> bool:
        """Whether it is done to bulk data, which only a sender sends."""
        return self.side == "sender" and self.stage in ("ready", "mid", "ack")


def cells() -> list[Cell]:
    """All of them, but a sender that refuses: it has nothing to refuse (a lender that does is in
    test_both_ways)."""
    return [
        Cell(fault, stage, side, way)
        for way in WAYS
        for stage in STAGES
        for fault in FAULTS
        for side in SIDES
        if (fault, side) != ("refuse", "sender")
    ]


class Hands:
    """What one end does wrong. `arm` prepares it; `struck` is set once it has happened."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.struck = threading.Event()
        self.released = threading.Event()
        self.armed = False
        self.connections: list[Connection] = []
        self.trigger = Path(tempfile.gettempdir()) / f"tandem-strike-{os.getpid()}"
        self.trigger.unlink(missing_ok=True)
        self._lock = threading.Lock()
        self._kept: bytes | None = None

    # -- getting hold of an end -------------------------------------------------------------

    def seize(self, link: Link, receiver: Receiver) -> None:
        """Take hold of the end that is at fault."""
        self.link, self.receiver = link, receiver
        assert link._sender is not None
        self.sender: Sender = link._sender
        self.session: Session = session_of(receiver, "prefill-1")
        if self.cell.side == "sender":
            control, streams = self.sender._control, []
            if self.cell.way == "tcp":
                streams = [way.connection for way in self.sender._ways]  # type: ignore[attr-defined]
        else:
            control, streams = self.session.control, list(self.session._streams.values())
        self.connections = [control.connection, *streams]
        hurt = streams if self.cell.by_data and streams else [control.connection]
        for connection in self.connections:
            plain = connection.write
            if connection in hurt:
                self._replace(connection, lambda *b, p=plain, c=connection: self._write(p, c, b))
            else:
                self._replace(connection, lambda *b, p=plain: (self._pass(), p(*b)))
        poll = control.poll
        control.poll = lambda seconds: (self._pass(), poll(seconds))[1]  # type: ignore[method-assign]

    @staticmethod
    def _replace(connection: Connection, write: Callable[..., Any]) -> None:
        connection.write = write  # type: ignore[method-assign]

    # -- doing it ---------------------------------------------------------------------------

    def arm(self) -> None:
        """From now on; some of it happens at once."""
        with self._lock:
            self.armed = True
        fault, rdma = self.cell.fault, self.cell.way != "tcp"
        if fault in ("die", "freeze"):
            if rdma:
                self._signal(signal.SIGKILL if fault == "die" else signal.SIGSTOP)
            if fault == "die":
                for connection in self.connections:
                    connection.kill()
            self.struck.set()
        elif fault == "epoch":
            if self.cell.side == "sender":
                self.sender.epoch ^= 1
            else:
                self.session._incoming.epoch ^= 1
            self.struck.set()
        elif fault == "abort" and self.cell.side == "receiver":
            if not self.receiver.abort("t-1", "no reason"):
                self.session.fail(LinkError("given up", "aborted"))
            self.struck.set()
        elif fault == "stall" and rdma and self.cell.stage in ("ready", "mid", "ack"):
            self._signal(signal.SIGSTOP)
            self.struck.set()
        elif fault in MANGLED and self.cell.by_data and rdma:
            self.trigger.write_text(fault)
            self.struck.set()

    def _signal(self, number: signal.Signals) -> None:
        pid = children().get(1 if self.cell.side == "sender" else 0)
        if pid is not None:
            os.kill(pid, number)

    def _pass(self) -> None:
        if self.armed and self.cell.fault == "freeze":
            self.released.wait(60)

    def _write(self, plain: Callable[..., None], connection: Connection, buffers: Any) -> None:
        self._pass()
        if self.cell.by_data and self.cell.way != "tcp":
            plain(*buffers)  # its child is at fault
            return
        data = b"".join(bytes(buffer) for buffer in buffers)
        with self._lock:
            mine = self.armed and not self.struck.is_set() and self._due(data)
            if mine and self.cell.fault in (*MANGLED, "stall"):
                self.struck.set()
                self._mangle(plain, connection, data)
                return
            kept, self._kept = self._kept, None
        if self.armed and self.cell.fault == "stall" and self.struck.is_set():
            self._stalled(plain, data)
            return
        plain(data)
        if kept is not None:
            plain(kept)

    def _due(self, data: bytes) -> bool:
        """Whether this is what the fault is for: of control messages the one of the stage."""
        if self.cell.by_data:
            return True
        kind = type(protocol.decode(data[protocol.LENGTH.size :])).__name__
        wanted = {
            "idle": ("Ping",),
            "offer": ("Offer", "Ready"),
            "ready": ("Ping", "Ack"),
            "mid": ("Ping", "Ack"),
            "ack": ("Ack",),
        }
        return kind in wanted[self.cell.stage]

    def _mangle(self, plain: Callable[..., None], connection: Connection, data: bytes) -> None:
        fault = self.cell.fault
        if fault == "short":
            plain(data[: len(data) // 2])
            connection.kill()
        elif fault == "long":
            plain(data + b"\xc1" * 7)
        elif fault == "corrupt":
            changed = bytearray(data)
            changed[len(data) // 2] ^= 0x5A
            plain(bytes(changed))
        elif fault == "duplicate":
            plain(data + data)
        elif fault == "reorder":
            self._kept = data
        else:
            self._stalled(plain, data)

    def _stalled(self, plain: Callable[..., None], data: bytes) -> None:
        if self.cell.by_data:
            self.released.wait(60)
            plain(data)  # to a link that is over


class FaultySink(MemorySink):
    """A receiver's sink that refuses, stalls or tells where a transfer stands."""

    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self.hands = hands
        self.mine = hands.cell.side == "receiver"

    def _at(self, stage: str, transfer: str) -> None:
        hands, cell = self.hands, self.hands.cell
        if transfer != "t-1" or not self.mine or hands.struck.is_set() or cell.stage != stage:
            return
        if cell.fault == "refuse":
            hands.struck.set()
            raise OSError("disk full")
        if cell.fault == "stall" and cell.way == "tcp":
            hands.struck.set()
            hands.released.wait(60)
        elif cell.fault == "abort":
            # Not by this thread, which is inside the transfer.
            hands.struck.set()
            threading.Thread(target=hands.arm).start()
        elif cell.fault in ("die", "freeze", "stall", "epoch"):
            hands.arm()
            hands._pass()

    def admit(self, offer: Offer) -> Grant | Refusal:
        cell = self.hands.cell
        early = cell.stage in ("idle", "offer") and self.mine and offer.transfer == "t-1"
        if early and cell.fault == "refuse" and not self.hands.struck.is_set():
            self.hands.struck.set()
            return Refusal("no room at all")
        return super().admit(offer)

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        self._at("ready", transfer)
        return super().buffer(transfer, nbytes)

    def piece(self, transfer: str, piece: Piece) -> None:
        if len(self.pieces[transfer]) == 3:
            self._at("mid", transfer)
        super().piece(transfer, piece)

    def done(self, transfer: str) -> None:
        self._at("ack", transfer)
        super().done(transfer)


def children() -> dict[int, int]:
    """Rank (0 is the receiver's) and process id of this process's link children that are alive."""
    found = {}
    for pid in _output("pgrep", "-P", str(os.getpid())).split():
        command = _output("ps", "-ww", "-o", "args=", "-p", pid).split()
        with contextlib.suppress(IndexError, ValueError):
            if command[-2].startswith("rank"):
                found[int(command[-2][4:])] = int(pid)
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
