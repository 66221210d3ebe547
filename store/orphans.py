"""States inside prompts whose turn was not kept: nobody may go on from them, and they go.

A place inside a prompt is stored while the prompt is computed, before it is known whether the turn
will be kept. So its conversation may not be stored yet; `Early` says which of those are awaited. A
state of any other conversation that is not stored is an orphan. So is a preamble as long as it
names a conversation: that of the turn which brought it, until one that begins with it is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain

from store.conversations import Conversations
from store.environment import Txn
from store.states import INSIDE, PREAMBLE, State, States


class Early:
    """Conversations that are not stored yet and may come; in memory, so none after a start."""

    def __init__(self, conversations: Conversations, states: States) -> None:
        self._conversations = conversations
        self._states = states
        self._awaited: set[str] = set()
        self._lock = threading.Lock()

    def expect(self, name: str) -> None:
        """A turn of a conversation of this name is under way; until `settle`. Or one that brings a
        preamble of this name; until `settle_preamble`."""
        with self._lock:
            self._awaited.add(name)

    def orphan(self, txn: Txn, state: State) -> bool:
        """Whether a state stands inside a prompt of a conversation that is not there."""
        with self._lock:
            awaited = (state.conversation if state.inside else state.turn) in self._awaited
        mine = state.inside or (state.named and state.conversation)
        return bool(mine) and not awaited and not self._stored(txn, state.conversation)

    def settle(self, txn: Txn, conversation: str, names: Sequence[str], *, kept: bool) -> int:
        """A turn has ended that put the states `names`: drop them unless it was kept and its
        conversation is there. Returns how many went."""
        with self._lock:
            self._awaited.discard(conversation)
        if kept and self._stored(txn, conversation):
            return 0
        found = [self._states.get(txn, name) for name in names]
        mine = [state for state in found if state is not None and state.inside]
        return self._drop(txn, [one for one in mine if one.conversation == conversation])

    def settle_preamble(self, txn: Txn, name: str, *, kept: bool) -> bool:
        """A turn was kept that begins with the preamble `name`, or all that did were not: then it
        goes, unless a stored state or block goes on from it. Returns whether it went."""
        with self._lock:
            self._awaited.discard(name)
        state = self._states.get(txn, name)
        if state is None or not state.conversation:
            return False  # somebody keeps it
        if kept or self._states.followers(txn, state):
            self._states.share(txn, name)
            return False
        return bool(self._drop(txn, [state]))

    def sweep(self, txn: Txn) -> int:
        """Drop every orphan; returns how many there were. Before any turn is under way."""
        gone = self._drop(txn, list(self._orphans(txn)))
        for state in list(self._states.named(txn, PREAMBLE)):
            self._states.share(txn, state.turn)  # its turn may have been kept, and not told so
        return gone

    def _orphans(self, txn: Txn) -> Iterator[State]:
        named = chain(self._states.named(txn, INSIDE), self._states.named(txn, PREAMBLE))
        return (one for one in named if self.orphan(txn, one))

    def _drop(self, txn: Txn, states: list[State]) -> int:
        for state in sorted(states, key=lambda state: -state.tokens):
            self._states.drop(txn, state.turn)
        return len(states)

    def _stored(self, txn: Txn, conversation: str) -> bool:
        return bool(conversation) and self._conversations.get(txn, conversation) is not None
