"""Headers of one model differ in a few numbers: the first one is the dictionary of all others.

A packed header holds the whole leaf table (kilobytes for a deep model) and every block has one.
Deflate with a preset dictionary brings it to about a hundred bytes without the store knowing what
is in it.
"""

from __future__ import annotations

import hashlib
import zlib

from store import pages
from store.environment import Environment, Txn
from store.errors import StoreError

ID_BYTES = 8
MAX_HEADER = 4 << 20
"""Largest header a record may unpack to (the codec's own bound)."""
_WINDOW = 32 << 10


class Schemas:
    """Dictionaries by fingerprint and kind, kept in `pages` and cached in memory."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._by_id: dict[bytes, bytes] = {}

    def pack(self, txn: Txn, family: bytes, header: bytes) -> tuple[bytes, bytes]:
        """Return (dictionary id, compressed header); the first header of a family defines it."""
        key = b"schema/" + family
        found = txn.get(key, db=self._environment.meta)
        if found is None:
            dictionary = header[:_WINDOW]
            ident = hashlib.blake2b(dictionary, digest_size=ID_BYTES).digest()
            txn.put(key, ident, db=self._environment.meta)
            if txn.get(b"s" + ident + b"\0\0", db=self._environment.pages) is None:
                pages.put(self._environment, txn, b"s" + ident, dictionary)
        else:
            ident = bytes(found)
            dictionary = self._dictionary(txn, ident)
        deflate = zlib.compressobj(level=1, wbits=-15, zdict=dictionary)
        return ident, deflate.compress(header) + deflate.flush()

    def unpack(self, txn: Txn, ident: bytes, packed: bytes) -> bytes:
        """The header as it was given to `pack`. Raises StoreError when damaged or too large."""
        inflate = zlib.decompressobj(wbits=-15, zdict=self._dictionary(txn, ident))
        try:
            header = inflate.decompress(packed, MAX_HEADER)
        except zlib.error as error:
            raise StoreError(f"a block's header is damaged ({error}): run a repair") from error
        if not inflate.eof:
            raise StoreError("a block's header is damaged (cut short): run a repair")
        return header

    def _dictionary(self, txn: Txn, ident: bytes) -> bytes:
        if ident not in self._by_id:
            found = pages.get(self._environment, txn, b"s" + ident)
            if found is None:
                raise StoreError("the dictionary of a model's headers is missing: run a repair")
            self._by_id[ident] = found
        return self._by_id[ident]
