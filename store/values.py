"""Bulk values: the payloads of objects, in parts of one size.

Equal sizes keep every freed run of pages reusable. What is given here lies in the map and ends with
its transaction; where it lies in the data file is told as well, for those who read it from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from store.codec.parted import Place
from store.environment import VALUE_BYTES, Environment, Txn
from store.errors import StoreError
from store.objects import Prepared, Record
from store.parts import (
    HEAD,
    PAGE_HEAD,
    PART_BYTES,
    Part,
    address_of,
    digest_in,
    name_of,
    page_of,
    part_digest,
    seal,
)


class Values:
    """The parts of objects in `dat`; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._scratch = bytearray(VALUE_BYTES)
        self._base: int | None = None
        """Where the map of the data file begins, once a value was seen."""

    def copy(self, txn: Txn, ident: bytes, record: Record, number: int, into: memoryview) -> int:
        """Copy part `number` into `into` (its length), verify the copy, return its digest.

        Raises StoreError that names the part when it is missing or its bytes differ.
        """
        value = self._value(txn, ident, number, record.parts)
        head = bytes(value[: HEAD.size])
        digest = digest_in(head, ident, number, record.parts, len(into))
        source = np.frombuffer(value, np.uint8, len(into), HEAD.size)
        np.copyto(np.frombuffer(into, np.uint8), source)
        if part_digest(head, into) != digest:
            raise StoreError(
                f"{name_of(ident, number, record.parts)} has other bytes than were saved"
            )
        return digest

    def view(self, txn: Txn, ident: bytes, record: Record) -> list[Part]:
        """The payload of an object in its parts, in the map: valid within `txn` only.

        The parts' headers are checked against the record; the bytes are for the reader to verify.
        Raises StoreError when a part is missing or another's.
        """
        parts: list[Part] = []
        count, left = record.parts, record.nbytes
        for number in range(count):
            value = self._value(txn, ident, number, count)
            head = bytes(value[: HEAD.size])
            length = min(left, PART_BYTES)
            digest = digest_in(head, ident, number, count, length)
            view = value[HEAD.size : HEAD.size + length].toreadonly()
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
            address = address_of(part.view) - HEAD.size
            if self._base is None:
                offset = page_of(address) * environment.page_size + PAGE_HEAD
                self._base = address - offset
            offset = address - self._base
            if offset < 0:
                return []
            found.append(Place(environment.data_fd, offset, part.head))
        return found

    def touch(self, txn: Txn, ident: bytes, number: int) -> None:
        """Bring a bulk part into the page cache; one that is gone is none."""
        txn.get(ident + number.to_bytes(2, "big"), db=self._environment.dat)  # reads every page

    def write(self, txn: Txn, item: Prepared, number: int) -> None:
        """Write one part of an object that `Blocks.begin` has announced."""
        part = item.payload[number * PART_BYTES : (number + 1) * PART_BYTES]
        scratch = self._scratch
        scratch[: HEAD.size] = item.heads[number]
        end = HEAD.size + len(part)
        scratch[HEAD.size : end] = part
        if end < VALUE_BYTES:
            scratch[end:] = bytes(VALUE_BYTES - end)
        txn.put(item.ident + number.to_bytes(2, "big"), scratch, db=self._environment.dat)

    def pages(self, txn: Txn, ident: bytes, record: Record) -> list[int]:
        """The number of each part's first page. `txn` is a read transaction: only what is committed
        has its place."""
        return [
            page_of(address_of(part.view) - HEAD.size) for part in self.view(txn, ident, record)
        ]

    def free(self, txn: Txn, ident: bytes, record: Record) -> None:
        """Remove all parts of an object."""
        for number in range(record.parts):
            txn.delete(ident + number.to_bytes(2, "big"), db=self._environment.dat)

    def _value(self, txn: Txn, ident: bytes, number: int, count: int) -> memoryview:
        value: memoryview | None = txn.get(
            ident + number.to_bytes(2, "big"), db=self._environment.dat
        )
        if value is None:
            raise StoreError(f"{name_of(ident, number, count)} is missing")
        if len(value) != VALUE_BYTES:
            name = name_of(ident, number, count)
            raise StoreError(f"{name} has {len(value)} bytes instead of {VALUE_BYTES}")
        return value
