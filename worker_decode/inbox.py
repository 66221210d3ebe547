"""State that has arrived over the link and waits for its decode job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from store.codec.header import Piece
from transport.protocol import Offer
from transport.sink import Grant, Refusal
from worker_decode.memory import Memory


@dataclass
class Arrival:
    """One state: complete once its snapshot has come. Pieces are in the sender's order."""

    response: str
    tokens: int
    granted: int
    pieces: list[Piece] = field(default_factory=list)
    complete: bool = False
    since: float = field(default_factory=time.monotonic)


class Inbox:
    """The receiver's sink: admits what fits, keeps what arrived until it is taken.

    Nothing is admitted for another model or beyond the memory budget. Thread-safe.
    """

    def __init__(
        self,
        fingerprint: bytes,
        memory: Memory,
        patience: float,
        pressed: Callable[[], None] = lambda: None,
        offered: Callable[[], None] = lambda: None,
    ) -> None:
        """`patience` is how long an offer waits for memory, in seconds. `offered` is called for
        every offer (work is coming), `pressed` when one begins to wait for memory."""
        self._fingerprint = fingerprint
        self._memory = memory
        self._patience = patience
        self._pressed = pressed
        self._offered = offered
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self.received_bytes = 0

    def admit(self, offer: Offer) -> Grant | Refusal:
        """Promise memory for an offered state, or say why not."""
        self._offered()
        if offer.fingerprint != self._fingerprint:
            return Refusal(
                "this node serves another model (its fingerprint differs): use the same model "
                "files, mlx and mlx-vlm on both nodes",
                "fingerprint",
            )
        if not self._memory.reserve(offer.nbytes):
            self.discard(offer.response)  # of a run that was given up: its memory may do
            self._pressed()
            if not self._memory.reserve(offer.nbytes, self._patience):
                return Refusal(
                    f"no memory for {offer.nbytes} bytes of state: {self._memory.used} of "
                    f"{self._memory.limit} are in use; raise store.hot_gb or try later",
                    "memory",
                )
        self.discard(offer.response)
        with self._lock:
            self._arrivals[offer.transfer] = Arrival(offer.response, offer.tokens, offer.nbytes)
        return Grant(offer.nbytes)

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        """Memory for one payload; the receiver keeps within what was granted."""
        return np.empty(nbytes, dtype=np.uint8).data.cast("B")

    def piece(self, transfer: str, piece: Piece) -> None:
        """Keep one verified piece."""
        with self._lock:
            arrival = self._arrivals[transfer]
            arrival.pieces.append(piece)
            self.received_bytes += piece.payload.nbytes

    def done(self, transfer: str) -> None:
        """All of it is here: the memory that was promised too much goes back."""
        with self._lock:
            arrival = self._arrivals[transfer]
            arrival.complete = True
            used = sum(piece.payload.nbytes for piece in arrival.pieces)
            spare, arrival.granted = arrival.granted - used, used
        self._memory.release(spare)

    def abort(self, transfer: str, reason: str) -> None:
        """Forget what came of a transfer that failed."""
        with self._lock:
            arrival = self._arrivals.pop(transfer, None)
        if arrival is not None:
            self._memory.release(arrival.granted)

    def take(self, response: str) -> list[Piece] | None:
        """The pieces for a decode job, snapshot last, or None if they are not all here."""
        with self._lock:
            for transfer, arrival in self._arrivals.items():
                if arrival.response == response and arrival.complete:
                    del self._arrivals[transfer]
                    break
            else:
                return None
        self._memory.release(arrival.granted)
        return arrival.pieces

    def arrivals(self) -> dict[str, Arrival]:
        """What is here, whole or not, by transfer, oldest first. Their pieces grow meanwhile."""
        with self._lock:
            return dict(self._arrivals)

    def discard(self, response: str) -> None:
        """Drop what is here for a job that needs it no more. Harmless when there is nothing."""
        with self._lock:
            gone = [t for t, arrival in self._arrivals.items() if arrival.response == response]
            freed = sum(self._arrivals.pop(transfer).granted for transfer in gone)
        if freed:
            self._memory.release(freed)

    def waiting(self, longer_than: float) -> list[str]:
        """Responses whose state has been here for more than so many seconds."""
        limit = time.monotonic() - longer_than
        with self._lock:
            return [a.response for a in self._arrivals.values() if a.since < limit]

    def sweep(self, ended: Iterable[str]) -> None:
        """Drop the state of jobs that have ended without taking it."""
        for response in ended:
            self.discard(response)
