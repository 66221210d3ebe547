"""The store: conversations, turns and states behind one object, safe to use from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from store import pages
from store.blocks import Blocks
from store.bundle import export_conversation, import_conversation
from store.check import Report, check
from store.codec.header import Piece
from store.compaction import copy
from store.conversations import Conversations
from store.environment import BEGIN_SECONDS, Environment, Txn
from store.errors import StoreError
from store.eviction import Evictor
from store.loading import Buffers, StateReader, plain_buffer
from store.objects import owner_tag
from store.prefixes import Prefix, Served, state_name
from store.quotas import Limits, Quotas, Wear
from store.reading import Reading
from store.reuse import MAX_DEPTH, class_of
from store.saving import Saver, SaveReport, Subject
from store.states import Pins, StateRef, States
from store.statistics import statistics
from store.turns import Turn, Turns, pack_ids, unpack_ids

MAX_LIST = 1000
NO_LIMITS = Limits()


class Store:
    """The one owner of a store directory.

    Records (turns, conversations) are durable against the death of the process when the call
    returns; a power cut loses at most the last commit. States are evicted when room is needed,
    records never.
    """

    def __init__(self, environment: Environment, limits: Limits = NO_LIMITS) -> None:
        self.environment = environment
        environment.reserve_bytes = limits.reserve_bytes
        self.blocks = Blocks(environment)
        self.turns = Turns(environment)
        self.conversations = Conversations(environment, self.turns)
        self.states = States(environment, self.blocks)
        self.pins = Pins()
        self.evictor = Evictor(environment, self.states, self.conversations, self.pins)
        self.wear = Wear(environment, limits.daily_bytes)
        self.quotas = Quotas(
            environment, self.blocks, self.states, self.evictor, limits.owner_bytes
        )
        self.damaged: set[bytes] = set()
        self.reading = Reading(
            environment, self.blocks, self.turns, self.states, self.pins, self.damaged, self.touch
        )
        self.lock = threading.RLock()
        self._saver = Saver(
            environment, self.blocks, self.turns, self.conversations, self.states, self.evictor,
            self.pins, self.lock, self.damaged, self.quotas, self.wear,
        )  # fmt: skip
        self._touched: dict[str, float] = {}
        self._touch_lock = threading.Lock()
        self.recovered = environment.write(self.blocks.recover)
        with environment.read() as txn:
            learned = pages.get(environment, txn, b"reuse")
        if learned is not None:
            self.evictor.reuse.unpack(msgpack.unpackb(learned))

    @classmethod
    def open(
        cls,
        path: Path,
        size_bytes: int,
        *,
        create: bool = True,
        begin_seconds: float = BEGIN_SECONDS,
        limits: Limits = NO_LIMITS,
    ) -> Store:
        """Open (or create) the store in directory `path` with a cap of `size_bytes`.

        Frees what an interrupted save left. Raises StoreError if another process owns the
        directory or the store has another format.
        """
        environment = Environment.open(path, size_bytes, create=create, begin_seconds=begin_seconds)
        try:
            return cls(environment, limits)
        except BaseException:
            environment.close()
            raise

    def close(self) -> None:
        """Write the times of use and what eviction has learned, flush, release the directory."""

        def work(txn: Txn) -> None:
            pages.delete(self.environment, txn, b"reuse")
            learned = msgpack.packb(self.evictor.reuse.pack())
            pages.put(self.environment, txn, b"reuse", learned)
            self.wear.forget_old(txn)

        try:
            if not self.environment.closed:
                self.flush()
                self.environment.write(work)
        finally:
            self.environment.close()

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
                if state.conversation == ident or not (
                    state.conversation or self.states.followers(txn, state)
                ):
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

    # ------------------------------------------------------------------ states

    def save_state(
        self,
        turn_id: str,
        pieces: Sequence[Piece],
        snapshot: Piece,
        *,
        base: str | None = None,
    ) -> SaveReport:
        """Store the state of a turn: rows [start, n) in `pieces` and the snapshot at n.

        The rows before `start` must be stored already: they are looked for in the state of
        turn `base`, of the turn itself and of its ancestors (by the chained hash and position),
        then anywhere. n is at most the number of the turn's token ids; the last one is usually
        pending and not in the state. Replaces the turn's earlier state.

        Raises StoreGap if the rows before `start` are not stored, StoreFull if there is no room,
        StoreError or CodecError if pieces do not fit together; then nothing has changed.
        """
        return self._saver.save(turn_id, pieces, snapshot, base)

    def find_state(self, turn_id: str) -> StateRef | None:
        """The stored state of exactly this turn, or None. Reads no bulk data and pins nothing."""
        with self.environment.read() as txn:
            state = self.states.get(txn, turn_id)
            return None if state is None else state.ref()

    def nearest_state(self, turn_id: str, fingerprint: bytes | None = None) -> StateRef | None:
        """The state of the turn or of its nearest ancestor that has one (of this model)."""
        with self.environment.read() as txn:
            at: str | None = turn_id
            while at is not None and self.turns.exists(txn, at):
                state = self.states.get(txn, at)
                if state is not None and fingerprint in (None, state.fingerprint):
                    return state.ref()
                at = self.turns.parent(txn, at)
            return None

    def load_state(
        self, turn_id: str, fingerprint: bytes, buffers: Buffers = plain_buffer
    ) -> StateReader | None:
        """A reader of the turn's state, or None if there is none of this model.

        `buffers(nbytes)` gives the memory that each payload is copied to.
        """
        return self.reading.state(turn_id, fingerprint, buffers)

    def serve(self, fingerprint: bytes, block_tokens: int = 0, *, rows_alone: bool = False) -> None:
        """Say which model is served: states of others are evicted first, unless pinned.

        With the tokens of its blocks, prefixes of prompts are looked for; `rows_alone` says that
        its state can be cut wherever a forward ended.
        """
        self.evictor.fingerprint = fingerprint
        self.reading.served = Served(fingerprint, block_tokens, rows_alone)

    # ------------------------------------------------------------------ prefixes

    def longest_prefix(self, ids: Sequence[int], owner: str = "", beyond: int = 0) -> Prefix | None:
        """The longest stored beginning of a prompt that this owner's states have; see
        `store.prefixes`. Only what holds more than `beyond` tokens counts. Reads no bulk data."""
        return self.reading.longest(ids, owner, beyond)

    def load_prefix(
        self, prefix: Prefix, ids: Sequence[int], buffers: Buffers = plain_buffer
    ) -> StateReader | None:
        """A reader of a found prefix, whose token ids are compared with `ids`; None if it is gone.

        Of a `block` it gives rows only, up to the end of that block: `prefix.tokens` of them count.
        """
        return self.reading.prefix(prefix, ids, buffers)

    def save_prefix(
        self,
        owner: str,
        ids: Sequence[int],
        pieces: Sequence[Piece],
        snapshot: Piece,
        *,
        conversation: str = "",
        gain: int = 0,
    ) -> SaveReport:
        """Store a state that belongs to no turn: `ids` are its token ids from the first on.

        As `save_state`; saving it again writes nothing. With `gain`, the tokens beyond the nearest
        snapshot before it, it stands inside a prompt of `conversation`, and goes with that; without
        it is a preamble that conversations share.
        """
        header = snapshot.header
        subject = Subject(
            name=state_name(owner_tag(owner), header.chain, inside=gain > 0),
            conversation=conversation,
            owner=owner,
            ids=pack_ids(ids),
            fingerprint=header.fingerprint,
            depth=0,
            new=gain or header.stop,
        )
        return self._saver.save_as(subject, pieces, snapshot, None)

    def drop_state(self, turn_id: str) -> bool:
        """Forget the state of a turn (its ids and items stay); False if there was none."""

        def work(txn: Txn) -> bool:
            found = self.states.get(txn, turn_id) is not None
            self.states.drop(txn, turn_id)
            return found

        with self.lock:
            return self.environment.write(work)

    def touch(self, turn_id: str) -> None:
        """Note that a state was used; written with the next `flush`, not at once."""
        with self._touch_lock:
            self._touched[turn_id] = time.time()
            many = len(self._touched) >= 256
        if many:
            self.flush()

    def flush(self) -> None:
        """Write the noted times of use."""
        with self._touch_lock:
            touched, self._touched = self._touched, {}

        def work(txn: Txn) -> None:
            for turn, used in touched.items():
                self.states.touch(txn, turn, used)

        if touched:
            self.environment.write(work)

    def evict(self, bytes_free: int) -> int:
        """Evict states until `bytes_free` bytes fit below the ceiling; returns how many went."""
        self.flush()
        with self.lock:
            return self.evictor.make_room(-(-bytes_free // self.environment.page_size))

    # ------------------------------------------------------------------ upkeep

    def check(self, *, repair: bool = False, payload: bool = True) -> Report:
        """Walk everything that is stored; see `store.check.check`."""
        self.flush()
        return check(self, repair=repair, payload=payload)

    def copy(self, folder: Path) -> int:
        """Write a consistent copy without free pages into the empty directory `folder`.

        Reading and writing go on meanwhile. Returns its bytes; it is on disk when this returns.
        Raises StoreError, StoreFull.
        """
        self.flush()
        return copy(self.environment, folder)

    def export_conversation(self, ident: str, path: Path) -> dict[str, int]:
        """Write a conversation to one file; see `store.bundle.export_conversation`."""
        return export_conversation(self, ident, path)

    def import_conversation(self, path: Path, owner: str | None = None) -> dict[str, Any]:
        """Store a conversation from such a file; see `store.bundle.import_conversation`."""
        return import_conversation(self, path, owner)

    def stats(self) -> dict[str, Any]:
        """See `store.statistics.statistics`."""
        return statistics(self)
