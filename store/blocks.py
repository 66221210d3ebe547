"""Stored pieces of cache state: parent-linked, reference-counted objects in uniform values.

An object is one piece of the codec (a block of rows or a snapshot). Its id covers its parent's
id, the chained hash of its token ids and the digest of its bytes, so equal ids mean equal
prefix and equal bits; two computations of the same tokens that differ in one bit are two objects.
It covers its owner's tag as well: what one owner has stored is never found or shared by another.
A child holds one reference on its parent, a state one on its last block and one on its snapshot.

Large payloads lie in `dat`, in values of exactly VALUE_BYTES (48 bytes of part header, payload,
zeros). Payloads of at most SMALL_BYTES lie in `pages`: the snapshot of a model without recurrent
state is a few hundred bytes, and a million of those must not cost a MiB each.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgpack
import numpy as np
import xxhash

from store import pages
from store.codec.header import Header, Piece
from store.codec.parted import Place
from store.cold import Span
from store.environment import VALUE_BYTES, Environment, Txn
from store.errors import StoreError
from store.schemas import Schemas

ROOT = b"\0" * 16
ROWS, SNAPSHOT = 1, 2
KINDS = {"rows": ROWS, "snapshot": SNAPSHOT}
SMALL_BYTES = 64 << 10
PART_HEAD = struct.Struct("<4sBBHHHI16sQ8x")
PART_BYTES = VALUE_BYTES - PART_HEAD.size
"""Payload bytes of one bulk value: 1,048,512."""
_MAGIC = b"TNDM"
_VERSION = 1
TAG_BYTES = 8
NO_TAG = b"\0" * TAG_BYTES
_RECORD = struct.Struct("<BBHI16s16sQQQQ8s8s")
_SMALL = 1
_PAGE_HEAD = 16
"""Bytes of LMDB 0.9's page header."""
_TOTALS = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Record:
    """The `blk` entry of one object. `parts` is 0 for a payload that lies in `pages`."""

    kind: int
    small: bool
    refs: int
    parent: bytes
    chain: bytes
    start: int
    stop: int
    nbytes: int
    seal: int
    schema: bytes
    tag: bytes

    @property
    def parts(self) -> int:
        """Number of bulk values."""
        return 0 if self.small else max(1, -(-self.nbytes // PART_BYTES))

    def pack(self) -> bytes:
        """The fixed-size form stored in `blk`."""
        return _RECORD.pack(
            self.kind, _SMALL if self.small else 0, 0, self.refs, self.parent, self.chain,
            self.start, self.stop, self.nbytes, self.seal, self.schema, self.tag,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record:
        """The reverse of `pack`. Raises StoreError on a record of another size."""
        if len(data) != _RECORD.size:
            raise StoreError("a block's record is damaged: run a repair")
        kind, flags, _, refs, *rest = _RECORD.unpack(data)
        return cls(kind, flags == _SMALL, refs, *rest)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A piece ready to be written: everything that needs hashing is done outside transactions."""

    ident: bytes
    record: Record
    heads: tuple[bytes, ...]
    payload: memoryview
    header: bytes
    family: bytes
    ids: bytes


class Part(NamedTuple):
    """A bulk value in the map: its payload, its header, and the digest that the header tells."""

    view: memoryview
    head: bytes
    digest: int


def owner_tag(owner: str) -> bytes:
    """TAG_BYTES that stand for an owner in keys and ids; never NO_TAG."""
    digest = hashlib.blake2b(owner.encode(), digest_size=TAG_BYTES - 1, person=b"tandem-owner")
    return b"\1" + digest.digest()


def object_id(parent: bytes, header: Header, tag: bytes = NO_TAG) -> bytes:
    """16-byte id of the piece with this header after the object `parent`, for the owner `tag`."""
    digest = hashlib.blake2b(parent + tag, digest_size=16, person=b"tandem-object")
    digest.update(struct.pack("<BQQQQ", KINDS[header.kind], header.start, header.stop,
                              header.nbytes, header.digest))  # fmt: skip
    digest.update(header.chain)
    if header.kind == "snapshot":
        # Scalars of the state and what travels beside it lie in the header, not in the payload.
        digest.update(header.pack())
    elif header.extra:
        # By which forwards rows were made counts: equal bits that tell other ones are not mixed.
        digest.update(msgpack.packb(dict(header.extra)))
    return digest.digest()


def address_of(view: memoryview) -> int:
    """Where the bytes of a view begin in memory."""
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def _page_of(address: int) -> int:
    """The number of the page whose first value begins at `address`, from the page's own header."""
    return int.from_bytes(ctypes.string_at(address - _PAGE_HEAD, 8), sys.byteorder)


def index_key(ident: bytes, record: Record) -> bytes:
    """The key in `index` of a block of rows."""
    return record.tag + record.chain + ident


def seal(digests: list[int]) -> int:
    """One number over the digests of all parts, kept in the record."""
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)))


def part_seed(head: bytes) -> int:
    """What the digest of a part begins with: its identity (object, number, length)."""
    return int(xxhash.xxh3_64_intdigest(head[:32]))


def part_digest(head: bytes, payload: memoryview) -> int:
    """xxh3-64 of a part's payload, seeded with the part's identity."""
    return int(xxhash.xxh3_64_intdigest(payload, part_seed(head)))


def prepare(piece: Piece, parent: bytes, ids: bytes, tag: bytes = NO_TAG) -> Prepared:
    """Compute the id, the part headers and the record of `piece`; `ids` are uint32 LE token ids."""
    header = piece.header
    ident = object_id(parent, header, tag)
    payload = memoryview(piece.payload).cast("B")
    small = len(payload) <= SMALL_BYTES
    heads: list[bytes] = []
    digests: list[int] = []
    if not small:
        count = -(-len(payload) // PART_BYTES)
        if count > 0xFFFF:
            raise StoreError(f"a piece of {len(payload)} bytes is over the limit of 64 GiB")
        for number in range(count):
            part = payload[number * PART_BYTES : (number + 1) * PART_BYTES]
            fields = (_MAGIC, _VERSION, 0, number, count, 0, len(part), ident)
            digests.append(part_digest(PART_HEAD.pack(*fields, 0), part))
            heads.append(PART_HEAD.pack(*fields, digests[-1]))
    record = Record(
        kind=KINDS[header.kind],
        small=small,
        refs=0,
        parent=parent,
        chain=header.chain,
        start=header.start,
        stop=header.stop,
        nbytes=len(payload),
        seal=seal(digests),
        schema=b"\0" * 8,
        tag=tag,
    )
    family = header.fingerprint + header.kind[:1].encode()
    return Prepared(ident, record, tuple(heads), payload, header.pack(), family, ids)


class Blocks:
    """Objects and their references; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._schemas = Schemas(environment)
        self._scratch = bytearray(VALUE_BYTES)
        self._pages: dict[bytes, list[int]] = {}
        """First pages of the values of objects that are written and not yet published."""
        self._base: int | None = None
        """Where the map of the data file begins, once a value was seen."""

    # ------------------------------------------------------------------ reading

    def get(self, txn: Txn, ident: bytes) -> Record | None:
        """The record of an object, or None."""
        found = txn.get(ident, db=self._environment.blk)
        return None if found is None else Record.unpack(found)

    def header(self, txn: Txn, ident: bytes, record: Record) -> tuple[bytes, bytes]:
        """(packed header, token ids as uint32 LE) of an object. Raises StoreError when damaged."""
        found = pages.get(self._environment, txn, b"h" + ident)
        if found is None:
            raise StoreError(f"the header of block {ident.hex()} is missing: run a repair")
        nids = 4 * int.from_bytes(found[:4], "little")
        return self._schemas.unpack(txn, record.schema, found[4 + nids :]), found[4 : 4 + nids]

    def header_mark(self, txn: Txn, ident: bytes, record: Record) -> bytes:
        """What tells the stored header of an object from any other: its checksum as it is stored,
        and its dictionary. Empty checksums stand for what is missing."""
        return pages.mark(self._environment, txn, b"h" + ident) + record.schema

    def copy_part(
        self, txn: Txn, ident: bytes, record: Record, number: int, into: memoryview
    ) -> int:
        """Copy bulk part `number` into `into` (its length), verify the copy, return its digest.

        Raises StoreError that names the part when it is missing or its bytes differ.
        """
        name = f"part {number + 1} of {record.parts} of block {ident.hex()}"
        value = txn.get(ident + number.to_bytes(2, "big"), db=self._environment.dat)
        if value is None:
            raise StoreError(f"{name} is missing")
        if len(value) != VALUE_BYTES:
            raise StoreError(f"{name} has {len(value)} bytes instead of {VALUE_BYTES}")
        head = bytes(value[: PART_HEAD.size])
        magic, version, _, part, count, _, length, owner, digest = PART_HEAD.unpack(head)
        if (magic, version, part, count, length, owner) != (
            _MAGIC, _VERSION, number, record.parts, len(into), ident,
        ):  # fmt: skip
            raise StoreError(f"{name} carries the header of something else")
        source = np.frombuffer(value, np.uint8, length, PART_HEAD.size)
        np.copyto(np.frombuffer(into, np.uint8), source)
        if part_digest(head, into) != digest:
            raise StoreError(f"{name} has other bytes than were saved")
        return int(digest)

    def view_parts(self, txn: Txn, ident: bytes, record: Record) -> list[Part]:
        """The payload of an object in its bulk parts, in the map: valid within `txn` only.

        The parts' headers are checked against the record; the bytes are for the reader to verify.
        Raises StoreError when a part is missing or another's.
        """
        parts: list[Part] = []
        count, left = record.parts, record.nbytes
        for number in range(count):
            value = txn.get(ident + number.to_bytes(2, "big"), db=self._environment.dat)
            if value is None or len(value) != VALUE_BYTES:
                raise StoreError(f"part {number + 1} of {count} of block {ident.hex()} is missing")
            head = bytes(value[: PART_HEAD.size])
            magic, version, _, part, told, _, length, owner, digest = PART_HEAD.unpack(head)
            if (magic, version, part, told, length, owner) != (
                _MAGIC, _VERSION, number, count, min(left, PART_BYTES), ident,
            ):  # fmt: skip
                raise StoreError(
                    f"part {number + 1} of {count} of block {ident.hex()} carries the header of "
                    "something else"
                )
            view = value[PART_HEAD.size : PART_HEAD.size + length].toreadonly()
            parts.append(Part(view, head, digest))
            left -= length
        if seal([part.digest for part in parts]) != record.seal:
            raise StoreError(f"the parts of block {ident.hex()} are not those that were saved")
        return parts

    def places(self, parts: Sequence[Part]) -> list[Place]:
        """Where parts lie in the data file; empty where that cannot be told.

        A bulk value begins right behind the header of its first page, which begins with the page's
        number, and the map is the file from its beginning. Who reads there compares the part's
        header: it is the place's mark.
        """
        environment = self._environment
        found = []
        for part in parts:
            address = address_of(part.view) - PART_HEAD.size
            if self._base is None:
                offset = _page_of(address) * environment.page_size + _PAGE_HEAD
                self._base = address - offset
            offset = address - self._base
            if offset < 0:
                return []
            found.append(Place(environment.data_fd, offset, part.head))
        return found

    def spans(self, txn: Txn, ident: bytes) -> list[Span]:
        """Where the values of an object lay in the data file when they were written, if told."""
        found = pages.get(self._environment, txn, b"o" + ident)
        size = self._environment.page_size
        numbers = [] if found is None else np.frombuffer(found, "<u8").tolist()
        return [(number * size, VALUE_BYTES + _PAGE_HEAD) for number in numbers]

    def touch(self, txn: Txn, ident: bytes, number: int) -> None:
        """Bring a bulk part into the page cache; one that is gone is none."""
        txn.get(ident + number.to_bytes(2, "big"), db=self._environment.dat)  # reads every page

    def small_payload(self, txn: Txn, ident: bytes, record: Record) -> bytes:
        """The payload of an object that lies in `pages`. Raises StoreError when damaged."""
        found = pages.get(self._environment, txn, b"p" + ident)
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
        cursor = txn.cursor(db=self._environment.index)
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
        environment = self._environment
        schema, packed = self._schemas.pack(txn, item.family, item.header)
        count = (len(item.ids) // 4).to_bytes(4, "little")
        pages.put(environment, txn, b"h" + item.ident, count + item.ids + packed)
        if item.record.small:
            pages.put(environment, txn, b"p" + item.ident, item.payload)
        record = replace(item.record, schema=schema)
        txn.put(item.ident, record.pack(), db=environment.blk)
        txn.put(item.ident, b"", db=environment.pend)
        self._add(txn, 1, record.parts, record.nbytes)

    def write_part(self, txn: Txn, item: Prepared, number: int) -> None:
        """Write one bulk value of an object that `begin` has announced."""
        part = item.payload[number * PART_BYTES : (number + 1) * PART_BYTES]
        scratch = self._scratch
        scratch[: PART_HEAD.size] = item.heads[number]
        end = PART_HEAD.size + len(part)
        scratch[PART_HEAD.size : end] = part
        if end < VALUE_BYTES:
            scratch[end:] = bytes(VALUE_BYTES - end)
        txn.put(item.ident + number.to_bytes(2, "big"), scratch, db=self._environment.dat)

    def locate(self, txn: Txn, ident: bytes, record: Record) -> None:
        """Note on which pages the values of a written object lie, for `publish` to write down.

        `txn` is a read transaction: only what is committed has its place.
        """
        if record.parts:
            self._pages[ident] = [
                _page_of(address_of(part.view) - PART_HEAD.size)
                for part in self.view_parts(txn, ident, record)
            ]

    def rewrite(self, txn: Txn, item: Prepared) -> None:
        """Prepare a damaged object for `write_part`: new small records, same references."""
        environment = self._environment
        record = self._require(txn, item.ident)
        schema, packed = self._schemas.pack(txn, item.family, item.header)
        count = (len(item.ids) // 4).to_bytes(4, "little")
        pages.delete(environment, txn, b"h" + item.ident)
        pages.put(environment, txn, b"h" + item.ident, count + item.ids + packed)
        if item.record.small:
            pages.delete(environment, txn, b"p" + item.ident)
            pages.put(environment, txn, b"p" + item.ident, item.payload)
        changed = replace(item.record, refs=record.refs, schema=schema)
        txn.put(item.ident, changed.pack(), db=environment.blk)

    def publish(self, txn: Txn, ident: bytes) -> None:
        """Take an object out of `pend`: link it to its parent and into the prefix index."""
        if (numbers := self._pages.pop(ident, None)) is not None:
            pages.delete(self._environment, txn, b"o" + ident)
            packed = np.array(numbers, "<u8").tobytes()
            pages.put(self._environment, txn, b"o" + ident, packed)
        if not txn.delete(ident, db=self._environment.pend):
            return
        record = self._require(txn, ident)
        if record.parent != ROOT:
            self.ref(txn, record.parent)
        if record.kind == ROWS:
            txn.put(index_key(ident, record), b"", db=self._environment.index)

    def ref(self, txn: Txn, ident: bytes) -> None:
        """Add one reference."""
        record = self._require(txn, ident)
        changed = replace(record, refs=record.refs + 1)
        txn.put(ident, changed.pack(), db=self._environment.blk)

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
                changed = replace(record, refs=record.refs - 1)
                txn.put(ident, changed.pack(), db=self._environment.blk)
                break
            self.free(txn, ident, record)
            freed += record.parts
            ident = record.parent
        return freed

    def free(self, txn: Txn, ident: bytes, record: Record) -> None:
        """Remove an object and all that belongs to it, whatever its references."""
        environment = self._environment
        for number in range(record.parts):
            txn.delete(ident + number.to_bytes(2, "big"), db=environment.dat)
        pages.delete(environment, txn, b"h" + ident)
        pages.delete(environment, txn, (b"p" if record.small else b"o") + ident)
        txn.delete(index_key(ident, record), db=environment.index)
        txn.delete(ident, db=environment.pend)
        txn.delete(ident, db=environment.blk)
        self._add(txn, -1, -record.parts, -record.nbytes)

    def recover(self, txn: Txn) -> int:
        """Free what an interrupted save left unpublished; returns the number of objects."""
        self._pages.clear()
        cursor = txn.cursor(db=self._environment.pend)
        pending = [bytes(key) for key in cursor.iternext(keys=True, values=False)]
        for ident in pending:
            record = self.get(txn, ident)
            if record is not None and record.refs == 0:
                self.free(txn, ident, record)
            else:
                txn.delete(ident, db=self._environment.pend)
        return len(pending)

    # ------------------------------------------------------------------ totals

    def totals(self, txn: Txn) -> tuple[int, int, int]:
        """(objects, bulk values, payload bytes) as counted by the transactions themselves."""
        found = txn.get(b"totals", db=self._environment.meta)
        return (0, 0, 0) if found is None else _TOTALS.unpack(found)

    def set_totals(self, txn: Txn, objects: int, values: int, nbytes: int) -> None:
        """Overwrite the totals (used by repair)."""
        packed = _TOTALS.pack(objects, values, nbytes)
        txn.put(b"totals", packed, db=self._environment.meta)

    def _add(self, txn: Txn, objects: int, values: int, nbytes: int) -> None:
        old = self.totals(txn)
        self.set_totals(txn, old[0] + objects, old[1] + values, old[2] + nbytes)

    def _require(self, txn: Txn, ident: bytes) -> Record:
        record = self.get(txn, ident)
        if record is None:
            raise StoreError(f"block {ident.hex()} is missing: run a repair")
        return record
