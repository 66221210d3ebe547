"""Bytes for the link's benchmark: a state of a given size, in pieces cut as the store cuts them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from store.codec.header import Header, Kind, Leaf, Piece

BLOCK = 1_048_512
SNAPSHOT_SHARE = 0.41
"""Share of the snapshot in a 358 MB state of a model with large recurrent state."""
FINGERPRINT = bytes(16)


@dataclass(frozen=True)
class State:
    """Random bytes: rows first, then the snapshot."""

    memory: memoryview
    rows: int

    @classmethod
    def of(cls, nbytes: int) -> State:
        """A state of `nbytes` payload bytes, every page of it touched."""
        source = random.Random(nbytes)
        parts = [source.randbytes(min(1 << 24, nbytes - at)) for at in range(0, nbytes, 1 << 24)]
        return cls(memoryview(bytearray(b"".join(parts))), nbytes - int(nbytes * SNAPSHOT_SHARE))

    @property
    def nbytes(self) -> int:
        """All payload bytes."""
        return len(self.memory)

    def chunk(self, index: int, count: int) -> Iterator[Piece]:
        """The blocks of one of `count` equal chunks of the rows; each digest is computed here."""
        blocks = range(0, self.rows, BLOCK)
        for number in range(len(blocks) * index // count, len(blocks) * (index + 1) // count):
            at = blocks[number]
            stop = min(at + BLOCK, self.rows)
            yield _piece("rows", 64 * number, 64 * (number + 1), self.memory[at:stop])

    def chunk_bytes(self, index: int, count: int) -> int:
        """Payload bytes of that chunk."""
        blocks = range(0, self.rows, BLOCK)
        first, last = len(blocks) * index // count, len(blocks) * (index + 1) // count
        return min(last * BLOCK, self.rows) - first * BLOCK

    def snapshot(self) -> Piece:
        """Everything after the rows."""
        stop = 64 * len(range(0, self.rows, BLOCK))
        return _piece("snapshot", stop, stop, self.memory[self.rows :])


def _piece(kind: Kind, start: int, stop: int, payload: memoryview) -> Piece:
    header = Header(
        kind=kind,
        fingerprint=FINGERPRINT,
        start=start,
        stop=stop,
        chain=stop.to_bytes(16, "little"),
        parent=start.to_bytes(16, "little"),
        leaves=(Leaf((0,), "bytes", "uint8", (len(payload),)),),
        digest=xxhash.xxh3_64_intdigest(payload),
    )
    return Piece(header, payload)
