"""What one operation between two children looks like: a 64-byte header, then one padded body.

A body is one slot of shared memory holding whole frames one after another. The header's length is
the only thing both ends size the body by.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from transport.errors import LinkError

MAGIC = b"TDMB"
SLOT = 16 << 20
FORTH = (0, 1, 2)
"""Slots for batches of the end that formed the link."""
BACK = (3, 4)
"""Slots for batches that come back to it; their pages are not there until they are used."""
SLOTS = len(FORTH) + len(BACK)
PAD = 4096
"""Bodies are padded to this: RDMA sends and receives must cover the same number of frames."""
_STRUCT = struct.Struct("<4sIQQQ16s8x")
_CHECK = struct.Struct("<Q")
SIZE = _STRUCT.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch `sequence` of `epoch`, with `nbytes` of frames; `nonce` is the link's own."""

    epoch: int
    sequence: int
    nbytes: int
    nonce: bytes

    def pack(self) -> bytes:
        """The 64 bytes of the first operation."""
        body = _STRUCT.pack(MAGIC, 1, self.epoch, self.sequence, self.nbytes, self.nonce)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Batch:
        """Raises LinkError for anything that is not a batch header of a sane size."""
        body = bytes(data[: _STRUCT.size])
        if len(data) != SIZE or _CHECK.pack(xxhash.xxh3_64_intdigest(body)) != bytes(
            data[_STRUCT.size :]
        ):
            raise LinkError("a batch header is damaged", "corrupt")
        magic, version, epoch, sequence, nbytes, nonce = _STRUCT.unpack(body)
        if magic != MAGIC or version != 1 or nbytes > SLOT:
            raise LinkError("not a batch header of this protocol", "protocol")
        return cls(epoch, sequence, nbytes, nonce)


def padded(nbytes: int) -> int:
    """Bytes of the body's operation, at least one pad."""
    return max(PAD, -(-nbytes // PAD) * PAD)
