"""The receiving end of one link: one control connection, its data streams, its transfers."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from transport import versions
from transport.control import Control
from transport.errors import Code, LinkError
from transport.frame import MAX_PART, SIZE, Frame
from transport.inbound import Inbound
from transport.protocol import (
    Abort,
    Ack,
    Burst,
    Form,
    Formed,
    Hello,
    Meet,
    Nack,
    Offer,
    Ping,
    Ready,
    brief,
)
from transport.rdma import BatchReader
from transport.sidecar import Sidecar
from transport.wire import Connection

if TYPE_CHECKING:
    from transport.receiver import Receiver

MAX_OFFERS = 32
"""Transfers of one link that may be open at once."""


class Session:
    """Everything that belongs to one connected sender; the first error ends all of it."""

    def __init__(self, receiver: Receiver, link: bytes, epoch: int, connection: Connection) -> None:
        self.link = link
        self.epoch = epoch
        self.peer: Hello | None = None
        self.control = Control(connection)
        self._receiver = receiver
        self._lock = threading.Lock()
        self._streams: dict[int, Connection] = {}
        self._inbound: dict[int, Inbound] = {}
        self._highest = -1
        self._failed: LinkError | None = None
        self._sidecar: Sidecar | None = None
        self._reader: BatchReader | None = None

    # -- connections ------------------------------------------------------------------------

    def attach(self, index: int, connection: Connection) -> None:
        """Take a data stream into the link; raises LinkError if its place is taken."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if index in self._streams:
                raise LinkError(f"stream {index} of this link is connected already", "protocol")
            self._streams[index] = connection

    def fail(self, error: LinkError) -> None:
        """End the link: wake every thread in it and give up its transfers. Idempotent."""
        with self._lock:
            if self._failed is not None:
                return
            self._failed = error
            streams = list(self._streams.values())
            open_transfers = list(self._inbound.values())
        self.control.connection.kill()
        for stream in streams:
            stream.kill()
        if self._sidecar is not None:
            self._sidecar.kill()
        for inbound in open_transfers:
            inbound.abort("lost", f"the link broke: {error}")

    # -- control ----------------------------------------------------------------------------

    def serve_control(self) -> None:
        """Answer control messages until the link ends. Runs in the control connection's thread."""
        deadline = self._receiver.deadline
        heard = time.monotonic()
        try:
            while True:
                message = self.control.poll(deadline / 4)
                now = time.monotonic()
                if message is not None:
                    heard = now
                    self._handle(message)
                elif now - heard > deadline:
                    raise LinkError(f"no sign of life from the sender for {deadline:g} s")
                self._expire(now)
        except LinkError as error:
            self.fail(error)

    def _handle(self, message: object) -> None:
        if isinstance(message, Ping):
            self.control.send(message)
        elif isinstance(message, Offer):
            self._offered(message)
        elif isinstance(message, Burst) and self._reader is not None:
            self._reader.announce(message.count)
        elif isinstance(message, Form):
            self._receiver.spawn("form", self._form, message)
        elif isinstance(message, Abort):
            inbound = self._find(message.number)
            if inbound is not None:
                inbound.abort("aborted", f"sender: {message.reason}")
        else:
            raise LinkError(f"unexpected {type(message).__name__} from a sender", "protocol")

    def _find(self, number: int) -> Inbound | None:
        with self._lock:
            return self._inbound.get(number)

    def _expire(self, now: float) -> None:
        with self._lock:
            late = [inbound for inbound in self._inbound.values() if now > inbound.expires]
        for inbound in late:
            inbound.abort("aborted", "the memory grant ran out before the state was complete")

    def _offered(self, offer: Offer) -> None:
        with self._lock:
            if offer.number <= self._highest:
                raise LinkError("offer numbers of a link must grow", "protocol")
            self._highest = offer.number
            crowded = len(self._inbound) >= MAX_OFFERS
            if not crowded:
                inbound = Inbound(offer, self._receiver.sink, self._receiver.part, self._ended)
                self._inbound[offer.number] = inbound
        if crowded:
            self.control.send(Nack(offer.number, "busy", f"{MAX_OFFERS} transfers are open"))
            return
        # Admission may wait for memory; pings must be answered meanwhile.
        self._receiver.spawn(f"offer-{offer.number}", self._admit, inbound)

    def _admit(self, inbound: Inbound) -> None:
        offer = inbound.offer
        verdict = self._receiver.enter(inbound)
        if verdict is not None:
            with self._lock:
                self._inbound.pop(offer.number, None)
            self.control.try_send(verdict)
            return
        grant = inbound.admit()
        if grant is not None:
            self.control.try_send(Ready(offer.number, grant.nbytes, inbound.part))
        with self._lock:
            failed = self._failed
        if failed is not None:
            inbound.abort("lost", f"the link broke: {failed}")

    def _ended(self, inbound: Inbound, code: Code | None, reason: str) -> None:
        self._receiver.leave(inbound, done=code is None)
        number = inbound.offer.number
        with self._lock:
            self._inbound.pop(number, None)
        if code is None:
            self.control.try_send(Ack(number, inbound.nbytes))
        else:
            self.control.try_send(Nack(number, code, brief(reason)))

    # -- data -------------------------------------------------------------------------------

    def serve_data(self, index: int, connection: Connection) -> None:
        """Receive parts until the link ends. Runs in the data stream's own thread."""
        head = memoryview(bytearray(SIZE))
        scratch = memoryview(bytearray(0))
        try:
            while self._failed is None:
                if not connection.read_idle(head):
                    continue
                frame = Frame.unpack(head)
                target, inbound = self._claim(frame)
                if target is None and frame.length > len(scratch):
                    scratch = memoryview(bytearray(MAX_PART))
                self._part(connection, frame, inbound, scratch if target is None else target)
        except LinkError as error:
            self.fail(error)
        finally:
            connection.close()

    def take(self, frame: Frame, header: bytes, payload: memoryview) -> None:
        """One part that has arrived by way of a batch; raises LinkError."""
        target, inbound = self._claim(frame)
        if target is not None and inbound is not None:
            target[:] = payload
            inbound.landed(frame, header)

    def _form(self, form: Form) -> None:
        """Start this end's child of an rdma link and read from it until the link ends."""
        epochs, peer = self._receiver.epochs, self.peer
        sidecar: Sidecar | None = None
        try:
            if epochs is None or peer is None or self._reader is not None:
                raise LinkError("this receiver forms no rdma links", "protocol")
            versions.compare_rdma(self._receiver.hello, peer)
            epochs.join(peer.node, form.epoch, form.nonce)
            sidecar = Sidecar(self._receiver.plan(form, peer.node))
            with self._lock:
                self._sidecar = sidecar
                if self._failed is not None:
                    raise self._failed
                self._reader = BatchReader(sidecar, self, self._receiver.deadline)
            self.control.send(Meet(form.epoch, sidecar.plan.hosts[0]))
            sidecar.wait_up()
            epochs.up(peer.node, epochs.node, form.epoch)
            self.control.send(Formed(form.epoch))
            self._reader.run()
        except LinkError as error:
            self.fail(error)
            if epochs is not None and peer is not None and sidecar is not None:
                with contextlib.suppress(LinkError):
                    epochs.over(peer.node, epochs.node, form.epoch, str(error))
        finally:
            if sidecar is not None:
                sidecar.close()

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
        self, connection: Connection, frame: Frame, inbound: Inbound | None, target: memoryview
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
