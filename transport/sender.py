"""The sending end of a link: one control connection, the ways its bulk data takes, transfers."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from transport import auth, versions
from transport.control import Control
from transport.desk import Desk
from transport.errors import LinkError, Refused
from transport.exchange import Exchange
from transport.incoming import Incoming
from transport.outbound import Report, Transfer
from transport.outgoing import WINDOW, Outgoing, Stream, Way
from transport.protocol import Abort, Ack, Ask, Hello, Message, Nack, Offer, Ping, Ready, Want
from transport.wire import Connection

Address = tuple[str, int]

__all__ = ["WINDOW", "Report", "Sender", "Transfer"]


class Sender(Outgoing):
    """A connected link; make it with `connect`. After any link error it is dead: connect anew.

    It sends states, and with a `desk` it may ask the other end for one, which comes back over the
    same connections.
    """

    def __init__(
        self,
        control: Control,
        ways: Sequence[Way],
        peer: Hello,
        deadline: float,
        window: int = WINDOW,
        path: str = "tcp",
        desk: Desk | None = None,
    ) -> None:
        super().__init__(epoch=peer.epoch, deadline=deadline, window=window, path=path)
        self.peer = peer
        self.streams = len(ways)
        self._control = control
        self._ways = list(ways)
        self._incoming = None if desk is None else Incoming(control, peer.epoch, desk)
        self._asked: dict[int, tuple[str, Callable[[LinkError], None]]] = {}
        self._readers: list[threading.Thread] = []
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
        desk: Desk | None = None,
    ) -> Sender:
        """Form a link: `streams` data connections over one address, or one per cable in turn.

        `deadline` (seconds) bounds every single wait for the peer; `desk` is where states come in
        that are asked for. Raises LinkError: peer not there, not holding the secret, or of another
        version.
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
            return cls(control, ways, theirs, deadline, window, desk=desk)
        except BaseException:
            for connection in made:
                connection.close()
            raise

    @property
    def busy(self) -> bool:
        """True while a transfer is open, in either direction, or a state is asked for."""
        with self.changed:
            if self._transfers or self._asked:
                return True
        return self._incoming is not None and self._incoming.busy

    @property
    def control_bytes(self) -> int:
        """Bytes of control messages so far, both directions."""
        return self._control.sent + self._control.received

    def ask(
        self,
        transfer: str,
        *,
        turn: str,
        response: str,
        fingerprint: bytes,
        tokens: int,
        refused: Callable[[LinkError], None],
    ) -> None:
        """Ask the other end for the state after `turn`; see protocol.Ask.

        It comes to the desk's sink under the name `transfer`. `refused` is called where the other
        end has nothing to offer or the link breaks before it has. Raises LinkError.
        """
        with self.changed:
            if self._error is not None:
                raise self._error
            if self._incoming is None:
                raise LinkError("this link was formed without a desk for what it asks", "failed")
            ask = Ask(self._number, transfer, turn, response, fingerprint, tokens)
            ask.validate()
            self._number += 1
            self._asked[ask.number] = (transfer, refused)
            self._open_ears(self._incoming)
            self.tell(ask)

    def close(self) -> None:
        """End the link and wait for its threads; transfers still open fail. Idempotent."""
        self.fail(LinkError("the link was closed", "aborted"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self.deadline)

    def tell(self, message: Message) -> None:
        """Send a control message; a failure ends the link and shows at the next wait."""
        try:
            self._control.send(message)
        except LinkError as error:
            self.fail(error)

    def fail(self, error: LinkError) -> None:
        """End the link: its transfers fail with this error. Idempotent."""
        if not self.end(error):
            return
        self._control.connection.kill()
        for way in self._ways:
            way.kill()
        if self._incoming is not None:
            self._incoming.fail(error)
        with self.changed:
            waiting = list(self._asked.values())
            self._asked.clear()
        for _, refused in waiting:
            refused(error)

    # -- threads ----------------------------------------------------------------------------

    def _send(self, way: Way) -> None:
        try:
            way.run(self)
        except LinkError as error:
            self.fail(error)
        finally:
            with self.changed:
                readers = list(self._readers)
            for reader in readers:  # a socket is closed when nobody is inside it any more
                reader.join(2 * self.deadline)
            way.close()

    def _open_ears(self, incoming: Incoming) -> None:
        """Begin to read what comes back; called with `changed` held."""
        for way in self._ways:
            if isinstance(way, Exchange):
                way.incoming = incoming
            elif isinstance(way, Stream) and len(self._readers) < len(self._ways):
                reader = threading.Thread(
                    target=self._hear, args=(incoming, way), name="link-back", daemon=True
                )
                self._readers.append(reader)
                reader.start()

    def _hear(self, incoming: Incoming, way: Stream) -> None:
        try:
            incoming.serve(way.connection)
        except LinkError as error:
            self.fail(error)

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
                if self._incoming is not None:
                    self._incoming.expire(now)
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
        if isinstance(message, Ready | Ack | Nack):
            if not self.answered(message) and isinstance(message, Nack):
                self._refused(message.number, Refused(message.reason, message.code))
        elif self._incoming is not None and isinstance(message, Offer):
            self._comes(message, self._incoming)
        elif self._incoming is not None and isinstance(message, Abort):
            self._incoming.aborted(message)
        elif isinstance(message, Want) and isinstance(self._ways[0], Exchange):
            self._ways[0].wanted(message.count, self)
        else:
            raise LinkError(f"unexpected {type(message).__name__} from a receiver", "protocol")

    def _comes(self, offer: Offer, incoming: Incoming) -> None:
        """Take in hand what was asked for: from now on the sink hears what becomes of it.

        Struck off first, since the state may be here before `offered` has returned, and both in
        one, so that the link counts as busy all the time.
        """
        with self.changed:
            asked = {n: each for n, each in self._asked.items() if each[0] == offer.transfer}
            for number in asked:
                del self._asked[number]
            try:
                incoming.offered(offer)
            except LinkError:
                self._asked.update(asked)  # to be refused when the link ends, now
                raise

    def _refused(self, number: int, error: LinkError) -> None:
        with self.changed:
            _, refused = self._asked.pop(number, (None, None))
        if refused is not None:
            refused(error)


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
