"""Accepts links from any number of senders and hands verified pieces to a sink."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from transport import auth, versions
from transport.desk import PART, Desk
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.protocol import Form, Hello
from transport.session import Session
from transport.sidecar import COMMAND, Plan, ring_address
from transport.sink import Lender, Sink
from transport.wire import Connection, listen

MAX_STRANGERS = 32
"""Connections that may be in their handshake at once; more are closed at accept."""
MAX_LINKS = 64
HANDSHAKE_SECONDS = 3.0


class Receiver:
    """Listens on one port per address, from construction until `close`.

    `deadline` (seconds) bounds every wait for a peer; `part` is the payload size of one frame;
    `lender` finds states that a sender asks for.
    With `epochs`, whose node is then this receiver's name, senders may form rdma links; `devices`
    is the path of this node's cable map for JACCL.
    Raises LinkError if an address cannot be bound or the secret is too short.
    """

    def __init__(
        self,
        host: str | Sequence[str],
        port: int,
        secret: bytes,
        sink: Sink,
        deadline: float = 10.0,
        *,
        node: str = "local",
        part: int = PART,
        epochs: Epochs | None = None,
        devices: str = "",
        command: Sequence[str] = COMMAND,
        lender: Lender | None = None,
    ) -> None:
        self.desk = Desk(sink, deadline, part)
        self.deadline = deadline
        self.lender = lender
        self._secret = auth.check_secret(secret)
        self.epochs = epochs
        self.hello = versions.hello(
            epochs.node if epochs is not None else node, epochs.boot if epochs else ""
        )
        self._devices = devices
        self._command = command
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._strangers: set[Connection] = set()
        self._closing = False
        hosts = [host] if isinstance(host, str) else list(host)
        self._listeners = [listen(name, port, backlog=64) for name in hosts]
        self._wake_read, self._wake_write = socket.socketpair()
        self.addresses: list[tuple[str, int]] = [
            listener.getsockname()[:2] for listener in self._listeners
        ]
        self.address = self.addresses[0]
        self.desk.spawn("accept", self._accept)

    def abort(self, transfer: str, reason: str) -> bool:
        """Give up a transfer from this side; False if there is none to give up."""
        return self.desk.abort(transfer, reason)

    def stats(self) -> dict[str, int]:
        """Counts that are all zero, but for `finished`, when nothing is connected or under way."""
        with self._lock:
            links = len(self._sessions)
        stats = self.desk.stats()
        # But for the one that accepts.
        return {"links": links, **stats, "threads": max(0, stats["threads"] - 1)}

    def close(self) -> None:
        """Stop listening, end every link (their transfers are aborted), wait for the threads."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            sessions = list(self._sessions.values())
            strangers = list(self._strangers)
        self.desk.close()
        self._wake_write.send(b"x")
        for stranger in strangers:
            stranger.kill()
        for session in sessions:
            session.fail(LinkError("the receiver is closing", "aborted"))
        self.desk.join(2 * self.deadline)
        self._wake_read.close()
        self._wake_write.close()

    # -- for sessions -----------------------------------------------------------------------

    def plan(self, form: Form, sender: str) -> Plan:
        """How this end's child of an rdma link is to be started."""
        own = ring_address(self.address[0], form.host) if form.fabric == "ring" else ""
        return Plan(
            fabric="ring" if form.fabric == "ring" else "jaccl",
            rank=0,
            epoch=form.epoch,
            nonce=form.nonce,
            hosts=(own, form.host),
            devices=self._devices,
            redis_url=self.epochs.url if self.epochs is not None else "",
            link=f"{sender}:{self.hello.node}",
            command=self._command,
        )

    # -- accepting --------------------------------------------------------------------------

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(self.deadline):
                    if isinstance(key.fileobj, socket.socket) and key.fileobj in self._listeners:
                        self._accept_one(key.fileobj)
        for listener in self._listeners:
            listener.close()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            time.sleep(0.05)  # out of descriptors: the listener stays readable, so do not spin
            return
        connection = Connection.taken(sock, min(self.deadline, HANDSHAKE_SECONDS))
        if connection is None:
            return
        with self._lock:
            welcome = len(self._strangers) < MAX_STRANGERS and not self._closing
            if welcome:
                self._strangers.add(connection)
        if welcome:
            self.desk.spawn("handshake", self._serve, connection)
        else:
            connection.close()

    def _serve(self, connection: Connection) -> None:
        try:
            try:
                preamble = auth.demand(connection, self._secret)
                connection.set_deadline(self.deadline)
                if preamble.role == auth.CONTROL:
                    session = self._open(preamble.link, connection)
                else:
                    session = self._join(preamble.link, preamble.index, connection)
            finally:
                with self._lock:
                    self._strangers.discard(connection)
            if preamble.role == auth.DATA:
                session.serve_data(preamble.index, connection)
                return
            try:
                session.serve_control()
            finally:
                with self._lock:
                    self._sessions.pop(preamble.link, None)
        except LinkError:
            pass  # a stranger, or a peer that gave up in its handshake: dropped without a word
        finally:
            connection.close()

    def _open(self, link: bytes, connection: Connection) -> Session:
        session = Session(self, link, secrets.randbits(64), connection)
        with self._lock:
            if self._closing or link in self._sessions or len(self._sessions) >= MAX_LINKS:
                raise LinkError("no room for another link", "busy")
            self._sessions[link] = session
        try:
            auth.welcome(connection)
            session.peer = _greet(session, replace(self.hello, epoch=session.epoch))
        except LinkError:
            with self._lock:
                del self._sessions[link]
            raise
        return session

    def _join(self, link: bytes, index: int, connection: Connection) -> Session:
        with self._lock:
            session = self._sessions.get(link)
        if session is None:
            raise LinkError("a data stream of a link that is not there", "protocol")
        session.attach(index, connection)
        auth.welcome(connection)
        return session


def _greet(session: Session, mine: Hello) -> Hello:
    theirs = session.control.receive()
    if not isinstance(theirs, Hello):
        raise LinkError("the first message was not a hello", "protocol")
    session.control.send(mine)  # also where versions differ: both ends then name both
    versions.compare(mine, theirs)
    return theirs
