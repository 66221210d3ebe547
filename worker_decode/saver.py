"""Writes states to the store on a thread of its own, so that decoding never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from store.codec.header import Piece
from store.errors import StoreError
from store.saving import SaveReport
from store.store import Store

log = logging.getLogger("tandem.decode")

MAX_QUEUED = 4
MAX_QUEUED_BYTES = 4 << 30
"""A state is copied before it is queued: beyond this, no second one waits."""


@dataclass(frozen=True)
class Saved:
    """How a save ended: `report`, or `error` with the cause. `tokens` positions were meant.

    `began`: when it was its turn, by time.monotonic.
    """

    turn: str
    tokens: int
    report: SaveReport | None
    error: Exception | None = None
    began: float = 0.0


@dataclass(frozen=True)
class _Order:
    turn: str
    tokens: int
    pieces: Sequence[Piece]
    snapshot: Piece
    base: str | None
    owner: str = ""
    ids: Sequence[int] = ()
    """Token ids and owner of a state that belongs to no turn."""
    conversation: str = ""
    gain: int = 0

    @property
    def nbytes(self) -> int:
        return sum(piece.payload.nbytes for piece in (*self.pieces, self.snapshot))


class Saver:
    """A bounded queue of states to write. `done` is called on the saver's thread for each."""

    def __init__(self, store: Store, done: Callable[[Saved], None]) -> None:
        self._store = store
        self._done = done
        self._orders: queue.Queue[_Order | Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._nbytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def room(self) -> bool:
        """False while as many states, or as many bytes of them, wait as may."""
        return not self._orders.full() and self._nbytes < MAX_QUEUED_BYTES

    def put(
        self, turn: str, tokens: int, pieces: Sequence[Piece], snapshot: Piece, base: str | None
    ) -> None:
        """Queue a state; blocks while the queue is full."""
        self._put(_Order(turn, tokens, pieces, snapshot, base))

    def put_prefix(
        self,
        owner: str,
        ids: Sequence[int],
        pieces: Sequence[Piece],
        snapshot: Piece,
        *,
        conversation: str = "",
        gain: int = 0,
    ) -> None:
        """Queue the state of a beginning, as `put`; it is told without a turn. See
        `store.store.Store.save_prefix`."""
        self._put(_Order("", len(ids), pieces, snapshot, None, owner, ids, conversation, gain))

    def _put(self, order: _Order) -> None:
        with self._lock:
            self._nbytes += order.nbytes
        self._orders.put(order)

    def do(self, work: Callable[[], None]) -> None:
        """Run something small behind what is queued; blocks while the queue is full."""
        self._orders.put(work)

    def close(self, timeout: float) -> bool:
        """Write what is queued and end; False when that took more than `timeout` seconds."""
        end = time.monotonic() + timeout
        try:
            self._orders.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        # A function of its own: the copied state must not outlive its order here.
        order = self._orders.get()
        if order is None:
            return False
        began = time.monotonic()
        if not isinstance(order, _Order):
            order()
            return True
        report: SaveReport | None = None
        problem: Exception | None = None
        try:
            if order.turn:
                report = self._store.save_state(
                    order.turn, order.pieces, order.snapshot, base=order.base
                )
            else:
                report = self._store.save_prefix(
                    order.owner,
                    order.ids,
                    order.pieces,
                    order.snapshot,
                    conversation=order.conversation,
                    gain=order.gain,
                )
        except StoreError as error:
            problem = error
        except Exception as error:
            log.exception("saving the state of %s failed", order.turn or "a preamble")
            problem = error
        with self._lock:
            self._nbytes -= order.nbytes
        # Nor may a traceback keep it.
        problem = problem and problem.with_traceback(None)
        self._done(Saved(order.turn, order.tokens, report, problem, began))
        return True
