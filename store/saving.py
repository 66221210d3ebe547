"""Saving a state: bulk data first, then one small transaction that makes it visible.

Between the two the new objects are listed in `pend` with no reference; a crash there leaves only
what the next open frees. A reader sees the old state or the new one, never a mixture.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from store import pages
from store.blocks import Blocks
from store.codec.header import Piece
from store.conversations import Conversations
from store.environment import VALUE_BYTES, Environment, Txn
from store.errors import MapFull, StoreError, StoreGap
from store.eviction import Evictor
from store.objects import ROOT, SNAPSHOT, Prepared, Record, owner_tag, prepare
from store.quotas import Quotas, Wear, stored_bytes
from store.reuse import MAX_DEPTH
from store.states import Pins, State, States
from store.turns import Turns

log = logging.getLogger(__name__)
PARTS_PER_COMMIT = 64
"""Bulk values in one transaction: LMDB keeps them in memory until the commit (64 MiB), and a
turn's record waits for at most one such commit."""

PLACE_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one save wrote. `bytes_written` counts whole values and pages, padding included."""

    bytes_written: int
    blocks_new: int
    blocks_shared: int
    evicted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose state is saved: a turn's, or one with a name of its own and no conversation.

    `ids` are its token ids (uint32 LE), `depth` and `new` its class for `store.reuse`.
    """

    name: str
    conversation: str
    owner: str
    ids: bytes
    fingerprint: bytes
    depth: int
    new: int


class Saver:
    """Writes states; one at a time (`lock` also keeps deletion and eviction out meanwhile)."""

    def __init__(
        self,
        environment: Environment,
        blocks: Blocks,
        turns: Turns,
        conversations: Conversations,
        states: States,
        evictor: Evictor,
        pins: Pins,
        lock: threading.RLock,
        damaged: set[bytes],
        quotas: Quotas,
        wear: Wear,
    ) -> None:
        self._environment = environment
        self._blocks = blocks
        self._turns = turns
        self._conversations = conversations
        self._states = states
        self._evictor = evictor
        self._pins = pins
        self._lock = lock
        self._damaged = damaged
        self._quotas = quotas
        self._wear = wear

    def save(
        self, turn_id: str, pieces: Sequence[Piece], snapshot: Piece, base: str | None
    ) -> SaveReport:
        """See `store.store.Store.save_state`."""
        with self._environment.read() as txn:
            turn = self._turns.get(txn, turn_id)
            if turn is None:
                raise StoreError(f"there is no turn {turn_id}: store the turn before its state")
            record = self._conversations.get(txn, turn.conversation)
            subject = Subject(
                name=turn_id,
                conversation=turn.conversation,
                owner=turn.owner if record is None else record["owner"],
                ids=self._turns.ids(txn, turn_id),
                fingerprint=turn.fingerprint,
                depth=self._turns.depth(txn, turn_id, MAX_DEPTH),
                new=len(turn.prompt_ids),
            )
        return self.save_as(subject, pieces, snapshot, base)

    def save_as(
        self, subject: Subject, pieces: Sequence[Piece], snapshot: Piece, base: str | None
    ) -> SaveReport:
        """Save a state for `subject`; otherwise as `save`."""
        began = time.monotonic()
        tag, ids = owner_tag(subject.owner), subject.ids
        _check(pieces, snapshot, len(ids) // 4, subject.fingerprint)
        for piece in (*pieces, snapshot):
            piece.verify()
        with self._lock:
            first = pieces[0].header if pieces else snapshot.header
            start = first.start if pieces else snapshot.header.stop
            chain = first.parent if pieces else snapshot.header.chain
            base_id, holders = self._base(subject.name, base, start, chain, tag)
            items = _prepare_all(pieces, snapshot, base_id, ids, tag)
            if not items[-1].record.small and self._missing(items[-1:]):
                self._wear.check(sum(_written(item) for item in self._missing(items)))
            with self._pins.hold([*holders, subject.name]):
                evicted, new = self._place(items, base_id, subject.owner)
                head = items[-2].ident if pieces else base_id
                state = State(
                    turn=subject.name,
                    conversation=subject.conversation,
                    fingerprint=snapshot.header.fingerprint,
                    tokens=snapshot.header.stop,
                    nbytes=self._row_bytes(base_id) + sum(item.record.nbytes for item in items),
                    head=head,
                    snap=items[-1].ident,
                    created=time.time(),
                    used=time.time(),
                    own=sum(item.record.nbytes for item in new),
                    depth=subject.depth,
                    new=subject.new,
                    tag=tag,
                    chain=snapshot.header.chain,
                    anchor=self._anchor(pieces, base_id),
                )
                self._guarded(partial(self._publish, items=new, state=state))
        return SaveReport(
            bytes_written=sum(_written(item) for item in new),
            blocks_new=sum(item.record.kind != SNAPSHOT for item in new),
            blocks_shared=len(pieces) - sum(item.record.kind != SNAPSHOT for item in new),
            evicted=evicted,
            seconds=time.monotonic() - began,
        )

    # ------------------------------------------------------------------ steps

    def _base(
        self, name: str, base: str | None, start: int, chain: bytes, tag: bytes
    ) -> tuple[bytes, list[str]]:
        """The stored block that ends at `start` with hash `chain`, and the turns that hold it.

        The state of `base`, of the turn itself or of its nearest ancestor that has the block is
        preferred to any other with equal tokens, so that the bits stay those of one computation.
        """
        if start == 0:
            return ROOT, []
        with self._environment.read() as txn:
            at: str | None = base if base is not None else name
            while at is not None:
                state = self._states.get(txn, at)
                if state is not None and state.tag == tag:
                    for ident, record in reversed(self._blocks.line(txn, state.head)):
                        if record.stop == start and record.chain == chain:
                            return ident, [at]
                        if record.stop < start:
                            break
                at = self._turns.parent(txn, at) if self._turns.exists(txn, at) else None
            for ident in self._blocks.by_chain(txn, tag, chain):
                record_or_none = self._blocks.get(txn, ident)
                if record_or_none is not None and record_or_none.stop == start:
                    return ident, []
        raise StoreGap(f"nothing stored ends at token {start} of {name}: save all of it")

    def _anchor(self, pieces: Sequence[Piece], base: bytes) -> bytes:
        """The chain at the start of a state's last block; of `base` where it has no other."""
        if pieces:
            return pieces[-1].header.parent if pieces[-1].header.start else ROOT
        with self._environment.read() as txn:
            record = self._blocks.get(txn, base)
            before = None if record is None else self._blocks.get(txn, record.parent)
        return ROOT if before is None else before.chain

    def _place(
        self, items: list[Prepared], base_id: bytes, owner: str
    ) -> tuple[int, list[Prepared]]:
        """Make room and write what is missing; returns (states evicted, objects written).

        Free pages of a small map may lie in pieces too short for a bulk value. What that needs is
        more room: each attempt frees as much again as the one before.
        """
        need = sum(stored_bytes(item.record) for item in self._missing(items))
        total = self._quotas.make_room(owner, need)
        for attempt in range(PLACE_ATTEMPTS):
            evicted, new = self._make_room(items, base_id, (1 << attempt) - 1)
            total += evicted
            try:
                self._write(new)
            except MapFull:
                if attempt == PLACE_ATTEMPTS - 1:
                    raise
                log.info("no run of free pages is long enough: making more room")
                self._environment.heartbeat()  # what the failed attempt freed becomes usable
            else:
                break
        return total, new

    def _make_room(
        self, items: list[Prepared], base_id: bytes, spare: int
    ) -> tuple[int, list[Prepared]]:
        """Evict for what is not stored yet and `spare` times as much; returns (states evicted,
        objects to write)."""
        evicted = 0
        new = self._missing(items)
        while True:
            need = sum(self._cost(item.record) for item in new) + 64
            evicted += self._evictor.make_room(need * (1 + spare))
            again = self._missing(items)
            if len(again) == len(new):
                break
            new = again  # the eviction freed blocks that this state shares
        self._environment.check_disk(need)
        with self._environment.read() as txn:
            if base_id != ROOT and self._blocks.get(txn, base_id) is None:
                raise StoreGap("the base of this state was evicted meanwhile: save all of it")
        return evicted, new

    def _missing(self, items: list[Prepared]) -> list[Prepared]:
        missing = []
        with self._environment.read() as txn:
            for item in items:
                record = self._blocks.get(txn, item.ident)
                if record is None or item.ident in self._damaged:
                    missing.append(item)
                    continue
                try:
                    held = self._blocks.header(txn, item.ident, record)[1]
                except StoreError:
                    self._damaged.add(item.ident)
                    missing.append(item)
                    continue
                if held != item.ids:
                    raise StoreError(
                        f"block {item.ident.hex()} is stored for other tokens (a hash collision): "
                        "this state is not saved"
                    )
        return missing

    def _write(self, items: list[Prepared]) -> None:
        """Phase one, in transactions of at most PARTS_PER_COMMIT values."""
        with self._environment.read() as txn:
            rewritten = {item.ident for item in items if self._blocks.get(txn, item.ident)}
        steps: list[Callable[[Txn], None]] = []
        weight = 0
        for item in items:
            if item.ident in rewritten:
                steps.append(partial(self._blocks.rewrite, item=item))
            else:
                steps.append(partial(self._blocks.begin, item=item))
            for number in range(item.record.parts):
                steps.append(partial(self._blocks.values.write, item=item, number=number))
                weight += 1
                if weight == PARTS_PER_COMMIT:
                    self._guarded(partial(_run, steps=steps))
                    steps, weight = [], 0
        if steps:
            self._guarded(partial(_run, steps=steps))
        with self._environment.read() as txn:
            for item in items:
                self._blocks.locate(txn, item.ident, item.record)
        self._damaged.difference_update(item.ident for item in items)

    def _publish(self, txn: Txn, items: list[Prepared], state: State) -> None:
        for item in items:
            self._blocks.publish(txn, item.ident)
        self._wear.note(txn, sum(_written(item) for item in items))
        self._states.publish(txn, state)
        at = None if state.named else self._turns.parent(txn, state.turn)
        while at is not None and self._states.get(txn, at) is None:
            at = self._turns.parent(txn, at)
        if at is not None:
            self._states.note_continued(txn, at)

    def _guarded(self, work: Callable[[Txn], None]) -> None:
        """Run a transaction of a save; if it fails, free what the save has written so far."""
        try:
            self._environment.write(work)
        except BaseException:
            try:
                self._environment.write(self._blocks.recover)
            except StoreError as error:
                log.warning("leftovers of a failed save stay until the next start: %s", error)
            raise

    def _row_bytes(self, head: bytes) -> int:
        with self._environment.read() as txn:
            return sum(record.nbytes for _, record in self._blocks.line(txn, head))

    def _cost(self, record: Record) -> int:
        """Pages that an object takes, its small records included (rounded up)."""
        small = pages.parts_of(self._environment, record.nbytes) if record.small else 0
        return record.parts * self._environment.value_pages + small + 1


def _run(txn: Txn, steps: list[Callable[[Txn], None]]) -> None:
    for step in steps:
        step(txn)


def _written(item: Prepared) -> int:
    """Bytes put for an object: whole values, its ids and header, a small payload."""
    small = item.record.nbytes if item.record.small else 0
    return item.record.parts * VALUE_BYTES + len(item.ids) + small


def _prepare_all(
    pieces: Sequence[Piece], snapshot: Piece, base: bytes, ids: bytes, tag: bytes
) -> list[Prepared]:
    items = []
    parent = base
    for piece in pieces:
        held = ids[4 * piece.header.start : 4 * piece.header.stop]
        items.append(prepare(piece, parent, held, tag))
        parent = items[-1].ident
    items.append(prepare(snapshot, ROOT, b"", tag))
    return items


def _check(pieces: Sequence[Piece], snapshot: Piece, n_ids: int, fingerprint: bytes) -> None:
    """Raise StoreError unless the pieces join, end at the snapshot and belong to the turn."""
    head = snapshot.header
    if head.kind != "snapshot" or any(piece.header.kind != "rows" for piece in pieces):
        raise StoreError("a state is pieces of rows and then one snapshot")
    if not 0 < head.stop <= n_ids:
        raise StoreError(f"a state of {head.stop} tokens for a turn of {n_ids} token ids")
    if any(piece.header.fingerprint != head.fingerprint for piece in pieces):
        raise StoreError("pieces of one state carry different model fingerprints")
    if head.fingerprint != fingerprint:
        raise StoreError("the state's model fingerprint is not its turn's")
    for left, right in pairwise(pieces):
        if left.header.stop != right.header.start or left.header.chain != right.header.parent:
            raise StoreError(f"pieces do not join at token {left.header.stop}")
    if pieces and (pieces[-1].header.stop != head.stop or pieces[-1].header.chain != head.chain):
        raise StoreError(f"the rows do not end where the snapshot stands, at token {head.stop}")
