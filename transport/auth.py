"""Mutual proof of the shared secret at the start of every connection.

    client → server   preamble, 64 bytes: magic, role, stream index, link id, client nonce
    server → client   server nonce, HMAC-SHA256(secret, "server" ‖ preamble ‖ server nonce)
    client → server   HMAC-SHA256(secret, "client" ‖ preamble ‖ server nonce)
    server → client   one byte, 1

The preamble's layout is frozen for all protocol versions: versions are compared in the Hello that
follows, so that a refusal can name both. What follows is not encrypted; the secret keeps strangers
out, it does not hide the state from somebody who can read the cable.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from transport.errors import LinkError
from transport.wire import Connection

MAGIC = b"TANDEMLK"
CONTROL = 1
DATA = 2
MIN_SECRET = 16
MAX_STREAMS = 16
_PREAMBLE = struct.Struct("<8sHH4x16s32s")
SIZE = _PREAMBLE.size


@dataclass(frozen=True, slots=True)
class Preamble:
    """Who connects: the role of this connection and the link it belongs to."""

    role: int
    index: int
    link: bytes
    nonce: bytes

    def pack(self) -> bytes:
        """The 64 bytes on the wire."""
        return _PREAMBLE.pack(MAGIC, self.role, self.index, self.link, self.nonce)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Preamble:
        """Raises LinkError for anything that is not a preamble."""
        if len(data) != SIZE:
            raise LinkError("preamble has the wrong length", "protocol")
        magic, role, index, link, nonce = _PREAMBLE.unpack(data)
        if magic != MAGIC or role not in (CONTROL, DATA) or index >= MAX_STREAMS:
            raise LinkError("a stranger connected: not a preamble of this protocol", "protocol")
        return cls(role, index, link, nonce)


def check_secret(secret: bytes) -> bytes:
    """The secret itself; raises LinkError if it is shorter than 16 bytes."""
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET:
        raise LinkError(f"the link secret must be at least {MIN_SECRET} bytes", "protocol")
    return secret


def _proof(secret: bytes, side: Literal[b"server", b"client"], first: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, side + first + nonce, sha256).digest()


def prove(connection: Connection, secret: bytes, role: int, index: int, link: bytes) -> None:
    """Client side. Raises LinkError if the server does not hold the secret or drops us."""
    first = Preamble(role, index, link, secrets.token_bytes(32)).pack()
    connection.write(first)
    answer = connection.read(64)
    nonce, proof = bytes(answer[:32]), bytes(answer[32:])
    if not hmac.compare_digest(proof, _proof(secret, b"server", first, nonce)):
        raise LinkError("the server at the other end does not hold this link's secret", "protocol")
    connection.write(_proof(secret, b"client", first, nonce))
    if bytes(connection.read(1)) != b"\x01":
        raise LinkError("the server did not accept our proof of the secret", "protocol")


def demand(connection: Connection, secret: bytes) -> Preamble:
    """Server side, up to the client's proof; `welcome` ends it. Raises LinkError on a stranger."""
    first = bytes(connection.read(SIZE))
    preamble = Preamble.unpack(first)
    nonce = secrets.token_bytes(32)
    connection.write(nonce + _proof(secret, b"server", first, nonce))
    proof = bytes(connection.read(32))
    if not hmac.compare_digest(proof, _proof(secret, b"client", first, nonce)):
        raise LinkError("a peer without this link's secret connected", "protocol")
    return preamble


def welcome(connection: Connection) -> None:
    """Tell the client that its connection has been taken into its link."""
    connection.write(b"\x01")
