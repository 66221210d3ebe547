"""States inside prompts whose turn was not kept: nobody may go on from them, and they go.

A place inside a prompt is stored while the prompt is computed, before it is known whether the turn
will be kept. So its conversation may not be stored yet; `Early` says which of those are awaited. A
state of any other conversation that is not stored is an orphan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from store.conversations import Conversations
from store.environment import Txn
from store.states import INSIDE, State, States


class Early:
    """Conversations that are not stored yet and may come; in memory, so none after a start."""

    def __init__(self, conversations: Conversations, states: States) -> None:
        self._conversations = conversations
        self._states = states
        self._awaited: set[str] = set()
        self._lock = threading.Lock()

    def expect(self, conversation: str) -> None:
        """A turn of this conversation is under way; until `settle`."""
        with self._lock:
            self._awaited.add(conversation)

    def orphan(self, txn: Txn, state: State) -> bool:
        """Whether a state stands inside a prompt of a conversation that is not there."""
        with self._lock:
            awaited = state.conversation in self._awaited
        return state.inside and not awaited and not self._stored(txn, state.conversation)

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

    def sweep(self, txn: Txn) -> int:
        """Drop every orphan; returns how many there were."""
        return self._drop(txn, list(self._orphans(txn)))

    def _orphans(self, txn: Txn) -> Iterator[State]:
        return (one for one in self._states.named(txn, INSIDE) if self.orphan(txn, one))

    def _drop(self, txn: Txn, states: list[State]) -> int:
        for state in sorted(states, key=lambda state: -state.tokens):
            self._states.drop(txn, state.turn)
        return len(states)

    def _stored(self, txn: Txn, conversation: str) -> bool:
        return bool(conversation) and self._conversations.get(txn, conversation) is not None
