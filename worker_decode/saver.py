"""Writes states to the store on a thread of its own, so that decoding never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from store.codec.header import Piece
from store.errors import StoreError
from store.saving import SaveReport
from store.store import Store

log = logging.getLogger("tandem.decode")

MAX_QUEUED = 4


@dataclass(frozen=True)
class Saved:
    """How a save ended: `report`, or `error` with the cause. `tokens` positions were meant."""

    turn: str
    tokens: int
    report: SaveReport | None
    error: Exception | None = None


@dataclass(frozen=True)
class _Order:
    turn: str
    tokens: int
    pieces: Sequence[Piece]
    snapshot: Piece
    base: str | None


class Saver:
    """A bounded queue of states to write. `done` is called on the saver's thread for each."""

    def __init__(self, store: Store, done: Callable[[Saved], None]) -> None:
        self._store = store
        self._done = done
        self._orders: queue.Queue[_Order | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def room(self) -> bool:
        """False while as many states wait as may."""
        return not self._orders.full()

    def put(
        self, turn: str, tokens: int, pieces: Sequence[Piece], snapshot: Piece, base: str | None
    ) -> None:
        """Queue a state; blocks while the queue is full."""
        self._orders.put(_Order(turn, tokens, pieces, snapshot, base))

    def close(self, timeout: float) -> bool:
        """Write what is queued and end; False when that took more than `timeout` seconds."""
        self._orders.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                report = self._store.save_state(
                    order.turn, order.pieces, order.snapshot, base=order.base
                )
            except StoreError as error:
                self._done(Saved(order.turn, order.tokens, None, error))
            except Exception as error:
                log.exception("saving the state of %s failed", order.turn)
                self._done(Saved(order.turn, order.tokens, None, error))
            else:
                self._done(Saved(order.turn, order.tokens, report))
