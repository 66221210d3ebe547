"""The control connection: whole messages in both directions, and a select that always ends."""

from __future__ import annotations

import contextlib
import select
import threading

from transport import protocol
from transport.errors import LinkError
from transport.protocol import Message
from transport.wire import Connection


class Control:
    """Message framing over one Connection. Any thread may send, one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sent = 0
        self.received = 0
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message; raises LinkError."""
        data = protocol.encode(message)
        with self._lock:
            self.connection.write(data)
            self.sent += len(data)

    def try_send(self, message: Message) -> None:
        """Send one message if the connection still takes it."""
        with contextlib.suppress(LinkError):
            self.send(message)

    def receive(self) -> Message:
        """The next message, within the connection's deadline; raises LinkError."""
        prefix = self.connection.read(protocol.LENGTH.size)
        body = self.connection.read(protocol.length(prefix))
        self.received += len(prefix) + len(body)
        return protocol.decode(body)

    def poll(self, seconds: float) -> Message | None:
        """The next message if one begins within `seconds`; raises LinkError."""
        if self.connection.fileno() < 0:
            raise LinkError("connection is closed")
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLIN)
        return self.receive() if poller.poll(max(1, int(seconds * 1000))) else None
