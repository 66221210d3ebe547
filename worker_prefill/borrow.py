"""States that a decode node lends, so that a long new turn is computed here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from store.codec.header import Piece
from transport.errors import LinkError
from transport.protocol import Offer
from transport.sink import Grant, Refusal
from transport.wire import FLOOR

_LOOK = 0.1


class Loan:
    """One state that was asked for, and what has come of it. Thread-safe."""

    def __init__(self, fingerprint: bytes, tokens: int, nbytes: int) -> None:
        self.fingerprint = fingerprint
        self.tokens = tokens
        self.nbytes = nbytes
        self.pieces: list[Piece] = []
        self._changed = threading.Condition()
        self._admitted = False
        self._done = False
        self._error: LinkError | None = None

    def fail(self, error: LinkError) -> None:
        """It does not come. The first reason counts."""
        with self._changed:
            if not self._done and self._error is None:
                self._error = error
            self._changed.notify_all()

    def wait(self, deadline: float, check: Callable[[], None]) -> list[Piece]:
        """The pieces, snapshot last, once all of them are here.

        `deadline` (seconds) is for the offer, and again, with the link's least rate, for the state.
        What `check` raises passes. Raises LinkError.
        """
        limit = time.monotonic() + deadline
        offered = False
        with self._changed:
            while not self._done:
                if self._error is not None:
                    raise self._error
                if self._admitted and not offered:
                    offered = True
                    limit = time.monotonic() + deadline + self.nbytes / FLOOR
                left = limit - time.monotonic()
                if left <= 0:
                    what = "the state" if offered else "an offer"
                    raise LinkError(f"{what} that was asked for did not come in time")
                self._changed.wait(min(left, _LOOK))
                check()
            return self.pieces

    # -- for the sink -----------------------------------------------------------------------

    def admit(self, offer: Offer) -> Grant | Refusal:
        """Whether the offer is what was asked for."""
        if offer.fingerprint != self.fingerprint:
            return Refusal("the state is of another model than this node's", "fingerprint")
        if not 0 < offer.tokens <= self.tokens or offer.nbytes > self.nbytes or offer.start:
            return Refusal(
                f"{offer.nbytes} bytes for {offer.tokens} tokens were offered, at most "
                f"{self.nbytes} for {self.tokens} asked for",
                "protocol",
            )
        with self._changed:
            self._admitted = True
            self._changed.notify_all()
        return Grant(offer.nbytes)

    def finished(self) -> None:
        """All of it is here."""
        with self._changed:
            self._done = True
            self._changed.notify_all()


class Loans:
    """The sink of a node that borrows: takes what was asked for, and nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, Loan] = {}

    def __len__(self) -> int:
        return len(self._expected)

    @contextmanager
    def expect(self, transfer: str, loan: Loan) -> Iterator[Loan]:
        """Admit `transfer` within this context."""
        with self._lock:
            self._expected[transfer] = loan
        try:
            yield loan
        finally:
            with self._lock:
                del self._expected[transfer]

    def admit(self, offer: Offer) -> Grant | Refusal:
        """See transport.sink."""
        loan = self._get(offer.transfer)
        if loan is None:
            return Refusal("nobody here has asked for this state", "aborted")
        answer = loan.admit(offer)
        if isinstance(answer, Refusal):
            loan.fail(LinkError(answer.reason, answer.code))
        return answer

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        """See transport.sink; the receiver keeps within what was granted."""
        return np.empty(nbytes, dtype=np.uint8).data.cast("B")

    def piece(self, transfer: str, piece: Piece) -> None:
        """See transport.sink."""
        loan = self._get(transfer)
        if loan is None:
            raise LinkError("nobody waits for this state any more", "aborted")
        loan.pieces.append(piece)

    def done(self, transfer: str) -> None:
        """See transport.sink."""
        loan = self._get(transfer)
        if loan is not None:
            loan.finished()

    def abort(self, transfer: str, reason: str) -> None:
        """See transport.sink."""
        loan = self._get(transfer)
        if loan is not None:
            loan.fail(LinkError(reason))

    def _get(self, transfer: str) -> Loan | None:
        with self._lock:
            return self._expected.get(transfer)
