"""Pieces whose payload lies elsewhere, such as in a store, and is brought straight to its place.

Nothing of the payload passes through memory in between: a part is copied into the buffers that it
belongs to, and what those hold then is verified. Until that was done nothing in them may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from store.codec.header import CodecError, Header, Piece
from store.codec.scatter import scatter


class Part(Protocol):
    """A stretch of a payload that can be brought."""

    @property
    def nbytes(self) -> int:
        """Its length."""

    def lying(self) -> tuple[memoryview, int] | None:
        """Its bytes and the seed of their digest, where they lie in memory to be copied."""

    def settle(self, into: Sequence[memoryview], digest: int | None) -> None:
        """Leave the part, verified, in the buffers, `nbytes` bytes in all, one after the other.

        `digest` is that of the copy made there of what `lying` gave, None where it gave nothing.
        Raises what its maker says where that is not what was stored.
        """


def nothing() -> None:
    """What is to be checked over all parts where there is one alone."""


class Bringing(NamedTuple):
    """Parts, each with the buffers that it fills, and what is to be checked when all are there."""

    parts: Sequence[tuple[Part, Sequence[memoryview]]]
    seal: Callable[[], None] = nothing


def bring(several: Sequence[Bringing]) -> None:
    """Fill all buffers and verify what they hold, what lies in memory by one call. Raises what the
    parts raise, and the seals. Safe in any thread; most of it runs without the interpreter's lock.
    """
    pairs = [pair for one in several for pair in one.parts]
    found = [part.lying() for part, _ in pairs]
    copies = [
        (lies[0], into, lies[1]) for lies, (_, into) in zip(found, pairs, strict=True) if lies
    ]
    digests = iter(scatter(copies))
    for lies, (part, into) in zip(found, pairs, strict=True):
        part.settle(into, next(digests) if lies else None)
    for one in several:
        one.seal()


class Stored(NamedTuple):
    """A header and the parts of its payload. `seal` raises where the parts, all brought, are not
    the ones that were stored together."""

    header: Header
    parts: tuple[Part, ...]
    seal: Callable[[], None] = nothing

    @classmethod
    def of(cls, piece: Piece) -> Stored:
        """A piece that is in memory, as one part."""
        return cls(piece.header, (piece,))

    def verify(self) -> None:
        """Bring every part to nowhere. Raises what bringing raises."""
        for part in self.parts:
            bring([Bringing([(part, [memoryview(bytearray(part.nbytes))])])])
        self.seal()

    def piece(self, payload: memoryview) -> Piece:
        """The piece in `payload`, memory of its size. Raises what bringing raises."""
        bring([self.bringing([payload])])
        return Piece(self.header, payload)

    def bringing(self, into: Iterable[memoryview]) -> Bringing:
        """What brings all of it into buffers of its size. Raises as `spread`."""
        return Bringing(list(self.spread(into)), self.seal)

    def spread(self, into: Iterable[memoryview]) -> Iterator[tuple[Part, list[memoryview]]]:
        """The parts, each with the buffers that it fills: those of `into`, cut where parts end.

        Raises CodecError where the buffers are fewer bytes than the parts.
        """
        buffers = iter(into)
        rest = memoryview(b"")
        for part in self.parts:
            mine, left = [], part.nbytes
            while left:
                while not rest.nbytes:
                    found = next(buffers, None)
                    if found is None:
                        raise CodecError(
                            "a payload is larger than its arrays: recompute this state"
                        )
                    rest = found
                mine.append(rest[:left])
                rest = rest[left:]
                left -= mine[-1].nbytes
            yield part, mine
