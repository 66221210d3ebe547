"""The transfers that come in over one link, whichever of its ends this is."""

from __future__ import annotations

import threading

from transport.control import Control
from transport.desk import Desk
from transport.errors import Code, LinkError
from transport.frame import MAX_PART, SIZE, Frame
from transport.inbound import Inbound
from transport.protocol import Abort, Ack, Nack, Offer, Ready, brief
from transport.wire import Connection

MAX_OFFERS = 32
"""Transfers of one link that may be open at once."""


class Incoming:
    """Answers offers over `control` and takes their parts. Thread-safe; over after `fail`."""

    def __init__(self, control: Control, epoch: int, desk: Desk) -> None:
        self.epoch = epoch
        self._control = control
        self._desk = desk
        self._lock = threading.Lock()
        self._inbound: dict[int, Inbound] = {}
        self._highest = -1
        self._failed: LinkError | None = None

    @property
    def busy(self) -> bool:
        """True while a transfer is open."""
        with self._lock:
            return bool(self._inbound)

    # -- control ----------------------------------------------------------------------------

    def offered(self, offer: Offer) -> None:
        """Take an offer in hand. Raises LinkError if its number breaks the protocol."""
        with self._lock:
            if offer.number <= self._highest:
                raise LinkError("offer numbers of a link must grow", "protocol")
            self._highest = offer.number
            crowded = len(self._inbound) >= MAX_OFFERS
            if not crowded:
                inbound = Inbound(offer, self._desk.sink, self._desk.part, self._ended)
                self._inbound[offer.number] = inbound
        if crowded:
            self._control.send(Nack(offer.number, "busy", f"{MAX_OFFERS} transfers are open"))
            return
        # Admission may wait for memory; pings must be answered meanwhile.
        self._desk.spawn(f"offer-{offer.number}", self._admit, inbound)

    def aborted(self, message: Abort) -> None:
        """The sender has given a transfer up."""
        with self._lock:
            inbound = self._inbound.get(message.number)
        if inbound is not None:
            inbound.abort("aborted", f"sender: {message.reason}")

    def expire(self, now: float) -> None:
        """Give up what was not complete within its grant."""
        with self._lock:
            late = [inbound for inbound in self._inbound.values() if now > inbound.expires]
        for inbound in late:
            inbound.abort("aborted", "the memory grant ran out before the state was complete")

    def fail(self, error: LinkError) -> None:
        """The link has ended: give up its transfers. Idempotent."""
        with self._lock:
            if self._failed is not None:
                return
            self._failed = error
            open_transfers = list(self._inbound.values())
        for inbound in open_transfers:
            inbound.abort("lost", f"the link broke: {error}")

    def _admit(self, inbound: Inbound) -> None:
        offer = inbound.offer
        verdict = self._desk.enter(inbound)
        if verdict is not None:
            with self._lock:
                self._inbound.pop(offer.number, None)
            self._control.try_send(verdict)
            return
        grant = inbound.admit()
        if grant is not None:
            self._control.try_send(Ready(offer.number, grant.nbytes, inbound.part))
        with self._lock:
            failed = self._failed
        if failed is not None:
            inbound.abort("lost", f"the link broke: {failed}")

    def _ended(self, inbound: Inbound, code: Code | None, reason: str) -> None:
        self._desk.leave(inbound, done=code is None)
        number = inbound.offer.number
        with self._lock:
            self._inbound.pop(number, None)
        if code is None:
            self._control.try_send(Ack(number, inbound.nbytes))
        else:
            self._control.try_send(Nack(number, code, brief(reason)))

    # -- data -------------------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Receive parts of one TCP stream until the link ends; raises LinkError."""
        head = memoryview(bytearray(SIZE))
        scratch = memoryview(bytearray(0))
        while self._failed is None:
            if not connection.read_idle(head):
                continue
            frame = Frame.unpack(head)
            target, inbound = self._claim(frame)
            if target is None and frame.length > len(scratch):
                scratch = memoryview(bytearray(MAX_PART))
            _part(connection, frame, inbound, scratch if target is None else target)

    def take(self, frame: Frame, header: bytes, payload: memoryview) -> None:
        """One part that has arrived by way of a batch; raises LinkError."""
        target, inbound = self._claim(frame)
        if target is not None and inbound is not None:
            target[:] = payload
            inbound.landed(frame, header)

    def _claim(self, frame: Frame) -> tuple[memoryview | None, Inbound | None]:
        if frame.epoch != self.epoch:
            raise LinkError(f"frame of epoch {frame.epoch}, not {self.epoch}", "protocol")
        with self._lock:
            inbound = self._inbound.get(frame.transfer)
            known = frame.transfer <= self._highest
        if inbound is None:
            if not known:
                raise LinkError("payload of a transfer that was never offered", "protocol")
            return None, None  # late data of an attempt that is over
        try:
            target = inbound.claim(frame)
        except LinkError as error:
            inbound.abort(error.code, str(error))
            return None, None
        return target, inbound if target is not None else None


def _part(
    connection: Connection, frame: Frame, inbound: Inbound | None, target: memoryview
) -> None:
    try:
        header = bytes(connection.read(frame.header)) if frame.header else b""
        connection.read_into(target[: frame.length])
    except LinkError as error:
        if inbound is not None:
            inbound.lost("lost", f"the link broke: {error}")
        raise
    if inbound is not None:
        inbound.landed(frame, header)
