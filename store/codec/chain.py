"""Chained hashes of token ids: the name of a stretch of state. Imports no MLX.

The chain at a position is blake2b-128 over the chain at the last block boundary before it
and everything since: the ids, and the marks (images and whatever else decides rows beside
the ids). It depends on the ids, the model and the block size, never on how the rows
happened to be cut, so a prefill node and a store arrive at the same names.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from store.codec.header import CodecError, chain


class Mark(NamedTuple):
    """Something other than an id that decides rows from `position` on.

    For an image `content` is its full digest with the shape of what the model was given
    (see `image_mark`); for an adapter, its digest at position 0.
    """

    position: int
    content: bytes


def image_mark(position: int, pixels: bytes, shape: Sequence[int], dtype: str) -> Mark:
    """The mark of an image as the model sees it: preprocessed pixels, their shape and dtype."""
    digest = hashlib.blake2b(pixels, digest_size=32)
    digest.update(repr((tuple(int(size) for size in shape), dtype)).encode())
    return Mark(position, digest.digest())


def marks_between(marks: Sequence[Mark], start: int, stop: int) -> bytes:
    """The marks in [start, stop) as bytes for `chain`, in order of position."""
    chosen = sorted(mark for mark in marks if start <= mark.position < stop)
    return b"".join(
        struct.pack("<QI", mark.position, len(mark.content)) + mark.content for mark in chosen
    )


def boundaries(
    seed: bytes, ids: Sequence[int], block_tokens: int, marks: Sequence[Mark] = ()
) -> Iterator[bytes]:
    """The chain at 0 and after every whole block of `ids`. `seed` is the `root`."""
    link = seed
    yield link
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        stop = start + block_tokens
        link = chain(link, ids[start:stop], marks_between(marks, start, stop))
        yield link


class Chain:
    """The chain of one conversation at any position, computed as far as asked."""

    def __init__(
        self,
        seed: bytes,
        ids: Sequence[int],
        block_tokens: int,
        marks: Sequence[Mark] = (),
        known: tuple[int, bytes | None] | None = None,
    ) -> None:
        """`ids` are all token ids from position 0; `seed` is the `root` of the model.

        `known` is a block boundary and the chain there, from which to go on instead.
        """
        if block_tokens < 1:
            raise CodecError("a block has at least one token")
        first, link = known or (0, seed)
        if first % block_tokens or link is None:
            raise CodecError(f"position {first} is not a block boundary with a known chain")
        self._first = first // block_tokens
        self._ids = ids
        self._block = block_tokens
        self._marks = tuple(marks)
        self._links = [link]

    def at(self, position: int) -> bytes:
        """The chain after the first `position` ids. Raises CodecError past the ids."""
        if not 0 <= position <= len(self._ids):
            raise CodecError(f"no token ids up to position {position}: {len(self._ids)} known")
        block = position // self._block - self._first
        if block < 0:
            raise CodecError(f"the chain at position {position} lies before what was given")
        while len(self._links) <= block:
            start = (self._first + len(self._links) - 1) * self._block
            self._links.append(self._link(start, start + self._block))
        start = (self._first + block) * self._block
        return self._links[block] if start == position else self._link(start, position)

    def _link(self, start: int, stop: int) -> bytes:
        parent = self._links[start // self._block - self._first]
        return chain(parent, self._ids[start:stop], marks_between(self._marks, start, stop))
