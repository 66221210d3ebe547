"""Checking and repairing a store: what must be there, computed from the primary records.

Primary are turns, conversations, states and the blocks' own records; everything else (references,
prefix index, order of use, lists, totals, which keys may exist) follows from them. The check
computes what follows and compares; the repair writes the difference. A state with a missing or
damaged block is dropped by a repair (it will be recomputed); a damaged turn cannot be restored and
is only reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from store.codec.header import CodecError, chain, parse, root
from store.environment import Environment, Txn
from store.errors import StoreError
from store.objects import ROOT, ROWS, Record, index_key
from store.parts import PART_BYTES, seal
from store.states import State, place_key, use_key
from store.tree_check import check_tree
from store.turns import unpack_ids

if TYPE_CHECKING:
    from store.store import Store

MAX_TOLD = 1000


@dataclass(slots=True)
class Report:
    """What a check found. `problems` are lines of text (at most MAX_TOLD kept of `found`)."""

    objects: int = 0
    states: int = 0
    turns: int = 0
    conversations: int = 0
    bytes_read: int = 0
    found: int = 0
    problems: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    repaired: bool = False
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Nothing was wrong."""
        return self.found == 0

    def tell(self, problem: str) -> None:
        """Note one problem."""
        self.found += 1
        if len(self.problems) < MAX_TOLD:
            self.problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """Plain msgpack types."""
        return {**asdict(self), "clean": self.clean}


Expected = dict[bytes, bytes]


def check(store: Store, *, repair: bool = False, payload: bool = True) -> Report:
    """Walk everything. With `payload` every stored byte is read and verified too.

    States are neither saved nor evicted meanwhile, except while payload is read. With `repair`
    the store is left such that the next check is clean but for damaged turns (`lost`).
    """
    began = time.monotonic()
    report = Report()
    environment = store.environment
    bad: set[bytes] = set()
    if payload:
        bad = _read_payload(store, report)
    with store.lock:
        store.damaged.update(bad)
        if repair:
            environment.write(lambda txn: _walk(store, txn, report, bad, repair=True))
            store.damaged.clear()
            environment.heartbeat()
            report.repaired = report.found > 0
        else:
            with environment.read() as txn:
                _walk(store, txn, report, bad, repair=False)
    report.seconds = time.monotonic() - began
    return report


def _read_payload(store: Store, report: Report) -> set[bytes]:
    """Verify every object's bytes in short transactions; returns the ids of damaged ones."""
    bad: set[bytes] = set()
    with store.environment.read() as txn:
        idents = [bytes(key) for key in _keys(txn, store.environment.blk)]
    for ident in idents:
        try:
            with store.environment.read() as txn:
                record = store.blocks.get(txn, ident)
            if record is None:
                continue  # freed since the list was made
            verify_object(store, ident, record)
            report.bytes_read += record.nbytes
        except (StoreError, CodecError) as error:
            with store.environment.read() as txn:
                if txn.get(ident, db=store.environment.blk) is not None:
                    report.tell(str(error))
                    bad.add(ident)
    return bad


def verify_object(store: Store, ident: bytes, record: Record) -> None:
    """Read one object whole. Raises StoreError or CodecError if anything differs."""
    with store.environment.read() as txn:
        packed, ids = store.blocks.header(txn, ident, record)
        if record.small:
            store.blocks.small_payload(txn, ident, record)
    header = parse(packed)
    if (header.start, header.stop, header.nbytes) != (record.start, record.stop, record.nbytes):
        raise StoreError(f"the header of block {ident.hex()} contradicts its record")
    if record.kind == ROWS and len(ids) != 4 * (record.stop - record.start):
        raise StoreError(f"block {ident.hex()} has token ids for another range")
    if record.small:
        return
    left = record.nbytes
    digests = []
    for number in range(record.parts):
        into = memoryview(bytearray(min(left, PART_BYTES)))
        with store.environment.read() as txn:
            digests.append(store.blocks.values.copy(txn, ident, record, number, [into]))
        left -= len(into)
    if seal(digests) != record.seal:
        raise StoreError(f"the parts of block {ident.hex()} are not those that were saved")


def _walk(store: Store, txn: Txn, report: Report, bad: set[bytes], *, repair: bool) -> None:
    environment = store.environment
    objects, missing = _objects(store, txn, report, bad)
    report.objects = len(objects)
    states, live = _states(store, txn, report, objects, missing | bad)
    report.states = len(states)
    tree = check_tree(store, txn, report)

    blk: Expected = {}
    index: Expected = {}
    dat: set[bytes] = set()
    page_keys = tree.page_keys
    totals = [0, 0, 0]
    for ident, refs in live.items():
        record = objects[ident]._replace(refs=refs)
        blk[ident] = record.pack()
        if record.kind == ROWS:
            index[index_key(ident, record)] = b""
        dat.update(ident + number.to_bytes(2, "big") for number in range(record.parts))
        page_keys.update((b"h" + ident, (b"p" if record.small else b"o") + ident))
        page_keys.add(b"s" + record.schema)
        totals = [totals[0] + 1, totals[1] + record.parts, totals[2] + record.nbytes]
    wanted = {
        "blk": blk,
        "index": index,
        "pend": {},
        "snap": {place_key(state): b"" for state in states.values()},
        "state": {state.turn.encode(): state.pack() for state in states.values()},
        "lru": {use_key(state): b"" for state in states.values()},
        "turn": tree.turn,
        "conv": tree.conv,
        "order": tree.order,
    }
    for name, expected in wanted.items():
        _settle(environment, txn, name, expected, report, repair=repair)
    _extra_keys(txn, environment.dat, dat, 2, "dat", report, repair=repair)
    for _, ident in txn.cursor(db=environment.meta):
        page_keys.add(b"s" + bytes(ident))  # dictionaries of headers that no block uses now
    page_keys.add(b"reuse")
    _extra_keys(txn, environment.pages, page_keys, 2, "pages", report, repair=repair, cut=True)
    counted = store.blocks.totals(txn)
    if counted != tuple(totals):
        report.tell(f"totals say {counted}, the blocks add up to {tuple(totals)}")
        if repair:
            store.blocks.set_totals(txn, *totals)


def _objects(
    store: Store, txn: Txn, report: Report, bad: set[bytes]
) -> tuple[dict[bytes, Record], set[bytes]]:
    """All readable block records, and the ids of those that lack a bulk value or a header."""
    environment = store.environment
    parts = {bytes(key) for key in _keys(txn, environment.dat)}
    objects: dict[bytes, Record] = {}
    missing: set[bytes] = set()
    for key, value in txn.cursor(db=environment.blk):
        ident = bytes(key)
        try:
            record = Record.unpack(value)
        except StoreError as error:
            report.tell(str(error))
            missing.add(ident)
            continue
        objects[ident] = record
        whole = all(ident + number.to_bytes(2, "big") in parts for number in range(record.parts))
        head = txn.get(b"h" + ident + b"\0\0", db=environment.pages)
        if (not whole or head is None) and ident not in bad:
            report.tell(f"block {ident.hex()} lacks a part or its header")
            missing.add(ident)
    return objects, missing


def _states(
    store: Store, txn: Txn, report: Report, objects: dict[bytes, Record], bad: set[bytes]
) -> tuple[dict[str, State], dict[bytes, int]]:
    """The healthy states, and all blocks they need with their number of references."""
    states: dict[str, State] = {}
    live: dict[bytes, int] = {}
    orphans = {one.turn for one in store.states.every(txn) if store.early.orphan(txn, one)}
    # A preamble among them stays if one that does goes on from it: those come last, longest first.
    every = sorted(
        store.states.every(txn),
        key=lambda one: -one.tokens if one.turn in orphans and not one.inside else -math.inf,
    )
    for state in every:
        if state.turn in orphans and (state.inside or state.head not in live):
            report.tell(
                f"orphan: the state {state.turn} stands inside a prompt of conversation "
                f"{state.conversation or '(none)'}, which is not stored"
            )
            report.dropped.append(state.turn)
            continue
        problem = _problem(store, txn, state, objects, bad)
        if problem:
            report.tell(f"the state of {state.turn} is unusable: {problem}")
            report.dropped.append(state.turn)
            continue
        states[state.turn] = state
        live[state.snap] = live.get(state.snap, 0) + 1
        ident = state.head
        while True:
            live[ident] = live.get(ident, 0) + 1
            parent = objects[ident].parent
            if live[ident] > 1 or parent == ROOT:
                break  # a block that was met before has counted for its parent already
            ident = parent
    return states, live


def _problem(
    store: Store, txn: Txn, state: State, objects: dict[bytes, Record], bad: set[bytes]
) -> str | None:
    snapshot = objects.get(state.snap)
    if snapshot is None or state.snap in bad:
        return "its snapshot is missing or damaged"
    ids = b""
    if not state.named:
        try:
            ids = store.turns.ids(txn, state.turn)
        except StoreError as error:
            return str(error)
    end = state.tokens
    ident = state.head
    while ident != ROOT:
        record = objects.get(ident)
        if record is None or ident in bad:
            return f"its block that ends at token {end} is missing or damaged"
        if record.stop != end:
            return f"its block that ends at token {record.stop} should end at {end}"
        try:
            held = store.blocks.header(txn, ident, record)[1]
        except StoreError as error:
            return str(error)
        if state.named:
            if not _hashes_to(record, held, objects.get(record.parent), state):
                return f"the token ids of its block that ends at token {end} are damaged"
        elif held != ids[4 * record.start : 4 * record.stop]:
            return f"its block that ends at token {end} was saved for other tokens"
        end, ident = record.start, record.parent
    if end != 0 or snapshot.stop != state.tokens:
        return "its blocks do not reach from the first token to the snapshot"
    return None


def _hashes_to(record: Record, ids: bytes, parent: Record | None, state: State) -> bool:
    """Whether a block's token ids are those that its chain says, where no turn has them too."""
    before = root(state.fingerprint) if parent is None else parent.chain
    return len(ids) % 4 == 0 and chain(before, unpack_ids(ids)) == record.chain


def _settle(
    environment: Environment,
    txn: Txn,
    name: str,
    expected: Expected,
    report: Report,
    *,
    repair: bool,
) -> None:
    """Compare a table with what it should hold; make it so if `repair`."""
    table = getattr(environment, name)
    found = {bytes(key): bytes(value) for key, value in txn.cursor(db=table)}
    for key in found.keys() - expected.keys():
        report.tell(f"{name}: {key!r} should not be there")
        if repair:
            txn.delete(key, db=table)
    for key, value in expected.items():
        if found.get(key) != value:
            report.tell(f"{name}: {key!r} is {'wrong' if key in found else 'missing'}")
            if repair:
                txn.put(key, value, db=table)


def _extra_keys(
    txn: Txn,
    table: Any,
    allowed: set[bytes],
    tail: int,
    name: str,
    report: Report,
    *,
    repair: bool,
    cut: bool = False,
) -> None:
    """Report (and remove) keys that belong to nothing; `cut` leaves the part number aside."""
    extra = [key for key in _keys(txn, table) if (key[:-tail] if cut else key) not in allowed]
    for key in extra:
        report.tell(f"{name}: {key!r} belongs to nothing")
        if repair:
            txn.delete(key, db=table)


def _keys(txn: Txn, table: Any) -> Iterator[bytes]:
    for key in txn.cursor(db=table).iternext(keys=True, values=False):
        yield bytes(key)
