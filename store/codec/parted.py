"""Pieces whose payload lies in several places, such as a store's values, or in a file too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from store.codec.header import CodecError, Header, Piece


@dataclass(frozen=True, slots=True)
class Place:
    """Where some bytes of a piece lie in an open file as well: behind `mark`, at `offset`."""

    fd: int
    offset: int
    mark: bytes

    def scatter(self, into: Sequence[Any], nbytes: int) -> bool:
        """Read `nbytes` bytes into the buffers `into`, one after the other; False where that does
        not succeed, or where other bytes than the mark lie before them.

        One system call that runs without the interpreter's lock, however many buffers there are.
        """
        mark = bytearray(len(self.mark))
        try:
            count = os.preadv(self.fd, [mark, *into], self.offset)
        except OSError:
            return False
        return count == len(mark) + nbytes and mark == self.mark


MOST_BUFFERS = 1000
"""Buffers of one call; systems allow 1,024."""
CAN_SCATTER = hasattr(os, "preadv")


@dataclass(frozen=True)
class Placed(Piece):
    """A piece whose payload lies in a file too, `place`."""

    place: Place


class Seal(NamedTuple):
    """The xxh3_64 of a part of a payload, taken with a seed."""

    seed: int
    digest: int


@dataclass(frozen=True)
class Parted:
    """A header and its payload in `parts`: flat uint8 memory, one part after the other."""

    header: Header
    parts: tuple[memoryview, ...]
    places: tuple[Place, ...] = ()
    """Where each part lies in a file, if all do."""
    seals: tuple[Seal, ...] = ()
    """A digest of each part, where whoever made this answers for their order and number: then
    parts can be checked one by one, and at once."""

    @classmethod
    def of(cls, piece: Piece | Parted) -> Parted:
        """A piece as one of a single part."""
        return piece if isinstance(piece, Parted) else cls(piece.header, (piece.payload,))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def span(self, start: int, stop: int) -> Iterator[memoryview]:
        """Payload bytes [start, stop) in the pieces that they lie in."""
        at = 0
        for part in self.parts:
            if at >= stop:
                return
            end = at + part.nbytes
            if end > start:
                yield part[max(start - at, 0) : stop - at]
            at = end

    def verify(self) -> None:
        """Check length and xxh3_64 of the payload. Raises CodecError."""
        if self.nbytes != self.header.nbytes:
            raise CodecError(
                f"payload of {self.nbytes} bytes where the header says {self.header.nbytes}: "
                "fetch the piece again"
            )
        if self.seals:
            for part, seal in zip(self.parts, self.seals, strict=True):
                self.check(part, seal)
            return
        digest = xxhash.xxh3_64()
        for part in self.parts:
            digest.update(part)
        if digest.intdigest() != self.header.digest:
            raise self._damaged()

    def check(self, part: memoryview, seal: Seal) -> None:
        """Check one part by its digest. Raises CodecError."""
        if xxhash.xxh3_64_intdigest(part, seal.seed) != seal.digest:
            raise self._damaged()

    def _damaged(self) -> CodecError:
        return CodecError(
            f"payload of tokens [{self.header.start}, {self.header.stop}) fails its checksum: "
            "fetch the piece again"
        )

    def release(self) -> None:
        """Let go of the memory."""
        for part in self.parts:
            part.release()
