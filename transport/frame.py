"""The fixed 64-byte header before every part of a piece on a bulk stream.

A piece is cut into parts of one size agreed in READY, so that several streams can carry one large
snapshot; both ends derive each part's offset and length from the payload's length alone. The part
at offset 0 is preceded by the piece header's bytes. Little endian, no padding:

    magic 4s · version u16 · kind u16 · epoch u64 · transfer u32 · sequence u32 · offset u64
    · length u64 · payload u64 · header u32 · header digest u64 · check u32
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from transport.errors import LinkError

MAGIC = b"TDMP"
VERSION = 1
ROWS = 1
SNAPSHOT = 2  # always the last piece of a transfer: its sequence number tells how many there are
MAX_HEADER = 4 << 20
MAX_PART = 8 << 20
MIN_PART = 4 << 10
MAX_PAYLOAD = 1 << 34
MAX_PIECES = 1 << 16

_STRUCT = struct.Struct("<4sHHQIIQQQIQ")
_CHECK = struct.Struct("<I")
SIZE = _STRUCT.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One part: `length` payload bytes at `offset` of piece `sequence` of `transfer`."""

    kind: int
    epoch: int
    transfer: int
    sequence: int
    offset: int
    length: int
    payload: int
    header: int
    digest: int

    def pack(self) -> bytes:
        """The 64 bytes on the wire."""
        body = _STRUCT.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.epoch,
            self.transfer,
            self.sequence,
            self.offset,
            self.length,
            self.payload,
            self.header,
            self.digest,
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Frame:
        """Read and check one frame header; raises LinkError for anything out of bounds."""
        if len(data) != SIZE:
            raise LinkError(f"frame header of {len(data)} bytes, not {SIZE}", "protocol")
        body = bytes(data[: _STRUCT.size])
        (check,) = _CHECK.unpack(data[_STRUCT.size :])
        if check != xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF:
            raise LinkError("frame header is damaged: its check does not match", "corrupt")
        magic, version, *fields = _STRUCT.unpack(body)
        if magic != MAGIC or version != VERSION:
            raise LinkError(
                f"frame {magic!r} version {version} where {MAGIC!r} version {VERSION} was due",
                "protocol",
            )
        frame = cls(*fields)
        frame._check()
        return frame

    def _check(self) -> None:
        if self.kind not in (ROWS, SNAPSHOT):
            raise LinkError(f"frame of unknown kind {self.kind}", "protocol")
        if self.sequence >= MAX_PIECES:
            raise LinkError(f"piece {self.sequence} is beyond the limit {MAX_PIECES}", "protocol")
        if self.payload > MAX_PAYLOAD or self.length > MAX_PART or self.header > MAX_HEADER:
            raise LinkError("frame announces more bytes than the protocol allows", "protocol")
        if self.offset + self.length > self.payload:
            raise LinkError("frame reaches beyond its payload", "protocol")
        if (self.header > 0) != (self.offset == 0):
            raise LinkError("the piece header travels with offset 0, and only there", "protocol")


def cut(payload: int, part: int) -> list[tuple[int, int]]:
    """(offset, length) of every part of a payload; one empty part where there is no payload."""
    if payload == 0:
        return [(0, 0)]
    return [(at, min(part, payload - at)) for at in range(0, payload, part)]


def header_digest(header: bytes | bytearray) -> int:
    """xxh3-64 of a piece header's bytes (the payload's own digest is inside that header)."""
    return xxhash.xxh3_64_intdigest(header)
