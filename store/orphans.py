"""States inside prompts whose turn was not kept: nobody may go on from them, and they go.

A place inside a prompt is stored while the prompt is computed, before it is known whether the turn
will be kept. So its conversation may not be stored yet; `Early` says which of those are awaited. A
state of any other conversation that is not stored is an orphan. So is a preamble as long as it
names a conversation, that of the turn which brought it, until one that begins with it is kept; but
one that another stored state goes on from is shared.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from store.blocks import Blocks
from store.conversations import Conversations
from store.environment import Txn
from store.errors import StoreError
from store.states import INSIDE, PREAMBLE, State, States
from store.turns import Turns


class Early:
    """Conversations that are not stored yet and may come; in memory, so none after a start."""

    def __init__(
        self, conversations: Conversations, turns: Turns, states: States, blocks: Blocks
    ) -> None:
        self._conversations = conversations
        self._turns = turns
        self._states = states
        self._blocks = blocks
        self._awaited: set[str] = set()
        self._lock = threading.Lock()

    def expect(self, name: str) -> None:
        """A turn of a conversation of this name is under way; until `settle`. Or one that brings a
        preamble of this name; until `settle_preamble`."""
        with self._lock:
            self._awaited.add(name)

    def orphan(self, txn: Txn, state: State) -> bool:
        """Whether a state stands inside a prompt of a conversation that is not there. A preamble is
        an orphan only if nothing else that stays goes on from it."""
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
        """Drop every orphan, and the preambles of turns that are not stored though others of their
        conversations are; returns how many went. Before any turn is under way."""
        inside = self._states.named(txn, INSIDE)
        gone = self._drop(txn, [state for state in inside if self.orphan(txn, state)])
        named = [state for state in self._states.named(txn, PREAMBLE) if state.conversation]
        for state in sorted(named, key=lambda state: -state.tokens):
            if self._states.followers(txn, state) or self._begun(txn, state):
                self._states.share(txn, state.turn)
            else:
                gone += self._drop(txn, [state])
        return gone

    def _begun(self, txn: Txn, state: State) -> bool:
        """Whether a stored turn of its conversation begins with a preamble."""
        try:
            line = self._blocks.line(txn, state.head)
            ids = b"".join(self._blocks.header(txn, *block)[1] for block in line)
        except StoreError:
            return False  # it is of no use
        for turn in self._conversations.turn_ids(txn, state.conversation):
            with suppress(StoreError):  # a damaged one is told of by a check
                if self._as_parent(txn, turn, state.tokens):
                    continue
                if self._turns.ids(txn, turn).startswith(ids):
                    return True
        return False

    def _as_parent(self, txn: Txn, turn: str, tokens: int) -> bool:
        """Whether a turn has its first tokens from another of its conversation."""
        link = self._turns.link(txn, turn)
        if link.parent is None or link.rebased:
            return False
        before = self._turns.link(txn, link.parent)
        return before.conversation == link.conversation and before.total >= tokens

    def _drop(self, txn: Txn, states: list[State]) -> int:
        for state in sorted(states, key=lambda state: -state.tokens):
            self._states.drop(txn, state.turn)
        return len(states)

    def _stored(self, txn: Txn, conversation: str) -> bool:
        return bool(conversation) and self._conversations.get(txn, conversation) is not None
