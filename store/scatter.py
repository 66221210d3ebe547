"""Bytes copied to the buffers that they belong in, and digested on the way.

`store/scatter.c` does it in one pass where it was built: large copies are bound by the speed of
memory, and a second look at what was copied costs as much as the copy. Where no compiler was there
when Tandem was installed, copies and digests take turns; the bytes and the digest are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from store.codec.stored import digest_of

log = logging.getLogger(__name__)
Scatter: TypeAlias = Callable[[memoryview, Sequence[memoryview], int], int]

SHORT = 240
"""Up to so many bytes XXH3 is another function, which only the library has."""


def in_turns(source: memoryview, into: Sequence[memoryview], seed: int = 0) -> int:
    """As `scatter`, by copies first and a digest of them after."""
    if source.nbytes != sum(buffer.nbytes for buffer in into):
        raise ValueError(f"{source.nbytes} bytes do not fill the buffers given")
    whole = np.frombuffer(source, np.uint8)
    at = 0
    for buffer in into:
        np.copyto(np.asarray(buffer), whole[at : at + buffer.nbytes])
        at += buffer.nbytes
    return digest_of(into, seed)


def _native() -> tuple[Scatter | None, Callable[[memoryview], bool], str]:
    """The built functions and their name, if they are there and give the library's digest."""
    try:
        from store import _scatter
    except ImportError:
        return None, lambda memory: False, ""
    sample = memoryview(bytes(range(256)) * 9)
    copy = bytearray(len(sample) - 1)
    told = _scatter.scatter(sample[1:], [memoryview(copy)[:700], memoryview(copy)[700:]], 7)
    if copy != sample[1:] or told != digest_of([sample[1:]], 7):
        log.error("store/_scatter was built wrong on this machine and is not used: install again")
        return None, lambda memory: False, ""
    return _scatter.scatter, _scatter.is_resident, _scatter.VARIANT


_scatter, is_resident, VARIANT = _native()
"""`is_resident(memory)`: whether reading mapped memory waits for no disk; False if not known.
VARIANT: the name of the built copy, "" where there is none."""


def scatter(source: memoryview, into: Sequence[memoryview], seed: int = 0) -> int:
    """Copy `source` into writable, contiguous buffers of bytes, one after the other, which have
    room for exactly as many; returns the xxh3_64 of the copy. Most of it runs without the
    interpreter's lock. Raises ValueError where the sizes differ."""
    if _scatter is None or source.nbytes <= SHORT:
        return in_turns(source, into, seed)
    return _scatter(source, into, seed)
