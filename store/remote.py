"""The store's RPC over TCP, for an API on another machine: who may connect, and to what.

Both ends prove that they know the secret before a request is read: each signs the other's random
number, so that nothing that is heard on the wire lets anybody in later. What follows is not
encrypted: it belongs on a private link or into a tunnel, as Redis does. Methods that read or write
files of the owner's machine, or take the store apart, are not offered.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
from dataclasses import dataclass

from store.errors import StoreError

log = logging.getLogger(__name__)
HELLO_SECONDS = 5.0
LEAST_SECRET = 16
"""Bytes of a secret that cannot be guessed."""
_NONCE = 32
_MAC = 32
_MAGIC = b"TNDMRPC1"

REMOTE_METHODS = frozenset(
    {
        "ping",
        "stats",
        "capacity",
        "put_turn",
        "get_turn",
        "path",
        "turn_ids",
        "find_state",
        "longest_prefix",
        "create_conversation",
        "get_conversation",
        "list_conversations",
        "conversation_turns",
        "update_conversation",
        "delete_conversation",
        "touch",
        "export_open",
        "export_read",
        "export_close",
        "import_open",
        "import_write",
        "import_end",
        "import_close",
        "move_conversation",
        "take_new",
    }
)


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a store is served over TCP, and the secret that both ends know."""

    host: str
    port: int
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) < LEAST_SECRET:
            raise StoreError(f"the store's RPC needs a secret of {LEAST_SECRET} bytes or more")

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"Remote({self})"  # never the secret


def parse_address(text: str, secret: bytes) -> Remote | None:
    """The remote store at "tcp://HOST:PORT", or None where `text` is something else."""
    if not text.startswith("tcp://"):
        return None
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return Remote(host.strip("[]"), int(port), secret)


def listen(remote: Remote, backlog: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises StoreError."""
    try:
        family = socket.getaddrinfo(remote.host, remote.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(
            (remote.host, remote.port), family=family, backlog=backlog, reuse_port=False
        )
    except OSError as error:
        raise StoreError(
            f"cannot listen on {remote}: {error}; check store.rpc_host and store.rpc_port"
        ) from error
    return listener


def admit(client: socket.socket, secret: bytes) -> bool:
    """The server's part of the greeting; False where the other end does not know the secret.

    Nothing but a few bytes of fixed length is read before, within HELLO_SECONDS.
    """
    client.settimeout(HELLO_SECONDS)
    try:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE)
        client.sendall(_MAGIC + mine)
        said = _exactly(client, _NONCE + _MAC)
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _sign(secret, b"client", mine, theirs)):
            log.warning("refused a client of the store's RPC: it does not know the secret")
            return False
        client.sendall(_sign(secret, b"server", theirs, mine))
    except OSError as error:
        log.info("a client of the store's RPC left before it was known: %s", error)
        return False
    return True


def connect(remote: Remote, timeout: float) -> socket.socket:
    """A connection whose other end has proved that it knows the secret. Raises OSError."""
    connection = socket.create_connection((remote.host, remote.port), timeout)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _exactly(connection, len(_MAGIC) + _NONCE)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise ConnectionRefusedError(f"what answers at {remote} is no store")
        theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        connection.sendall(mine + _sign(remote.secret, b"client", theirs, mine))
        proof = _exactly(connection, _MAC)
        if not hmac.compare_digest(proof, _sign(remote.secret, b"server", mine, theirs)):
            raise ConnectionRefusedError(f"what answers at {remote} does not know the secret")
    except BaseException:
        connection.close()
        raise
    return connection


def _sign(secret: bytes, who: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.new(secret, b"tandem store " + who + challenge + own, hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the other end closed the connection: is the secret right?")
        parts += part
    return bytes(parts)
