"""The records of a store: turns and conversations, which nothing but their deletion removes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from store.blocks import Blocks
from store.conversations import Conversations
from store.environment import Environment, Txn
from store.errors import StoreError
from store.eviction import Evictor
from store.objects import owner_tag
from store.quotas import Limits, Wear
from store.reuse import MAX_DEPTH, class_of
from store.states import Pins, States
from store.turns import Turn, Turns, unpack_ids

MAX_LIST = 1000


class Records:
    """Turns and conversations, and the states that go with them.

    Durable against the death of the process when the call returns; a power cut loses at most the
    last commit.
    """

    def __init__(self, environment: Environment, limits: Limits) -> None:
        self.environment = environment
        environment.reserve_bytes = limits.reserve_bytes
        self.blocks = Blocks(environment)
        self.turns = Turns(environment)
        self.conversations = Conversations(environment, self.turns)
        self.states = States(environment, self.blocks)
        self.pins = Pins()
        self.evictor = Evictor(environment, self.states, self.conversations, self.pins)
        self.wear = Wear(environment, limits.daily_bytes)
        self.lock = threading.RLock()

    # ------------------------------------------------------------------ turns

    def put_turn(self, turn: Turn, *, create: bool = True) -> None:
        """Store a finished turn; durable on return. Storing the same turn again does nothing.

        The conversation is created for the turn's owner if it does not exist and `create` is
        true. Raises StoreError if the id is taken by another turn or the parent is not stored.
        """

        def work(txn: Txn) -> None:
            if self.conversations.get(txn, turn.conversation) is None:
                if not create:
                    raise StoreError(f"there is no conversation {turn.conversation}")
                created = turn.created or time.time()
                self.conversations.create(txn, turn.conversation, turn.owner, created, {}, ())
            if self.turns.put(txn, turn):
                self.wear.note(txn, 4 * (len(turn.prompt_ids) + len(turn.output_ids)))
                self.conversations.add_turn(txn, turn)
                depth = self.turns.depth(txn, turn.id, MAX_DEPTH)
                kind = class_of(depth, len(turn.prompt_ids))
                self.evictor.reuse.turned(turn.id, turn.parent, kind, time.time())

        self.environment.write(work)

    def annotate(self, ledgers: Mapping[str, bytes]) -> int:
        """Put ledgers beside stored turns, all or none; returns how many turns were there."""

        def work(txn: Txn) -> int:
            self.wear.note(txn, sum(map(len, ledgers.values())))
            return sum(self.turns.annotate(txn, turn, data) for turn, data in ledgers.items())

        return self.environment.write(work)

    def get_turn(self, turn_id: str) -> Turn | None:
        """The turn with its own ids and items, or None."""
        with self.environment.read() as txn:
            return self.turns.get(txn, turn_id)

    def path(self, turn_id: str) -> list[Turn]:
        """The turn and its ancestors, oldest first. Raises StoreError if one is missing."""
        with self.environment.read() as txn:
            return self.turns.path(txn, turn_id)

    def turn_ids(self, turn_id: str) -> list[int]:
        """All token ids up to the end of the turn. Raises StoreError if it is not stored."""
        with self.environment.read() as txn:
            return unpack_ids(self.turns.ids(txn, turn_id))

    # ------------------------------------------------------------------ conversations

    def create_conversation(
        self,
        ident: str,
        owner: str = "",
        metadata: dict[str, Any] | None = None,
        items: Sequence[dict[str, Any]] = (),
        created: float | None = None,
    ) -> dict[str, Any]:
        """Create a conversation (again by the same owner: no change) and return its record."""
        at = time.time() if created is None else created

        def work(txn: Txn) -> None:
            self.conversations.create(txn, ident, owner, at, metadata or {}, items)

        self.environment.write(work)
        record = self.get_conversation(ident)
        if record is None:
            raise StoreError(f"conversation {ident} was deleted while it was created")
        return record

    def get_conversation(self, ident: str) -> dict[str, Any] | None:
        """The record, or None.

        Keys: id, owner, created, last_used (seconds), metadata, items (those it was created
        with), head (turn id or None), turns (number), n_tokens (at the head), pinned, saved
        (token positions of the head's stored state, 0 if none), bytes (of that state).
        """
        with self.environment.read() as txn:
            record = self.conversations.get(txn, ident)
            if record is None:
                return None
            metadata, items = self.conversations.contents(txn, ident)
            return {**self._described(txn, record), "metadata": metadata, "items": items}

    def list_conversations(
        self,
        owner: str | None = None,
        limit: int = 20,
        after: str | None = None,
        before: tuple[str, float] | None = None,
    ) -> list[dict[str, Any]]:
        """Up to `limit` (at most MAX_LIST) records, newest first, without metadata and items.

        Those behind conversation `after`; or older than one with the id and the time of creation
        in `before`, which need not be here.
        """
        with self.environment.read() as txn:
            limit = max(0, min(limit, MAX_LIST))
            page = self.conversations.page(txn, owner, limit, after, before)
            return [self._described(txn, record) for record in page]

    def conversation_turns(self, ident: str) -> list[str]:
        """Ids of all turns of a conversation (all branches) in the order they were stored."""
        with self.environment.read() as txn:
            return self.conversations.turn_ids(txn, ident)

    def update_conversation(self, ident: str, **changes: Any) -> dict[str, Any]:
        """Change `metadata` (replaced whole), `pinned` or `last_used`; returns the new record."""
        self.environment.write(lambda txn: self.conversations.update(txn, ident, changes))
        record = self.get_conversation(ident)
        if record is None:
            raise StoreError(f"conversation {ident} was deleted while it was changed")
        return record

    def delete_conversation(self, ident: str) -> bool:
        """Delete a conversation, its turns and their states; False if there is none."""

        def work(txn: Txn) -> bool:
            record = self.conversations.get(txn, ident)
            if record is None:
                return False
            turns = self.conversations.turn_ids(txn, ident)
            for turn in {*turns, *self.conversations.remove(txn, ident)}:
                self.states.drop(txn, turn)
            # What was kept of its prompts goes with it, and a preamble that nobody else's
            # conversation begins with: it was this one's words too.
            named = [
                state
                for state in self.states.of_owner(txn, owner_tag(record["owner"]))
                if state.named
            ]
            for state in sorted(named, key=lambda state: -state.tokens):
                if state.conversation != ident and (state.inside or state.conversation):
                    continue
                if not state.inside and self.states.followers(txn, state):
                    self.states.share(txn, state.turn)
                else:
                    self.states.drop(txn, state.turn)
            return True

        with self.lock:
            return self.environment.write(work)

    def _described(self, txn: Txn, record: dict[str, Any]) -> dict[str, Any]:
        head = record["head"]
        state = None if head is None else self.states.get(txn, head)
        return {
            **record,
            "saved": 0 if state is None else state.tokens,
            "bytes": 0 if state is None else state.nbytes,
        }
