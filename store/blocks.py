"""Stored pieces of cache state: parent-linked, reference-counted objects.

A child holds one reference on its parent, a state one on its last block and one on its snapshot.

Large payloads lie in values of one size (`store.values`). Payloads of at most SMALL_BYTES lie in
`pages`: the snapshot of a model without recurrent state is a few hundred bytes, and a million of
those must not cost a MiB each.
"""

from __future__ import annotations

import struct

import numpy as np

from store import pages
from store.environment import VALUE_BYTES, Environment, Txn
from store.errors import StoreError
from store.objects import ROOT, ROWS, Prepared, Record, index_key
from store.parts import PAGE_HEAD
from store.resident import Span
from store.schemas import Schemas
from store.values import Values

_TOTALS = struct.Struct("<QQQ")


class Blocks:
    """Objects and their references; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.values = Values(environment)
        self._schemas = Schemas(environment)
        self._pages: dict[bytes, list[int]] = {}
        """First pages of the values of objects that are written and not yet published."""

    # ------------------------------------------------------------------ reading

    def get(self, txn: Txn, ident: bytes) -> Record | None:
        """The record of an object, or None."""
        found = txn.get(ident, db=self.environment.blk)
        return None if found is None else Record.unpack(found)

    def header(self, txn: Txn, ident: bytes, record: Record) -> tuple[bytes, bytes]:
        """(packed header, token ids as uint32 LE) of an object. Raises StoreError when damaged."""
        found = pages.get(self.environment, txn, b"h" + ident)
        if found is None:
            raise StoreError(f"the header of block {ident.hex()} is missing: run a repair")
        nids = 4 * int.from_bytes(found[:4], "little")
        return self._schemas.unpack(txn, record.schema, found[4 + nids :]), found[4 : 4 + nids]

    def pages(self, txn: Txn, ident: bytes) -> list[int]:
        """The first page of each value of an object when it was written; empty if not told."""
        found = pages.get(self.environment, txn, b"o" + ident)
        return [] if found is None else list(np.frombuffer(found, "<u8").tolist())

    def spans(self, txn: Txn, ident: bytes) -> list[Span]:
        """Where the values of an object lay in the data file when they were written, if told."""
        size = self.environment.page_size
        numbers = self.pages(txn, ident)
        return [(number * size, VALUE_BYTES + PAGE_HEAD) for number in numbers]

    def small_payload(self, txn: Txn, ident: bytes, record: Record) -> bytes:
        """The payload of an object that lies in `pages`. Raises StoreError when damaged."""
        found = pages.get(self.environment, txn, b"p" + ident)
        if found is None or len(found) != record.nbytes:
            raise StoreError(f"the payload of block {ident.hex()} is missing")
        return found

    def line(self, txn: Txn, head: bytes) -> list[tuple[bytes, Record]]:
        """All objects from the first token up to `head`, in order of their tokens.

        Raises StoreError when a link is missing or the ranges do not join.
        """
        result: list[tuple[bytes, Record]] = []
        ident = head
        while ident != ROOT:
            record = self.get(txn, ident)
            if record is None:
                raise StoreError(f"block {ident.hex()} is missing: run a repair")
            if result and record.stop != result[-1][1].start:
                raise StoreError(f"block {ident.hex()} does not join its successor: run a repair")
            result.append((ident, record))
            ident = record.parent
        if result and result[-1][1].start != 0:
            raise StoreError(f"block {result[-1][0].hex()} has lost its parent: run a repair")
        return result[::-1]

    def by_chain(self, txn: Txn, tag: bytes, chain: bytes) -> list[bytes]:
        """Ids of an owner's row blocks whose tokens up to their end hash to `chain`."""
        cursor = txn.cursor(db=self.environment.index)
        found = []
        if cursor.set_range(tag + chain):
            for key in cursor.iternext(keys=True, values=False):
                if bytes(key[:-16]) != tag + chain:
                    break
                found.append(bytes(key[-16:]))
        return found

    # ------------------------------------------------------------------ writing

    def begin(self, txn: Txn, item: Prepared) -> None:
        """Write everything of an object but its bulk parts, unreferenced and pending."""
        environment = self.environment
        schema, packed = self._schemas.pack(txn, item.family, item.header)
        count = (len(item.ids) // 4).to_bytes(4, "little")
        pages.put(environment, txn, b"h" + item.ident, count + item.ids + packed)
        if item.record.small:
            pages.put(environment, txn, b"p" + item.ident, item.payload)
        record = item.record._replace(schema=schema)
        txn.put(item.ident, record.pack(), db=environment.blk)
        txn.put(item.ident, b"", db=environment.pend)
        self._add(txn, 1, record.parts, record.nbytes)

    def locate(self, txn: Txn, ident: bytes, record: Record) -> None:
        """Note on which pages the values of a written object lie, for `publish` to write down.

        `txn` is a read transaction: only what is committed has its place.
        """
        if record.parts:
            self._pages[ident] = [
                self.values.page(txn, ident, record, number) for number in range(record.parts)
            ]

    def rewrite(self, txn: Txn, item: Prepared) -> None:
        """Prepare a damaged object for `Values.write`: new small records, same references."""
        environment = self.environment
        record = self._require(txn, item.ident)
        schema, packed = self._schemas.pack(txn, item.family, item.header)
        count = (len(item.ids) // 4).to_bytes(4, "little")
        pages.delete(environment, txn, b"h" + item.ident)
        pages.put(environment, txn, b"h" + item.ident, count + item.ids + packed)
        if item.record.small:
            pages.delete(environment, txn, b"p" + item.ident)
            pages.put(environment, txn, b"p" + item.ident, item.payload)
        changed = item.record._replace(refs=record.refs, schema=schema)
        txn.put(item.ident, changed.pack(), db=environment.blk)

    def publish(self, txn: Txn, ident: bytes) -> None:
        """Take an object out of `pend`: link it to its parent and into the prefix index."""
        if (numbers := self._pages.pop(ident, None)) is not None:
            pages.delete(self.environment, txn, b"o" + ident)
            packed = np.array(numbers, "<u8").tobytes()
            pages.put(self.environment, txn, b"o" + ident, packed)
        if not txn.delete(ident, db=self.environment.pend):
            return
        record = self._require(txn, ident)
        if record.parent != ROOT:
            self.ref(txn, record.parent)
        if record.kind == ROWS:
            txn.put(index_key(ident, record), b"", db=self.environment.index)

    def ref(self, txn: Txn, ident: bytes) -> None:
        """Add one reference."""
        record = self._require(txn, ident)
        changed = record._replace(refs=record.refs + 1)
        txn.put(ident, changed.pack(), db=self.environment.blk)

    def unref(self, txn: Txn, ident: bytes) -> int:
        """Drop one reference; free the object and then its parents when none is left.

        Returns the number of bulk values freed. A missing link ends the walk (it was lost to
        damage and `check` reports it).
        """
        freed = 0
        while ident != ROOT:
            record = self.get(txn, ident)
            if record is None:
                break
            if record.refs > 1:
                changed = record._replace(refs=record.refs - 1)
                txn.put(ident, changed.pack(), db=self.environment.blk)
                break
            self.free(txn, ident, record)
            freed += record.parts
            ident = record.parent
        return freed

    def free(self, txn: Txn, ident: bytes, record: Record) -> None:
        """Remove an object and all that belongs to it, whatever its references."""
        environment = self.environment
        self.values.free(txn, ident, record)
        pages.delete(environment, txn, b"h" + ident)
        pages.delete(environment, txn, (b"p" if record.small else b"o") + ident)
        txn.delete(index_key(ident, record), db=environment.index)
        txn.delete(ident, db=environment.pend)
        txn.delete(ident, db=environment.blk)
        self._add(txn, -1, -record.parts, -record.nbytes)

    def recover(self, txn: Txn) -> int:
        """Free what an interrupted save left unpublished; returns the number of objects."""
        self._pages.clear()
        cursor = txn.cursor(db=self.environment.pend)
        pending = [bytes(key) for key in cursor.iternext(keys=True, values=False)]
        for ident in pending:
            record = self.get(txn, ident)
            if record is not None and record.refs == 0:
                self.free(txn, ident, record)
            else:
                txn.delete(ident, db=self.environment.pend)
        return len(pending)

    # ------------------------------------------------------------------ totals

    def totals(self, txn: Txn) -> tuple[int, int, int]:
        """(objects, bulk values, payload bytes) as counted by the transactions themselves."""
        found = txn.get(b"totals", db=self.environment.meta)
        return (0, 0, 0) if found is None else _TOTALS.unpack(found)

    def set_totals(self, txn: Txn, objects: int, values: int, nbytes: int) -> None:
        """Overwrite the totals (used by repair)."""
        packed = _TOTALS.pack(objects, values, nbytes)
        txn.put(b"totals", packed, db=self.environment.meta)

    def _add(self, txn: Txn, objects: int, values: int, nbytes: int) -> None:
        old = self.totals(txn)
        self.set_totals(txn, old[0] + objects, old[1] + values, old[2] + nbytes)

    def _require(self, txn: Txn, ident: bytes) -> Record:
        record = self.get(txn, ident)
        if record is None:
            raise StoreError(f"block {ident.hex()} is missing: run a repair")
        return record
