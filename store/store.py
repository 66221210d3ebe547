"""The store: conversations, turns and states behind one object, safe to use from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from store import pages
from store.bundle import export_conversation, import_conversation
from store.check import Report, check
from store.codec.header import Piece
from store.compaction import copy
from store.environment import BEGIN_SECONDS, Environment, Txn
from store.loading import Buffers, StateReader, plain_buffer
from store.objects import owner_tag
from store.orphans import Early
from store.prefixes import Prefix, Served, state_name
from store.quotas import Limits, Quotas
from store.reading import Reading
from store.records import Records
from store.saving import Saver, SaveReport, Subject
from store.states import StateRef
from store.statistics import statistics
from store.turns import pack_ids

NO_LIMITS = Limits()


class Store(Records):
    """The one owner of a store directory: records, which are never evicted, and states, which are
    when room is needed."""

    def __init__(self, environment: Environment, limits: Limits = NO_LIMITS) -> None:
        super().__init__(environment, limits)
        self.quotas = Quotas(
            environment, self.blocks, self.states, self.evictor, limits.owner_bytes
        )
        self.early = Early(self.conversations, self.turns, self.states, self.blocks)
        self.damaged: set[bytes] = set()
        self.reading = Reading(
            environment, self.blocks, self.turns, self.states, self.pins, self.damaged, self.touch
        )
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
        snapshot before it, it stands inside a prompt of `conversation`, and goes with that: call
        `settle_inside` when the turn has ended. Without it is a preamble that conversations share;
        it is of `conversation` alone until `settle_preamble` says that a turn is kept which begins
        so. Without `conversation` it is kept from the first.
        """
        header = snapshot.header
        name = state_name(owner_tag(owner), header.chain, inside=gain > 0)
        if gain <= 0 and self._is_shared(name):
            conversation = ""
        if conversation and self.get_conversation(conversation) is None:
            self.early.expect(conversation if gain > 0 else name)
        subject = Subject(
            name=name,
            conversation=conversation,
            owner=owner,
            ids=pack_ids(ids),
            fingerprint=header.fingerprint,
            depth=0,
            new=gain or header.stop,
        )
        return self._saver.save_as(subject, pieces, snapshot, None)

    def _is_shared(self, name: str) -> bool:
        with self.environment.read() as txn:
            state = self.states.get(txn, name)
        return state is not None and not state.conversation

    def settle_preamble(self, name: str, *, kept: bool) -> bool:
        """A turn is kept that begins with the preamble `name`, or all that did were not kept.

        Then it goes, unless another stored state goes on from it. Returns whether it went.
        """
        with self.lock:
            return self.environment.write(
                lambda txn: self.early.settle_preamble(txn, name, kept=kept)
            )

    def settle_inside(self, conversation: str, names: Sequence[str], *, kept: bool) -> int:
        """A turn of `conversation` has ended that saved the states `names` inside its prompt.

        They stay if it was `kept` and its conversation is stored; otherwise they go, since what was
        said in it is to be forgotten. Returns how many went.
        """
        with self.lock:
            return self.environment.write(
                lambda txn: self.early.settle(txn, conversation, names, kept=kept)
            )

    def sweep(self) -> int:
        """Drop states inside prompts of conversations that are not stored, and preambles of turns
        that are not, unless another state goes on from them: what turns left behind that ended
        with the process before. Returns how many went."""
        with self.lock:
            return self.environment.write(self.early.sweep)

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
