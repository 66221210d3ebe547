"""Pieces whose payload lies elsewhere, such as in a store, and is brought straight to its place.

Nothing of the payload passes through memory in between: a part is copied into the buffers that it
belongs to, and what those hold then is verified. Until that was done nothing in them may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from store.codec.header import CodecError, Header, Piece


class Part(Protocol):
    """A stretch of a payload that can be brought."""

    @property
    def nbytes(self) -> int:
        """Its length."""

    def bring(self, into: Sequence[memoryview]) -> None:
        """Fill the buffers, `nbytes` bytes in all, one after the other, and verify what they hold.

        Raises what its maker says where that is not what was stored. Safe in any thread; most of it
        runs without the interpreter's lock.
        """


def _nothing() -> None:
    """What is to be checked over all parts where there is one alone."""


class Stored(NamedTuple):
    """A header and the parts of its payload. `seal` raises where the parts, all brought, are not
    the ones that were stored together."""

    header: Header
    parts: tuple[Part, ...]
    seal: Callable[[], None] = _nothing

    @classmethod
    def of(cls, piece: Piece) -> Stored:
        """A piece that is in memory, as one part."""
        return cls(piece.header, (piece,))

    def verify(self) -> None:
        """Bring every part to nowhere. Raises what bringing raises."""
        for part in self.parts:
            part.bring([memoryview(bytearray(part.nbytes))])
        self.seal()

    def piece(self, payload: memoryview) -> Piece:
        """The piece in `payload`, memory of its size. Raises what bringing raises."""
        for part, into in self.spread([payload]):
            part.bring(into)
        self.seal()
        return Piece(self.header, payload)

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
