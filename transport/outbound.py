"""One transfer on its way out: pieces queued for the streams, and the wait for the last word."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from store.codec.header import Piece
from transport.errors import LinkError, Refused
from transport.frame import MAX_HEADER, MAX_PIECES, ROWS, SNAPSHOT, Frame, cut, header_digest
from transport.protocol import Abort, Ack, Nack, Offer, Ready, brief
from transport.wire import FLOOR

if TYPE_CHECKING:
    from transport.outgoing import Outgoing


@dataclass(frozen=True, slots=True)
class Report:
    """What a delivered transfer cost.

    `seconds` from the offer to the ACK; `exposed_seconds` from `finish` to the ACK, the part that
    no computation hid, and `exposed_bytes` what was still to be sent then; `path` names the
    backend; `duplicate` if the state had arrived before.
    """

    bytes: int
    seconds: float
    exposed_seconds: float
    path: str
    streams: int
    duplicate: bool = False
    exposed_bytes: int = 0


class Part(NamedTuple):
    """One frame to be written by whichever stream is free."""

    transfer: Transfer
    head: bytes
    payload: memoryview


class Transfer:
    """Handle of one offered state; made by Sender.offer. All methods may be called by any thread.

    Payload memory must not be changed between `send` and the end of the transfer.
    """

    def __init__(self, sender: Outgoing, offer: Offer) -> None:
        self.offer = offer
        self.duplicate = False
        self._sender = sender
        self._changed = sender.changed
        self._begun = time.monotonic()
        self._grant: Ready | None = None
        self._ack: Ack | None = None
        self._error: LinkError | None = None
        self._sequence = 0
        self._closed = False
        self._aborted = False
        self._sent = 0
        self._queued = 0

    # -- for the caller ---------------------------------------------------------------------

    def send(self, pieces: Iterable[Piece]) -> None:
        """Queue pieces of rows, in order; they leave while the caller computes the next chunk.

        Returns at once unless more than the link's window is queued. Raises LinkError if the
        transfer has failed meanwhile.
        """
        for piece in pieces:
            self._push(piece, ROWS)

    def finish(self, snapshot: Piece) -> Report:
        """Send the snapshot, the last piece, and wait until the receiver has verified all of it.

        Raises LinkError (the transfer is then given up on both sides; it may be offered again
        with a higher attempt number).
        """
        begun = time.monotonic()
        with self._changed:
            exposed = self._queued + len(memoryview(snapshot.payload).cast("B"))
        self._push(snapshot, SNAPSHOT)
        with self._changed:
            limit = begun + self._sender.deadline + self._sent / FLOOR
            while self._ack is None and self._error is None:
                left = limit - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            ack, error = self._ack, self._error
        if ack is None:
            reason = error or LinkError("no acknowledgement in time; the receiver is stuck or slow")
            self.abort(str(reason))
            raise reason
        if not ack.duplicate and ack.nbytes != self._sent:
            raise LinkError(f"{ack.nbytes} bytes acknowledged, {self._sent} sent", "protocol")
        now = time.monotonic()
        return Report(
            bytes=self._sent,
            seconds=now - self._begun,
            exposed_seconds=now - begun,
            path=self._sender.path,
            streams=self._sender.streams,
            duplicate=ack.duplicate,
            exposed_bytes=exposed,
        )

    def abort(self, reason: str) -> None:
        """Give the transfer up on both sides; nothing queued leaves any more. Idempotent."""
        with self._changed:
            if self._ack is not None or self._aborted:
                return
            self._aborted = True
            if self._error is None:
                self._error = LinkError(f"given up: {reason}", "aborted")
            self._changed.notify_all()
            self._sender.room.notify_all()
        self._sender.forget(self)
        self._sender.tell(Abort(self.offer.number, brief(reason)))

    # -- for the sender's threads -----------------------------------------------------------

    def await_ready(self) -> None:
        """Wait for READY, NACK or ACK; raises Refused or LinkError."""
        limit = self._begun + self._sender.deadline
        with self._changed:
            while self._grant is None and self._ack is None and self._error is None:
                left = limit - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            answered = self._grant is not None or self._ack is not None
            error = self._error
        if error is not None:
            raise error
        if not answered:
            self.abort("no answer to the offer")
            raise LinkError(f"no answer to the offer within {self._sender.deadline:g} s")
        if self._grant is not None and self._grant.nbytes < self.offer.nbytes:
            self.abort("the grant is too small")
            raise Refused(
                f"granted {self._grant.nbytes} bytes where {self.offer.nbytes} are needed", "memory"
            )

    def answer(self, message: Ready | Ack | Nack) -> None:
        """Take the receiver's word; called with the sender's condition held."""
        if isinstance(message, Ready):
            self._grant = message
        elif isinstance(message, Ack):
            if not message.duplicate if self._grant is None else not self._closed:
                self.fail(LinkError("acknowledged before everything was sent", "protocol"))
                return
            self._ack = message
            self.duplicate = message.duplicate
        elif self._grant is None:
            self.fail(Refused(message.reason, message.code))
        else:
            self.fail(LinkError(f"the receiver gave up: {message.reason}", message.code))

    def fail(self, error: LinkError) -> None:
        """The transfer cannot succeed any more; called with the sender's condition held."""
        if self._ack is None and self._error is None:
            self._error = error

    @property
    def over(self) -> bool:
        """True if nothing of it should leave any more."""
        return self._error is not None or self._ack is not None

    def left(self, nbytes: int) -> None:
        """Payload bytes were written or dropped; called with the sender's condition held."""
        self._queued -= nbytes

    # -- queueing ---------------------------------------------------------------------------

    def _push(self, piece: Piece, kind: int) -> None:
        payload = memoryview(piece.payload).cast("B")
        header = piece.header.pack()
        if len(header) > MAX_HEADER or self._sequence >= MAX_PIECES:
            raise LinkError("the piece's header or number is beyond the protocol's limit", "failed")
        with self._changed:
            self._wait_for_room(len(payload))
            if self._error is not None:
                raise self._error
            if self._ack is not None:
                return  # delivered by an earlier attempt
            if self._closed or self._grant is None:
                raise LinkError("the snapshot was sent already; nothing may follow it", "failed")
            if self._sent + len(payload) > self._grant.nbytes:
                error = LinkError(
                    f"the state is larger than the {self._grant.nbytes} bytes granted", "memory"
                )
                self._error = error
                raise error
            self._closed = kind == SNAPSHOT
            self._queue(kind, header, payload, self._grant.part)

    def _wait_for_room(self, nbytes: int) -> None:
        window = self._sender.window
        limit = time.monotonic() + self._sender.deadline + window / FLOOR
        while self._queued and self._queued + nbytes > window and not self.over:
            left = limit - time.monotonic()
            if left <= 0:
                self._error = LinkError("the link takes the state too slowly")
                return
            self._sender.room.wait(left)

    def _queue(self, kind: int, header: bytes, payload: memoryview, part: int) -> None:
        digest = header_digest(header)
        for offset, length in cut(len(payload), part):
            first = offset == 0
            frame = Frame(
                kind=kind,
                epoch=self._sender.epoch,
                transfer=self.offer.number,
                sequence=self._sequence,
                offset=offset,
                length=length,
                payload=len(payload),
                header=len(header) if first else 0,
                digest=digest if first else 0,
            )
            head = frame.pack() + (header if first else b"")
            self._sender.queue(Part(self, head, payload[offset : offset + length]))
        self._sequence += 1
        self._sent += len(payload)
        self._queued += len(payload)
