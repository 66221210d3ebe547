"""Eviction: making room for a save before it starts, in transactions of its own.

Pages freed by one commit can be used from the commit after the next, so room is never made inside
the transaction that needs it. Only states go; turns, token ids and messages stay.
"""

from __future__ import annotations

import logging

from store.environment import Environment, Txn
from store.errors import StoreFull
from store.states import Pins, States

log = logging.getLogger(__name__)
_STATES_PER_COMMIT = 16


class Evictor:
    """Frees states until a number of pages fits below the ceiling."""

    def __init__(self, environment: Environment, states: States, pins: Pins) -> None:
        self._environment = environment
        self._states = states
        self._pins = pins
        self.evicted = 0

    def make_room(self, need_pages: int) -> int:
        """Evict until `need_pages` more fit; returns the number of states evicted.

        Raises StoreFull when what is left is pinned, or are records that are never evicted.
        """
        ceiling = self._environment.ceiling_pages()
        if need_pages > ceiling:
            size = self._environment.map_pages * self._environment.page_size
            raise StoreFull(
                f"a state of {need_pages * self._environment.page_size >> 20} MiB does not fit "
                f"a store of {size >> 20} MiB: raise its size"
            )
        total = 0
        while True:
            with self._environment.read() as txn:
                if self._environment.live_pages(txn) + need_pages <= ceiling:
                    break
            count = self._environment.write(lambda txn: self._some(txn, ceiling - need_pages))
            if count == 0:
                raise StoreFull(
                    "the store is full of states in use and of records that are never evicted: "
                    "raise its size or delete conversations"
                )
            total += count
        if total:
            self._environment.heartbeat()
            self.evicted += total
            log.info("evicted %d states to make room for %d pages", total, need_pages)
        return total

    def _some(self, txn: Txn, target_pages: int) -> int:
        """Drop up to _STATES_PER_COMMIT states, stopping once `target_pages` are live."""
        victims: list[str] = []
        for turn in self._states.oldest_first(txn):
            if turn not in self._pins:
                victims.append(turn)
                if len(victims) == _STATES_PER_COMMIT:
                    break
        count = 0
        for turn in victims:
            if self._environment.live_pages(txn) <= target_pages:
                break
            self._states.drop(txn, turn)
            count += 1
        return count
