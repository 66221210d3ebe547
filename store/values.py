"""Bulk values: the payloads of objects, in parts of one size.

Equal sizes keep every freed run of pages reusable. A value begins right behind the header of its
first page, and the map is the data file from its beginning: by that page's number a value can be
read from the file as well, as long as it is not freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from store.codec.scatter import scatter
from store.environment import VALUE_BYTES, Environment, Txn
from store.errors import StoreError
from store.objects import Prepared, Record
from store.parts import (
    HEAD,
    PART_BYTES,
    address_of,
    digest_in,
    name_of,
    page_of,
    part_seed,
)


class Values:
    """The parts of objects in `dat`; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._scratch = bytearray(VALUE_BYTES)

    def copy(
        self, txn: Txn, ident: bytes, record: Record, number: int, into: Sequence[memoryview]
    ) -> int:
        """Copy part `number` into buffers (its length in all), verify the copy, return its digest.

        Raises StoreError that names the part when it is missing or its bytes differ.
        """
        value = self._value(txn, ident, number, record.parts)
        head = bytes(value[: HEAD.size])
        length = sum(map(len, into))
        digest = digest_in(head, ident, number, record.parts, length)
        source = value[HEAD.size : HEAD.size + length]
        if scatter([(source, into, part_seed(head))]) != [digest]:
            raise StoreError(
                f"{name_of(ident, number, record.parts)} has other bytes than were saved"
            )
        return digest

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

    def page(self, txn: Txn, ident: bytes, record: Record, number: int) -> int:
        """The number of a part's first page. `txn` is a read transaction: only what is committed
        has its place. Raises StoreError when the part is missing."""
        return page_of(address_of(self._value(txn, ident, number, record.parts)))

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
