"""Bytes copied to the buffers that they belong in, and digested on the way.

`scatter.c` does it in one pass where it was built: large copies are bound by the speed of
memory, and a second look at what was copied costs as much as the copy. Where no compiler was there
when Tandem was installed, copies and digests take turns; the bytes and the digest are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias

import numpy as np
import xxhash

log = logging.getLogger(__name__)

Copy: TypeAlias = tuple[memoryview, Sequence[memoryview], int]
"""Source, the writable, contiguous buffers of bytes that it fills, one after the other, and the
seed of its digest."""

SHORT = 240
"""Up to so many bytes XXH3 is another function, which only the library has."""


def digest_of(buffers: Sequence[memoryview], seed: int = 0) -> int:
    """The xxh3_64 of buffers that follow one another."""
    if len(buffers) == 1:
        return int(xxhash.xxh3_64_intdigest(buffers[0], seed))
    digest = xxhash.xxh3_64(seed=seed)
    update = digest.update
    for buffer in buffers:
        update(buffer)
    return int(digest.intdigest())


def in_turns(source: memoryview, into: Sequence[memoryview], seed: int = 0) -> int:
    """As `scatter` for one copy, by copies first and a digest of them after."""
    if source.nbytes != sum(buffer.nbytes for buffer in into):
        raise ValueError(f"{source.nbytes} bytes do not fill the buffers given")
    whole = np.frombuffer(source, np.uint8)
    at = 0
    for buffer in into:
        np.copyto(np.asarray(buffer), whole[at : at + buffer.nbytes])
        at += buffer.nbytes
    return digest_of(into, seed)


def _native() -> ModuleType | None:
    """The built module, if it is there and gives the library's digest."""
    try:
        from store.codec import _scatter
    except ImportError:
        return None
    sample = memoryview(bytes(range(256)) * 9)[1:]
    copy = memoryview(bytearray(sample.nbytes))
    try:
        told = _scatter.scatter([(sample, [copy[:700], copy[700:]], 7)])
        _scatter.is_resident(copy)
        if copy == sample and told == [digest_of([sample], 7)]:
            return _scatter
    except (AttributeError, TypeError) as error:  # of another version
        log.debug("%s", error)
    log.error("store/codec/_scatter is of another version or built wrong: install again")
    return None


_built = _native()
VARIANT: str = "in turns" if _built is None else _built.VARIANT
"""How copies are made: "AVX2" or "portable" in one pass, or "in turns"."""


def is_resident(memory: memoryview) -> bool:
    """Whether reading mapped memory waits for no disk; False where that is not known."""
    return _built is not None and bool(_built.is_resident(memory))


def scatter(copies: Sequence[Copy]) -> list[int]:
    """Make copies; returns the xxh3_64 of each. Most of it runs without the interpreter's lock,
    which is let go and taken once for all of them. Raises ValueError where the buffers of one have
    room for more or fewer bytes than its source."""
    if _built is None or any(source.nbytes <= SHORT for source, _, _ in copies):
        return [in_turns(*copy) for copy in copies]
    told: list[int] = _built.scatter(copies)
    return told
