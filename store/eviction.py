"""Eviction: making room for a save before it starts, in transactions of its own.

Pages freed by one commit can be used from the commit after the next, so room is never made inside
the transaction that needs it. Only states go; turns, token ids and messages stay. First go states
that only an edited, repeated or branched turn would go back to, then those that are least worth
their bytes (`store.reuse`), last the ends of preambles that several conversations begin with.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from store.conversations import Conversations
from store.environment import Environment, Txn
from store.errors import StoreFull
from store.reuse import Reuse, class_of, going_back
from store.states import Pins, States

log = logging.getLogger(__name__)
STATES_PER_COMMIT = 16
_SCAN = 2048
"""States compared in one step, from the longest unused on: all that a full 300 GB store of large
states has, and a bound on the work where states are small."""


class Evictor:
    """Frees states until a number of pages fits below the ceiling."""

    def __init__(
        self, environment: Environment, states: States, conversations: Conversations, pins: Pins
    ) -> None:
        self._environment = environment
        self._conversations = conversations
        self.reuse = Reuse()
        self._states = states
        self._pins = pins
        self.evicted = 0
        self.foreign = 0
        self.fingerprint: bytes | None = None
        """The model that is served; states of others are of no use and go first."""

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
            # A little more than needed, so that not every save has to rank them all again.
            target = ceiling - need_pages - ceiling // 100
            count = self._environment.write(partial(self._some, target_pages=target))
            if count == 0:
                raise StoreFull(
                    "the store is full of states in use or pinned and of records that are never "
                    "evicted: raise its size, unpin or delete conversations"
                )
            total += count
        if total:
            self._environment.heartbeat()
            self.evicted += total
            log.info("evicted %d states to make room for %d pages", total, need_pages)
        return total

    def _some(self, txn: Txn, target_pages: int) -> int:
        """Drop the least worth of the longest unused, stopping once `target_pages` are live."""
        ranked = sorted(islice(self.ranked(txn, self._states.oldest_first(txn)), _SCAN))
        count = 0
        for _, worth, _, turn in ranked[:STATES_PER_COMMIT]:
            if self._environment.live_pages(txn) <= target_pages:
                break
            self.foreign += worth < 0
            self._states.drop(txn, turn)
            count += 1
        return count

    def ranked(self, txn: Txn, turns: Iterable[str]) -> Iterator[tuple[bool, float, float, str]]:
        """(ends a conversation, worth, last use, turn) of those states of `turns` that may go.

        States of another model than the one that is served come before all others, then those
        that a later stored state continues, and those inside a prompt: only an edit, a branch or a
        repeated turn would use them again, and their rows stay as long as a later state shares
        them. Of these go first the ones that save the least compute per byte and time unused.
        """
        now = time.time()
        for turn in turns:
            state = self._states.get(txn, turn)
            if state is None or turn in self._pins or self._is_pinned(txn, state.conversation):
                continue
            if self.fingerprint not in (None, state.fingerprint):
                yield False, -1.0, state.used, turn
                continue
            if state.named and self._states.followers(txn, state) > 1:
                yield True, math.inf, state.used, turn
                continue
            if state.continued or state.inside:
                worth = going_back(state.tokens, state.new, now - state.used, state.own)
                yield False, worth, state.used, turn
                continue
            kind = class_of(state.depth, state.new)
            worth = self.reuse.worth(kind, now - state.used, state.tokens, state.own)
            yield True, worth, state.used, turn

    def _is_pinned(self, txn: Txn, conversation: str) -> bool:
        record = self._conversations.get(txn, conversation) if conversation else None
        return record is not None and bool(record["pinned"])
