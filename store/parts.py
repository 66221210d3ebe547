"""The form of a bulk value: a header of 48 bytes, which says whose part it is, then its payload.

Every value has the same length; zeros fill what a payload leaves.
"""

from __future__ import annotations

import ctypes
import struct
import sys

import numpy as np
import xxhash

from store.environment import VALUE_BYTES
from store.errors import StoreError

HEAD = struct.Struct("<4sBBHHHI16sQ8x")
PART_BYTES = VALUE_BYTES - HEAD.size
"""Payload bytes of one bulk value: 1,048,512."""
PAGE_HEAD = 16
"""Bytes of LMDB 0.9's page header."""
_MAGIC = b"TNDM"
_VERSION = 1


def heads_of(ident: bytes, payload: memoryview) -> tuple[tuple[bytes, ...], int]:
    """The header of each part of an object's payload, and the seal over all of them.

    Raises StoreError for a payload of more parts than can be numbered.
    """
    count = -(-len(payload) // PART_BYTES)
    if count > 0xFFFF:
        raise StoreError(f"a piece of {len(payload)} bytes is over the limit of 64 GiB")
    heads: list[bytes] = []
    digests: list[int] = []
    for number in range(count):
        part = payload[number * PART_BYTES : (number + 1) * PART_BYTES]
        fields = (_MAGIC, _VERSION, 0, number, count, 0, len(part), ident)
        digests.append(part_digest(HEAD.pack(*fields, 0), part))
        heads.append(HEAD.pack(*fields, digests[-1]))
    return tuple(heads), seal(digests)


def digest_in(head: bytes | bytearray, ident: bytes, number: int, count: int, length: int) -> int:
    """The digest in a part's header. Raises StoreError where it is the header of another part."""
    magic, version, _, part, told, _, size, owner, digest = HEAD.unpack(head)
    if (magic, version, part, told, size, owner) != (
        _MAGIC, _VERSION, number, count, length, ident,
    ):  # fmt: skip
        raise StoreError(f"{name_of(ident, number, count)} carries the header of something else")
    return int(digest)


def name_of(ident: bytes, number: int, count: int) -> str:
    """A part's name, for messages."""
    return f"part {number + 1} of {count} of block {ident.hex()}"


def seal(digests: list[int]) -> int:
    """One number over the digests of all parts, kept in the record."""
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)))


def part_seed(head: bytes | bytearray) -> int:
    """What the digest of a part begins with: its identity (object, number, length)."""
    return int(xxhash.xxh3_64_intdigest(head[:32]))


def part_digest(head: bytes, payload: memoryview) -> int:
    """xxh3-64 of a part's payload, seeded with the part's identity."""
    return int(xxhash.xxh3_64_intdigest(payload, part_seed(head)))


def address_of(view: memoryview) -> int:
    """Where the bytes of a view, which must not be empty, begin in memory."""
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def page_of(address: int) -> int:
    """The number of the page whose first value begins at `address`, from the page's own header."""
    return int.from_bytes(ctypes.string_at(address - PAGE_HEAD, 8), sys.byteorder)
