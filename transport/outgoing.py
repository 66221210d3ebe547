"""The transfers that leave over one link, whichever of its ends this is, and their parts."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from transport.errors import LinkError
from transport.outbound import Part, Transfer
from transport.protocol import Ack, Message, Nack, Offer, Ready
from transport.wire import Connection

WINDOW = 1 << 30
"""Payload bytes that one transfer may have queued before `send` waits."""


class Way(Protocol):
    """A way for parts: `run` sends until next_part says None; any LinkError ends the link."""

    def run(self, out: Outgoing) -> None:
        """In a thread of its own."""

    def kill(self) -> None:
        """Wake `run`, from any thread."""

    def close(self) -> None:
        """Release what is held; after `run` has returned, in its thread."""


class Stream:
    """One TCP connection for parts."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def run(self, out: Outgoing) -> None:
        """Write parts as they come."""
        while (part := out.next_part()) is not None:
            self.connection.write(part.head, part.payload)
            out.written(part)
            del part  # the payload's memory must not outlive its transfer here

    def kill(self) -> None:
        """Wake `run`."""
        self.connection.kill()

    def close(self) -> None:
        """Release the socket."""
        self.connection.close()


class Outgoing:
    """Offers, and parts waiting for a way. A subclass says how a message leaves and a link ends."""

    def __init__(
        self, *, epoch: int, deadline: float, window: int = WINDOW, path: str = "tcp"
    ) -> None:
        self.path = path
        self.epoch = epoch
        self.deadline = deadline
        self.window = window
        self.streams = 1
        # One lock, three reasons to wait: an answer or an end, a part to send, room in the queue.
        # A thread is woken only for its own: hundreds of parts pass while `finish` waits.
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.room = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._parts: deque[Part] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._number = 0
        self._error: LinkError | None = None

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

    def tell(self, message: Message) -> None:
        """Send a control message; a failure ends the link and shows at the next wait."""
        raise NotImplementedError

    def fail(self, error: LinkError) -> None:
        """End the whole link. Idempotent."""
        raise NotImplementedError

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

    # -- for transfers ----------------------------------------------------------------------

    def queue(self, part: Part) -> None:
        """Add a part for the ways; called with `changed` held."""
        self._parts.append(part)
        self._ready.notify()

    def forget(self, transfer: Transfer) -> None:
        """The receiver's answers about this transfer are of no interest any more."""
        with self.changed:
            self._transfers.pop(transfer.offer.number, None)

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

    # -- for the link -----------------------------------------------------------------------

    def answered(self, message: Ready | Ack | Nack) -> bool:
        """Take the receiver's word about a transfer; False if it is of none that is open here."""
        with self.changed:
            transfer = self._transfers.get(message.number)
            if transfer is None:
                return False
            transfer.answer(message)
            if not isinstance(message, Ready):
                del self._transfers[message.number]
            self.changed.notify_all()
            self.room.notify_all()
            return True

    def end(self, error: LinkError) -> bool:
        """Fail every transfer and wake every wait; False if that has been done."""
        with self.changed:
            if self._error is not None:
                return False
            self._error = error
            for transfer in self._transfers.values():
                transfer.fail(error)
            self._transfers.clear()
            self._parts.clear()
            for condition in (self.changed, self.room, self._ready):
                condition.notify_all()
            return True
