"""What a node puts behind a link: what takes states over, and what finds states to lend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from store.codec.header import Piece
from transport.errors import Code
from transport.protocol import Ask, Offer


@dataclass(frozen=True, slots=True)
class Grant:
    """Memory promised to a transfer: payload bytes, and for how many seconds at most."""

    nbytes: int
    seconds: float = 900.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an offer is not taken (one line that the sender's operator can act on)."""

    reason: str
    code: Code = "memory"


class Sink(Protocol):
    """Called from the receiver's threads, for one transfer at a time in this order:

    admit, then any number of buffer and piece, then exactly one of done or abort. After done or
    abort nothing of that attempt writes into a buffer any more, and only then may the same
    transfer be admitted again. Different transfers are served at the same time. `transfer` is
    Offer.transfer. An exception from any method but abort ends the transfer with its text.
    """

    def admit(self, offer: Offer) -> Grant | Refusal:
        """Check fingerprint and sizes and promise memory; may wait, but less than the deadline."""
        ...

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        """Writable, contiguous, flat uint8 memory of exactly `nbytes` (> 0) for one payload.

        Within one transfer calls come in the order pieces arrive, which with several streams is
        not strictly their sequence; the piece says which it is when it is handed over.
        """
        ...

    def piece(self, transfer: str, piece: Piece) -> None:
        """Take one piece whose checksum has been verified; strictly in the sender's order."""
        ...

    def done(self, transfer: str) -> None:
        """All pieces and the snapshot were handed over; the ACK leaves when this returns."""
        ...

    def abort(self, transfer: str, reason: str) -> None:
        """The transfer is over without success: release the grant and every buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Loan:
    """A state on its way to whoever asked for it: `tokens` positions, `nbytes` at most.

    `pieces` are its rows in order and the snapshot last.
    """

    tokens: int
    nbytes: int
    block_tokens: int
    pieces: Iterator[Piece]


class Lender(Protocol):
    """Finds a state for the other end of a link."""

    def lend(self, ask: Ask) -> AbstractContextManager[Loan]:
        """The state after `ask.turn`; its memory may go when the context ends.

        Called in a thread of its own, for any number of asks at a time. May wait, but less than
        the link's deadline. Raises LinkError, with code "missing" where it is not here.
        """
        ...
