"""The sending end of a link: one control connection, the ways its bulk data takes, transfers."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from transport import auth, versions
from transport.control import Control
from transport.errors import LinkError
from transport.outbound import Part, Report, Transfer
from transport.protocol import Ack, Hello, Message, Nack, Offer, Ping, Ready
from transport.wire import Connection

Address = tuple[str, int]
WINDOW = 1 << 30
"""Payload bytes that one transfer may have queued before `send` waits."""

__all__ = ["Report", "Sender", "Transfer"]


class Way(Protocol):
    """A way for parts: `run` sends until next_part says None; any LinkError ends the link."""

    def run(self, sender: Sender) -> None:
        """In a thread of its own."""

    def kill(self) -> None:
        """Wake `run`, from any thread."""

    def close(self) -> None:
        """Release what is held; after `run` has returned, in its thread."""


class Stream:
    """One TCP connection for parts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, sender: Sender) -> None:
        """Write parts as they come."""
        while (part := sender.next_part()) is not None:
            self._connection.write(part.head, part.payload)
            sender.written(part)
            del part  # the payload's memory must not outlive its transfer here

    def kill(self) -> None:
        """Wake `run`."""
        self._connection.kill()

    def close(self) -> None:
        """Release the socket."""
        self._connection.close()


class Sender:
    """A connected link; make it with `connect`. After any link error it is dead: connect anew."""

    def __init__(
        self,
        control: Control,
        ways: Sequence[Way],
        peer: Hello,
        deadline: float,
        window: int = WINDOW,
        path: str = "tcp",
    ) -> None:
        self.peer = peer
        self.path = path
        self.epoch = peer.epoch
        self.deadline = deadline
        self.window = window
        self.streams = len(ways)
        # One lock, three reasons to wait: an answer or an end, a part to send, room in the queue.
        # A thread is woken only for its own: hundreds of parts pass while `finish` waits.
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.room = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._control = control
        self._ways = list(ways)
        self._parts: deque[Part] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._number = 0
        self._error: LinkError | None = None
        self._threads = [threading.Thread(target=self._listen, name="link-control", daemon=True)]
        self._threads += [
            threading.Thread(target=self._send, args=(each,), name=f"link-data-{i}", daemon=True)
            for i, each in enumerate(ways)
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
            control = Control(join(made, addresses[0], secret, auth.CONTROL, 0, link, deadline))
            theirs = greet(control, versions.hello(node))
            data = [
                join(made, addresses[i % len(addresses)], secret, auth.DATA, i, link, deadline)
                for i in range(streams)
            ]
            ways = [Stream(connection) for connection in data]
            return cls(control, ways, theirs, deadline, window)
        except BaseException:
            for connection in made:
                connection.close()
            raise

    @property
    def alive(self) -> bool:
        """False once the link has failed or was closed."""
        return self._error is None

    @property
    def busy(self) -> bool:
        """True while a transfer is open."""
        with self.changed:
            return bool(self._transfers)

    @property
    def error(self) -> LinkError | None:
        """Why the link is dead."""
        return self._error

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
        self.fail(LinkError("the link was closed", "aborted"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self.deadline)

    # -- for transfers ----------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Send a control message; a failure ends the link and shows at the next wait."""
        try:
            self._control.send(message)
        except LinkError as error:
            self.fail(error)

    def queue(self, part: Part) -> None:
        """Add a part for the ways; called with `changed` held."""
        self._parts.append(part)
        self._ready.notify()

    def forget(self, transfer: Transfer) -> None:
        """The receiver's answers about this transfer are of no interest any more."""
        with self.changed:
            self._transfers.pop(transfer.offer.number, None)

    def fail(self, error: LinkError) -> None:
        """End the link: its transfers fail with this error. Idempotent."""
        with self.changed:
            if self._error is not None:
                return
            self._error = error
            for transfer in self._transfers.values():
                transfer.fail(error)
            self._transfers.clear()
            self._parts.clear()
            for condition in (self.changed, self.room, self._ready):
                condition.notify_all()
        self._control.connection.kill()
        for way in self._ways:
            way.kill()

    # -- for ways ---------------------------------------------------------------------------

    def next_part(self, *, wait: bool = True) -> Part | None:
        """The next part to be sent; None if the link has ended or, without `wait`, if none is."""
        with self.changed:
            while self._error is None:
                while self._parts:
                    part = self._parts.popleft()
                    if not part.transfer.over:
                        return part
                    self._gone(part)
                if not wait:
                    break
                self._ready.wait()
            return None

    def written(self, part: Part) -> None:
        """The part's payload is not needed any more."""
        with self.changed:
            self._gone(part)

    def _gone(self, part: Part) -> None:
        part.transfer.left(len(part.payload))
        self.room.notify_all()

    # -- threads ----------------------------------------------------------------------------

    def _send(self, way: Way) -> None:
        try:
            way.run(self)
        except LinkError as error:
            self.fail(error)
        finally:
            way.close()

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
            self.fail(error)
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
                self.room.notify_all()


def greet(control: Control, mine: Hello) -> Hello:
    """Exchange Hello as the sender; raises LinkError if the versions do not fit."""
    control.send(mine)
    theirs = control.receive()
    if not isinstance(theirs, Hello):
        raise LinkError("the peer's first message was not a hello", "protocol")
    versions.compare(mine, theirs)
    return theirs


def join(
    made: list[Connection],
    address: Address,
    secret: bytes,
    role: int,
    index: int,
    link: bytes,
    deadline: float,
) -> Connection:
    """Dial and prove the secret; the connection is added to `made`. Raises LinkError."""
    connection = Connection.dial(address, deadline)
    made.append(connection)
    auth.prove(connection, secret, role, index, link)
    return connection
