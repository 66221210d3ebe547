"""States that go to a prefill node, which computes a long new turn and sends back what is new."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.model import Model
from store.codec.header import CodecError, Piece
from store.errors import StoreError
from store.loading import StateReader
from store.store import Store
from transport.errors import LinkError
from transport.protocol import Ask
from transport.sink import Loan
from worker_decode.behind import Behind
from worker_decode.hot import Hot
from worker_decode.memory import Memory
from worker_decode.states import Copy

_SLACK = 1 << 20
"""Room for what a snapshot holds beyond the layout's estimate."""


_AT_ONCE = 64 << 20
"""Bytes of rows that are copied between two steps: those who wait for their tokens wait on."""
_ALL = 1 << 62


@dataclass
class _Wish:
    """A state that a link's thread wants from the engine's memory."""

    turn: str
    given_up: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    pieces: list[Piece] | None = None
    copy: Copy | None = None


class Lending:
    """Finds states for `transport.session`: in the model's memory, else in the store.

    A state that is lent stays where it is: its rows are needed when the new ones come back.
    Memory for the copy is taken from the budget of state that waits. Thread-safe; `serve` belongs
    to the engine's thread.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        memory: Memory,
        patience: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`patience` is how long an ask waits for memory and for the engine, in seconds each."""
        self._model = model
        self._store = store
        self._memory = memory
        self._patience = patience
        self._wake = wake
        self._wishes: deque[_Wish] = deque()

    @contextmanager
    def lend(self, ask: Ask) -> Iterator[Loan]:
        """See transport.sink.Lender."""
        model = self._model
        if ask.fingerprint != model.fingerprint:
            raise LinkError("this node serves another model (its fingerprint differs)", "missing")
        reserved = model.layout.state_bytes(ask.tokens) + _SLACK
        if not self._memory.reserve(reserved, self._patience):
            raise LinkError(f"no memory to lend a state of {reserved} bytes", "memory")
        try:
            loan = self._from_memory(ask)
            if loan is not None:
                yield loan
                return
            reader = self._stored(ask)
            with reader:
                nbytes = sum(record.nbytes for _, record in reader.objects)
                yield Loan(reader.ref.tokens, nbytes, model.layout.block_tokens, reader)
        finally:
            self._memory.release(reserved)

    def serve(self, hot: Hot, behind: Behind) -> None:
        """Copy some of what is asked for out of the model's memory. Called between two steps."""
        while self._wishes:
            wish = self._wishes[0]
            held = hot.get(wish.turn)
            if wish.copy is None and held is not None:
                wish.copy = Copy(self._model, held)
            # Whoever has gone on with the state meanwhile has changed it.
            if wish.given_up or wish.copy is None or held is not wish.copy.held:
                wish.copy = None
                left = None if wish.given_up else behind.find(wish.turn)
                if left is not None:  # its rows are another turn's, which may go on after this
                    wish.copy = Copy(self._model, left)
                    wish.copy.more(_ALL)
                    wish.pieces = wish.copy.pieces
            elif not wish.copy.more(_AT_ONCE):
                return
            else:
                wish.pieces = wish.copy.pieces
            self._wishes.popleft()
            wish.answered.set()

    def _from_memory(self, ask: Ask) -> Loan | None:
        wish = _Wish(ask.turn)
        self._wishes.append(wish)
        self._wake()
        if not wish.answered.wait(self._patience):
            wish.given_up = True
            raise LinkError("the model is busy: no state could be copied in time", "busy")
        pieces = wish.pieces
        if pieces is None:
            return None
        tokens = pieces[-1].header.stop
        nbytes = sum(piece.payload.nbytes for piece in pieces)
        return Loan(tokens, nbytes, self._model.layout.block_tokens, iter(pieces))

    def _stored(self, ask: Ask) -> StateReader:
        try:
            found = self._store.nearest_state(ask.turn, ask.fingerprint)
            reader = self._store.load_state(found.turn, ask.fingerprint) if found else None
        except (StoreError, CodecError) as error:
            raise LinkError(f"the store cannot be read: {error}", "missing") from None
        if reader is None:
            raise LinkError(f"no state of {ask.turn} is here any more", "missing")
        return reader
