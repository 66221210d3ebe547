"""Peers that hold the secret and then break the protocol: every byte is sent by hand."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace

from link_parts import FINGERPRINT, SECRET

from store.codec.header import Piece
from transport import auth, versions
from transport.control import Control
from transport.errors import LinkError
from transport.frame import ROWS, SIZE, SNAPSHOT, Frame, cut, header_digest
from transport.protocol import Hello, Message, Offer, Ping
from transport.wire import Connection

PATIENCE = 60.0


class RogueSender:
    """A sender without threads: the test decides what leaves, and when."""

    def __init__(self, address: tuple[str, int], streams: int = 1, node: str = "rogue") -> None:
        self.link = secrets.token_bytes(16)
        self.control = Control(self._join(address, auth.CONTROL, 0))
        self.control.send(versions.hello(node))
        hello = self.control.receive()
        assert isinstance(hello, Hello)
        self.epoch = hello.epoch
        self.data = [self._join(address, auth.DATA, i) for i in range(streams)]

    def _join(self, address: tuple[str, int], role: int, index: int) -> Connection:
        connection = Connection.dial(address, PATIENCE)
        auth.prove(connection, SECRET, role, index, self.link)
        return connection

    def offer(self, name: str, nbytes: int, number: int = 0, attempt: int = 1) -> Message:
        """Offer and return the answer."""
        self.control.send(
            Offer(name, attempt, name, FINGERPRINT, 0, 100, nbytes, 16, number=number)
        )
        return self.answer()

    def answer(self) -> Message:
        """The next message that is not a ping's echo."""
        while isinstance(message := self.control.receive(), Ping):
            pass
        return message

    def frames(self, piece: Piece, sequence: int, part: int, number: int = 0) -> list[bytes]:
        """The right bytes for one piece, a part each."""
        return [
            frame.pack() + head + bytes(body)
            for frame, head, body in self.parts(piece, sequence, part, number)
        ]

    def parts(
        self, piece: Piece, sequence: int, part: int, number: int = 0
    ) -> list[tuple[Frame, bytes, memoryview]]:
        """Frame, piece header and payload of every part."""
        header = piece.header.pack()
        size = len(piece.payload)
        kind = SNAPSHOT if piece.header.kind == "snapshot" else ROWS
        made = []
        for offset, length in cut(size, part):
            head = header if offset == 0 else b""
            digest = header_digest(head) if head else 0
            frame = Frame(
                kind, self.epoch, number, sequence, offset, length, size, len(head), digest
            )
            made.append((frame, head, piece.payload[offset : offset + length]))
        return made

    def ended(self) -> bool:
        """Wait until the receiver has closed this link; False if it does not."""
        try:
            while True:
                self.control.receive()
        except LinkError as error:
            return "nothing came" not in str(error)

    def close(self) -> None:
        """Drop all connections without a word."""
        for connection in [self.control.connection, *self.data]:
            connection.kill()
            connection.close()


class RogueReceiver:
    """A receiver that answers what a test tells it to; one sender, one stream."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.made: list[Connection] = []
        self.epoch = 4711

    def accept(self) -> Connection:
        """One authenticated connection."""
        sock, _ = self.listener.accept()
        connection = Connection(sock, PATIENCE)
        self.made.append(connection)
        auth.demand(connection, SECRET)
        auth.welcome(connection)
        return connection

    def greet(self, **changes: object) -> Control:
        """The control connection, after Hello both ways."""
        control = Control(self.accept())
        assert isinstance(control.receive(), Hello)
        control.send(replace(versions.hello("rogue"), epoch=self.epoch, **changes))  # type: ignore[arg-type]
        return control

    def open(self) -> tuple[Control, Connection]:
        """A whole link."""
        control = self.greet()
        return control, self.accept()

    def close(self) -> None:
        """Drop everything."""
        self.listener.close()
        for connection in self.made:
            connection.kill()
            connection.close()


def next_offer(control: Control) -> Offer:
    """Skip pings, answering them, up to an offer."""
    while True:
        message = control.receive()
        if isinstance(message, Offer):
            return message
        control.try_send(message)  # to a sender that may have gone meanwhile


def take(data: Connection) -> Frame:
    """Read one whole frame and forget its payload."""
    frame = Frame.unpack(data.read(SIZE))
    data.read(frame.header)
    data.read(frame.length)
    return frame
