"""Small and medium records, cut so that no part needs more than one page.

Multi-page values of other sizes than the bulk values would cut up the freed runs that bulk values
need. A part of at most `page size - 16` bytes takes one page (or lies inside a leaf page), which
is the unit the B-trees themselves allocate, so nothing here competes for runs. Each record
carries its length and a checksum seeded with its key, so a damaged or misplaced record is noticed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import xxhash

from store.errors import StoreError

if TYPE_CHECKING:
    from store.environment import Environment, Txn

_HEAD = struct.Struct("<IQ")
_PART = struct.Struct(">H")
_FIRST = _PART.pack(0)
MAX_RECORD = 256 << 20


def _seed(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key)


def parts_of(environment: Environment, nbytes: int) -> int:
    """Number of parts (and at most of pages) that a record of `nbytes` bytes takes."""
    return -(-(nbytes + _HEAD.size) // (environment.page_size - 16))


def put(environment: Environment, txn: Txn, key: bytes, data: bytes | memoryview) -> int:
    """Write `data` under `key` (written once, or deleted first); returns the parts written."""
    if len(data) > MAX_RECORD:
        raise StoreError(f"a record of {len(data)} bytes is over the limit of {MAX_RECORD}")
    step = environment.page_size - 16
    whole = _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data, _seed(key))) + bytes(data)
    count = 0
    for offset in range(0, len(whole), step):
        part = whole[offset : offset + step]
        txn.put(key + _PART.pack(count), part, db=environment.pages)
        count += 1
    return count


def get(environment: Environment, txn: Txn, key: bytes) -> bytes | None:
    """The record under `key` copied out of the map, or None. Raises StoreError when damaged."""
    first = txn.get(key + _FIRST, db=environment.pages)
    if first is None:
        return None
    if len(first) < _HEAD.size:
        raise StoreError(f"record {key!r} is damaged: its head is missing; run a repair")
    length, digest = _HEAD.unpack_from(first)
    whole = bytearray(first[_HEAD.size :])
    for number in range(1, parts_of(environment, length)):
        part = txn.get(key + _PART.pack(number), db=environment.pages)
        if part is None:
            break
        whole += part
    if len(whole) != length or xxhash.xxh3_64_intdigest(whole, _seed(key)) != digest:
        raise StoreError(f"record {key!r} is damaged: its checksum differs; run a repair")
    return bytes(whole)


def delete(environment: Environment, txn: Txn, key: bytes) -> int:
    """Remove the record under `key`; returns the parts removed."""
    count = 0
    while txn.delete(key + _PART.pack(count), db=environment.pages):
        count += 1
    return count
