"""Where the payloads of objects lie, and bringing them from there.

A bulk value is read at the page where it lay when it was last seen, without a transaction: out of
memory where it lies in the page cache, copied and digested in one pass; from the file otherwise, by
one system call, since memory that has to be read from disk first comes slowly on some systems. The
page is a hint and nothing more. The value's own header comes with it and says whose bytes they are,
and what was copied is verified; where anything differs the value is looked up in LMDB's own map and
verified again, and only what that holds is called damage.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from store.blocks import Blocks
from store.codec.header import Header
from store.codec.scatter import digest_of, is_resident
from store.codec.stored import Stored
from store.errors import StoreError
from store.heads import Heads
from store.objects import Record
from store.parts import HEAD, PAGE_HEAD, PART_BYTES, digest_in, part_seed, seal

_MOST_BUFFERS = 1000
"""Buffers of one system call; systems allow 1,024."""
_CAN_FILL = hasattr(os, "preadv")


class Places:
    """Makes the stored pieces of a store's objects."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._heads = Heads(blocks)

    def stored(self, ident: bytes, record: Record) -> tuple[Stored, bytes]:
        """An object to be brought, and its token ids as uint32 LE.

        Bringing raises StoreError where the object is damaged or gone. Raises StoreError or
        CodecError where its header is.
        """
        header, ids, pages = self._heads.get(ident, record)
        if record.small:
            return Stored(header, (_Small(self._blocks, ident, record, header),)), ids
        source = _Source(self._blocks, ident, record, pages)
        if record.nbytes <= PART_BYTES:
            return Stored(header, (_Value(source, 0, record.nbytes),), source.check), ids
        whole, last = divmod(record.nbytes, PART_BYTES)
        sizes = [PART_BYTES] * whole + [last] * (last > 0)
        parts = tuple(_Value(source, number, size) for number, size in enumerate(sizes))
        return Stored(header, parts, source.check), ids


class _Source:
    """What the parts of one object share: whose they are, where they lie, and their digests."""

    __slots__ = ("blocks", "data", "digests", "fd", "ident", "page_size", "pages", "record")

    def __init__(self, blocks: Blocks, ident: bytes, record: Record, pages: list[int]) -> None:
        self.blocks = blocks
        self.ident = ident
        self.record = record
        self.pages = pages
        self.digests = [0] * len(pages)
        self.data = blocks.environment.data_map
        self.fd = blocks.environment.data_fd
        self.page_size = blocks.environment.page_size

    def check(self) -> None:
        """Raise StoreError unless the parts brought are those that were saved together."""
        if seal(self.digests) != self.record.seal:
            raise StoreError(f"the parts of block {self.ident.hex()} are not those that were saved")


class _Value:
    """One part of an object, a bulk value."""

    __slots__ = ("_number", "_source", "_told", "nbytes")

    def __init__(self, source: _Source, number: int, nbytes: int) -> None:
        self._source = source
        self._number = number
        self._told: int | None = None
        self.nbytes = nbytes

    def lying(self) -> tuple[memoryview, int] | None:
        source, number = self._source, self._number
        page = source.pages[number]
        if not page:
            return None
        offset = page * source.page_size + PAGE_HEAD
        memory = source.data.view(offset, HEAD.size + self.nbytes)
        if memory is None or not is_resident(memory):
            return None
        head = bytes(memory[: HEAD.size])
        self._told = self._digest_in(head)
        if self._told is None:
            source.pages[number] = 0
            return None
        return memory[HEAD.size :], part_seed(head)

    def settle(self, into: Sequence[memoryview], digest: int | None) -> None:
        source, number = self._source, self._number
        if digest is None:
            digest = self._from_file(into)
        elif digest != self._told:
            digest = None
        if digest is None:
            values = source.blocks.values
            with source.blocks.environment.read() as txn:
                digest = values.copy(txn, source.ident, source.record, number, into)
                source.pages[number] = values.page(txn, source.ident, source.record, number)
        source.digests[number] = digest

    def _from_file(self, into: Sequence[memoryview]) -> int | None:
        """The digest of what was read from the noted page; None where that is not this part."""
        source = self._source
        page = source.pages[self._number]
        if not page or not _CAN_FILL:
            return None
        head = bytearray(HEAD.size)
        offset = page * source.page_size + PAGE_HEAD
        if not _read(source.fd, offset, [head, *into], HEAD.size + self.nbytes):
            return None
        digest = self._digest_in(head)
        return digest if digest_of(into, part_seed(head)) == digest else None

    def _digest_in(self, head: bytes | bytearray) -> int | None:
        """The digest in a part's header; None where it is the header of something else."""
        source = self._source
        try:
            return digest_in(head, source.ident, self._number, source.record.parts, self.nbytes)
        except StoreError:
            return None


class _Small:
    """The payload of an object that lies among the small records."""

    __slots__ = ("_blocks", "_header", "_ident", "_record", "nbytes")

    def __init__(self, blocks: Blocks, ident: bytes, record: Record, header: Header) -> None:
        self._blocks = blocks
        self._ident = ident
        self._record = record
        self._header = header
        self.nbytes = record.nbytes

    def lying(self) -> None:
        return None

    def settle(self, into: Sequence[memoryview], digest: int | None) -> None:
        with self._blocks.environment.read() as txn:
            payload = memoryview(self._blocks.small_payload(txn, self._ident, self._record))
        at = 0
        for buffer in into:
            buffer[:] = payload[at : at + buffer.nbytes]
            at += buffer.nbytes
        if digest_of(into) != self._header.digest:
            raise StoreError(f"block {self._ident.hex()} has other bytes than were saved")


def _read(fd: int, offset: int, into: Sequence[memoryview | bytearray], nbytes: int) -> bool:
    """Fill all buffers, `nbytes` bytes in all, from a file; False where that does not succeed."""
    try:
        if len(into) <= _MOST_BUFFERS:
            return os.preadv(fd, into, offset) == nbytes
        for first in range(0, len(into), _MOST_BUFFERS):
            some = into[first : first + _MOST_BUFFERS]
            wanted = sum(map(len, some))
            if os.preadv(fd, some, offset) != wanted:
                return False
            offset += wanted
    except (OSError, OverflowError):  # a page may be noted that no file has
        return False
    return True
