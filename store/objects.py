"""What an object is: its record and its id, computed before anything is written.

An object is one piece of the codec (a block of rows or a snapshot). Its id covers its parent's
id, the chained hash of its token ids and the digest of its bytes, so equal ids mean equal
prefix and equal bits; two computations of the same tokens that differ in one bit are two objects.
It covers its owner's tag as well: what one owner has stored is never found or shared by another.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from store.codec.header import Header, Piece
from store.errors import StoreError
from store.parts import PART_BYTES, heads_of, seal

ROOT = b"\0" * 16
ROWS, SNAPSHOT = 1, 2
KINDS = {"rows": ROWS, "snapshot": SNAPSHOT}
SMALL_BYTES = 64 << 10
TAG_BYTES = 8
NO_TAG = b"\0" * TAG_BYTES
_RECORD = struct.Struct("<BBHI16s16sQQQQ8s8s")
_SMALL = 1


class Record(NamedTuple):
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


def index_key(ident: bytes, record: Record) -> bytes:
    """The key in `index` of a block of rows."""
    return record.tag + record.chain + ident


def prepare(piece: Piece, parent: bytes, ids: bytes, tag: bytes = NO_TAG) -> Prepared:
    """Compute the id, the part headers and the record of `piece`; `ids` are uint32 LE token ids."""
    header = piece.header
    ident = object_id(parent, header, tag)
    payload = memoryview(piece.payload).cast("B")
    small = len(payload) <= SMALL_BYTES
    heads, sealed = ((), seal([])) if small else heads_of(ident, payload)
    record = Record(
        kind=KINDS[header.kind],
        small=small,
        refs=0,
        parent=parent,
        chain=header.chain,
        start=header.start,
        stop=header.stop,
        nbytes=len(payload),
        seal=sealed,
        schema=b"\0" * 8,
        tag=tag,
    )
    family = header.fingerprint + header.kind[:1].encode()
    return Prepared(ident, record, heads, payload, header.pack(), family, ids)
