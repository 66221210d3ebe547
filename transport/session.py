"""The receiving end of one link: one control connection, its data streams, transfers both ways."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from transport import versions
from transport.control import Control
from transport.errors import LinkError
from transport.exchange import Exchange
from transport.incoming import Incoming
from transport.outgoing import Outgoing, Stream
from transport.protocol import (
    Abort,
    Ack,
    Ask,
    Burst,
    Form,
    Formed,
    Hello,
    Meet,
    Message,
    Nack,
    Offer,
    Ping,
    Ready,
    Turn,
    brief,
)
from transport.sidecar import Sidecar
from transport.wire import Connection

if TYPE_CHECKING:
    from transport.receiver import Receiver

MAX_ASKS = 4
"""States that one link may have asked for and not yet got."""


class Session(Outgoing):
    """Everything that belongs to one connected sender; the first error ends all of it.

    What it sends itself are states that the other end has asked for.
    """

    def __init__(self, receiver: Receiver, link: bytes, epoch: int, connection: Connection) -> None:
        super().__init__(epoch=epoch, deadline=receiver.deadline)
        self.link = link
        self.peer: Hello | None = None
        self.control = Control(connection)
        self._incoming = Incoming(self.control, epoch, receiver.desk)
        self._receiver = receiver
        self._lock = threading.Lock()
        self._streams: dict[int, Connection] = {}
        self._writers: dict[int, threading.Thread] = {}
        self._asks = 0
        self._sidecar: Sidecar | None = None
        self._exchange: Exchange | None = None

    # -- connections ------------------------------------------------------------------------

    def attach(self, index: int, connection: Connection) -> None:
        """Take a data stream into the link; raises LinkError if its place is taken."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if index in self._streams:
                raise LinkError(f"stream {index} of this link is connected already", "protocol")
            self._streams[index] = connection

    def tell(self, message: Message) -> None:
        """Send a control message; a failure ends the link and shows at the next wait."""
        try:
            self.control.send(message)
        except LinkError as error:
            self.fail(error)

    def fail(self, error: LinkError) -> None:
        """End the link: wake every thread in it and give up its transfers. Idempotent."""
        if not self.end(error):
            return
        with self._lock:
            streams = list(self._streams.values())
            sidecar = self._sidecar
        self.control.connection.kill()
        for stream in streams:
            stream.kill()
        if sidecar is not None:
            sidecar.kill()
        self._incoming.fail(error)

    # -- control ----------------------------------------------------------------------------

    def serve_control(self) -> None:
        """Answer control messages until the link ends. Runs in the control connection's thread."""
        heard = time.monotonic()
        try:
            while True:
                message = self.control.poll(self.deadline / 4)
                now = time.monotonic()
                if message is not None:
                    heard = now
                    self._handle(message)
                elif now - heard > self.deadline:
                    raise LinkError(f"no sign of life from the sender for {self.deadline:g} s")
                self._incoming.expire(now)
        except LinkError as error:
            self.fail(error)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Ping):
            self.control.send(message)
        elif isinstance(message, Offer):
            self._incoming.offered(message)
        elif isinstance(message, Abort):
            self._incoming.aborted(message)
        elif isinstance(message, Burst) and self._exchange is not None:
            self._exchange.announced(message.count)
        elif isinstance(message, Turn) and self._exchange is not None:
            self._exchange.turn()
        elif isinstance(message, Form):
            self._receiver.desk.spawn("form", self._form, message)
        elif isinstance(message, Ask):
            self._asked(message)
        elif isinstance(message, Ready | Ack | Nack) and self._number:
            self.answered(message)
        else:
            raise LinkError(f"unexpected {type(message).__name__} from a sender", "protocol")

    # -- lending ----------------------------------------------------------------------------

    def _asked(self, ask: Ask) -> None:
        with self._lock:
            crowded = self._asks >= MAX_ASKS
            self._asks += not crowded
        if crowded:
            self.control.send(Nack(ask.number, "busy", f"{MAX_ASKS} states are asked for"))
        else:
            self._receiver.desk.spawn(f"ask-{ask.number}", self._lend, ask)

    def _lend(self, ask: Ask) -> None:
        """Find a state and send it the other way."""
        try:
            lender = self._receiver.lender
            if lender is None:
                raise LinkError("this node lends no states", "missing")
            with lender.lend(ask) as loan:
                self._write_back()
                transfer = self.offer(
                    ask.transfer,
                    fingerprint=ask.fingerprint,
                    tokens=loan.tokens,
                    nbytes=loan.nbytes,
                    response=ask.response,
                    block_tokens=loan.block_tokens,
                    purpose="loan",
                )
                try:
                    for piece in loan.pieces:
                        if piece.header.kind == "snapshot":
                            transfer.finish(piece)
                        else:
                            transfer.send([piece])
                finally:
                    transfer.abort("the state ended without its snapshot")  # not where it is done
        except LinkError as error:
            self.control.try_send(Nack(ask.number, error.code, brief(error)))
        except Exception as error:  # the lender's own failure must not take the link down
            self.control.try_send(Nack(ask.number, "failed", brief(f"cannot be lent: {error}")))
        finally:
            with self._lock:
                self._asks -= 1

    def _write_back(self) -> None:
        """Start what writes into the data streams, where that has not been done."""
        with self._lock:
            if self._error is not None or self._exchange is not None:
                return
            self.streams = max(1, len(self._streams))
            for index, connection in self._streams.items():
                if index not in self._writers:
                    self._writers[index] = writer = threading.Thread(
                        target=self._write, args=(connection,), name="link-back", daemon=True
                    )
                    writer.start()

    def _write(self, connection: Connection) -> None:
        try:
            Stream(connection).run(self)
        except LinkError as error:
            self.fail(error)

    # -- data -------------------------------------------------------------------------------

    def serve_data(self, index: int, connection: Connection) -> None:
        """Receive parts until the link ends. Runs in the data stream's own thread."""
        try:
            self._incoming.serve(connection)
        except LinkError as error:
            self.fail(error)
        finally:
            with self._lock:
                writer = self._writers.get(index)
            if writer is not None:  # a socket is closed when nobody is inside it any more
                writer.join(2 * self.deadline)
            connection.close()

    def _form(self, form: Form) -> None:
        """Start this end's child of an rdma link and exchange batches until the link ends."""
        epochs, peer = self._receiver.epochs, self.peer
        sidecar: Sidecar | None = None
        try:
            if epochs is None or peer is None or self._exchange is not None:
                raise LinkError("this receiver forms no rdma links", "protocol")
            versions.compare_rdma(self._receiver.hello, peer)
            epochs.join(peer.node, form.epoch, form.nonce)
            sidecar = Sidecar(self._receiver.plan(form, peer.node))
            with self._lock:
                self._sidecar = sidecar
                if self._error is not None:
                    raise self._error
                self._exchange = Exchange(sidecar, self.deadline, leads=False)
                self._exchange.incoming = self._incoming
                self.path = "rdma"
            self.control.send(Meet(form.epoch, sidecar.plan.hosts[0]))
            sidecar.wait_up()
            epochs.up(peer.node, epochs.node, form.epoch)
            self.control.send(Formed(form.epoch))
            self._exchange.run(self)
        except LinkError as error:
            self.fail(error)
        finally:
            if sidecar is not None:
                sidecar.close()
                if epochs is not None and peer is not None:
                    with contextlib.suppress(LinkError):
                        epochs.over(peer.node, epochs.node, form.epoch, str(self._error))
