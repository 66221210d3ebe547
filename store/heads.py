"""Headers of objects, each read and verified once while the process lives.

To inflate a header, to check it and to read its leaf table costs several times what finding its
bytes does, and a conversation that is restored has hundreds of them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from store.blocks import Blocks
from store.codec.header import Header, parse
from store.environment import Txn
from store.objects import Record

KEPT = 4096
"""Headers kept, of about a kilobyte each; the ones longest kept go first."""


class Head(NamedTuple):
    """A verified header, and the token ids of its object as uint32 LE."""

    header: Header
    ids: bytes


class Heads:
    """Verified headers by object and by the checksum that their stored bytes bear: bytes that are
    written anew are read anew."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._kept: dict[tuple[bytes, bytes], Head] = {}
        self._lock = threading.Lock()

    def get(self, txn: Txn, ident: bytes, record: Record) -> Head:
        """The header of an object. Raises StoreError or CodecError when it is damaged."""
        key = (ident, self._blocks.header_mark(txn, ident, record))
        head = self._kept.get(key)
        if head is None:
            packed, ids = self._blocks.header(txn, ident, record)
            head = Head(parse(packed), ids)
            with self._lock:
                while len(self._kept) >= KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = head
        return head
