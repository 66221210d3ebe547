"""The sending end of a link over TCP: one control connection, k bulk streams, any transfers."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

from transport import auth, versions
from transport.control import Control
from transport.errors import LinkError
from transport.outbound import Part, Report, Transfer
from transport.protocol import Abort, Ack, Hello, Message, Nack, Offer, Ping, Ready
from transport.wire import Connection

Address = tuple[str, int]
WINDOW = 1 << 30
"""Payload bytes that one transfer may have queued before `send` waits."""

__all__ = ["Report", "Sender", "Transfer"]


class Sender:
    """A connected link; make it with `connect`. After any link error it is dead: connect anew."""

    path = "tcp"

    def __init__(
        self,
        control: Control,
        data: Sequence[Connection],
        peer: Hello,
        deadline: float,
        window: int,
    ) -> None:
        self.peer = peer
        self.epoch = peer.epoch
        self.deadline = deadline
        self.window = window
        self.streams = len(data)
        self.changed = threading.Condition()
        self._control = control
        self._data = list(data)
        self._parts: deque[Part] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._number = 0
        self._error: LinkError | None = None
        self._threads = [threading.Thread(target=self._listen, name="link-control", daemon=True)]
        self._threads += [
            threading.Thread(target=self._write, args=(each,), name=f"link-data-{i}", daemon=True)
            for i, each in enumerate(data)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def connect(
        cls,
        address: Address | list[Address],
        secret: bytes,
        deadline: float = 10.0,
        *,
        streams: int = 2,
        node: str = "local",
        window: int = WINDOW,
    ) -> Sender:
        """Form a link: `streams` data connections over one address, or one per cable in turn.

        `deadline` (seconds) bounds every single wait for the peer. Raises LinkError: peer not
        there, not holding the secret, or of another version.
        """
        auth.check_secret(secret)
        if not 1 <= streams <= auth.MAX_STREAMS:
            raise LinkError(f"{streams} streams, not 1..{auth.MAX_STREAMS}", "protocol")
        addresses = [address] if isinstance(address, tuple) else list(address)
        link = secrets.token_bytes(16)
        made: list[Connection] = []
        try:
            control = Control(_join(made, addresses[0], secret, auth.CONTROL, 0, link, deadline))
            mine = versions.hello(node)
            control.send(mine)
            theirs = control.receive()
            if not isinstance(theirs, Hello):
                raise LinkError("the peer's first message was not a hello", "protocol")
            versions.compare(mine, theirs)
            data = [
                _join(made, addresses[i % len(addresses)], secret, auth.DATA, i, link, deadline)
                for i in range(streams)
            ]
            return cls(control, data, theirs, deadline, window)
        except BaseException:
            for connection in made:
                connection.close()
            raise

    @property
    def alive(self) -> bool:
        """False once the link has failed or was closed."""
        return self._error is None

    @property
    def control_bytes(self) -> int:
        """Bytes of control messages so far, both directions."""
        return self._control.sent + self._control.received

    def offer(
        self,
        transfer: str,
        *,
        fingerprint: bytes,
        tokens: int,
        nbytes: int,
        response: str | None = None,
        start: int = 0,
        block_tokens: int = 0,
        attempt: int = 1,
        purpose: str = "handoff",
    ) -> Transfer:
        """Offer a state and wait for the receiver's grant; see protocol.Offer for the arguments.

        `nbytes` must be an upper bound of all payload bytes. Raises Refused (the link is sound),
        LinkError otherwise. If the same transfer was delivered before, the handle is already
        acknowledged: `send` drops its pieces and `finish` returns at once.
        """
        with self.changed:
            if self._error is not None:
                raise self._error
            offer = Offer(
                transfer=transfer,
                attempt=attempt,
                response=response or transfer,
                fingerprint=fingerprint,
                start=start,
                tokens=tokens,
                nbytes=nbytes,
                block_tokens=block_tokens,
                purpose=purpose,
                number=self._number,
            )
            offer.validate()
            handle = Transfer(self, offer)
            self._transfers[self._number] = handle
            self._number += 1
            # Sent under the condition: numbers must reach the receiver in growing order.
            self.tell(offer)
        try:
            handle.await_ready()
        except LinkError:
            self.forget(handle)
            raise
        return handle

    def close(self) -> None:
        """End the link and wait for its threads; transfers still open fail. Idempotent."""
        self._fail(LinkError("the link was closed", "aborted"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self.deadline)

    # -- for transfers ----------------------------------------------------------------------

    def tell(self, message: Offer | Abort) -> None:
        """Send a control message; a failure ends the link and shows at the next wait."""
        try:
            self._control.send(message)
        except LinkError as error:
            self._fail(error)

    def queue(self, part: Part) -> None:
        """Add a part for the streams; called with `changed` held."""
        self._parts.append(part)

    def wake(self) -> None:
        """Let the streams look at the queue."""
        with self.changed:
            self.changed.notify_all()

    def forget(self, transfer: Transfer) -> None:
        """The receiver's answers about this transfer are of no interest any more."""
        with self.changed:
            self._transfers.pop(transfer.offer.number, None)

    # -- threads ----------------------------------------------------------------------------

    def _fail(self, error: LinkError) -> None:
        with self.changed:
            if self._error is not None:
                return
            self._error = error
            for transfer in self._transfers.values():
                transfer.fail(error)
            self._transfers.clear()
            self._parts.clear()
            self.changed.notify_all()
        self._control.connection.kill()
        for connection in self._data:
            connection.kill()

    def _write(self, connection: Connection) -> None:
        try:
            while (part := self._next()) is not None:
                connection.write(part.head, part.payload)
                with self.changed:
                    part.transfer.left(len(part.payload))
                    self.changed.notify_all()
                del part  # the payload's memory must not outlive its transfer here
        except LinkError as error:
            self._fail(error)
        finally:
            connection.close()

    def _next(self) -> Part | None:
        with self.changed:
            while True:
                if self._error is not None:
                    return None
                while self._parts:
                    part = self._parts.popleft()
                    if not part.transfer.over:
                        return part
                    part.transfer.left(len(part.payload))
                self.changed.wait()

    def _listen(self) -> None:
        heard = pinged = time.monotonic()
        count = 0
        try:
            while self._error is None:
                message = self._control.poll(self.deadline / 4)
                now = time.monotonic()
                if message is not None:
                    heard = now
                    self._heard(message)
                elif now - heard > self.deadline:
                    raise LinkError(f"no sign of life from the receiver for {self.deadline:g} s")
                if now - pinged >= self.deadline / 4:
                    pinged = now
                    count = (count + 1) & 0xFFFFFFFF
                    self._control.send(Ping(count))
        except LinkError as error:
            self._fail(error)
        finally:
            self._control.connection.close()

    def _heard(self, message: Message) -> None:
        if isinstance(message, Ping):
            return
        if not isinstance(message, Ready | Ack | Nack):
            raise LinkError(f"unexpected {type(message).__name__} from a receiver", "protocol")
        with self.changed:
            transfer = self._transfers.get(message.number)
            if transfer is not None:
                transfer.answer(message)
                if not isinstance(message, Ready):
                    del self._transfers[message.number]
                self.changed.notify_all()


def _join(
    made: list[Connection],
    address: Address,
    secret: bytes,
    role: int,
    index: int,
    link: bytes,
    deadline: float,
) -> Connection:
    connection = Connection.dial(address, deadline)
    made.append(connection)
    auth.prove(connection, secret, role, index, link)
    return connection
