"""Headers of objects, each read and verified once while the process lives.

To inflate a header, to check it and to read its leaf table costs several times what finding its
bytes does, and a conversation that is restored has hundreds of them. An object's id covers what its
header tells of the bytes, so a header stays true however often the object is written.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from store.blocks import Blocks
from store.codec.header import Header, parse
from store.errors import StoreError
from store.objects import ROWS, SNAPSHOT, Record

KEPT = {ROWS: 4096, SNAPSHOT: 256}
"""Headers kept of each kind, those of rows of about a kilobyte and those of snapshots of fifty; the
ones longest kept go first."""


class Head(NamedTuple):
    """A verified header, the token ids of its object as uint32 LE, and for each value of the object
    the page where it was last seen, 0 if nowhere."""

    header: Header
    ids: bytes
    pages: list[int]


class Heads:
    """Verified headers by object."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._kept: dict[int, dict[bytes, Head]] = {kind: {} for kind in KEPT}
        self._lock = threading.Lock()

    def get(self, ident: bytes, record: Record) -> Head:
        """The header of an object. Raises StoreError or CodecError when it is damaged."""
        kept = self._kept.get(record.kind)
        if kept is None:
            raise StoreError("a block's record is damaged: run a repair")
        head = kept.get(ident)
        if head is None:
            head = self._read(ident, record)
            with self._lock:
                while len(kept) >= KEPT[record.kind]:
                    del kept[next(iter(kept))]
                kept[ident] = head
        return head

    def _read(self, ident: bytes, record: Record) -> Head:
        with self._blocks.environment.read() as txn:
            packed, ids = self._blocks.header(txn, ident, record)
            try:
                pages = self._blocks.pages(txn, ident)
            except StoreError:
                pages = []  # hints: the check tells of the damage
        if len(pages) != record.parts:
            pages = [0] * record.parts
        return Head(parse(packed), ids, pages)
