"""What of a state lies in memory, and reading what does not, by where its values lie in the file.

Bulk values never move until they are freed, so the number of each one's first page is written down
with it. The numbers are hints: bytes are verified where they are read, so a wrong one (after a
compaction, which gives values new pages) costs a useless read.

Read through the map alone a cold state arrives fault by fault. macOS does that at about a tenth of
the disk's rate, as others report, so there threads read ahead of the map. On Linux, whose own
read-ahead works for maps, this was measured and is not faster, neither with threads nor by
posix_fadvise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import numpy as np

from store.errors import StoreError

THREADS = 4
READ_AHEAD = sys.platform == "darwin"
Span = tuple[int, int]
"""Offset in the data file, and length."""


def resident_of(fd: int, spans: Sequence[Span]) -> int:
    """Bytes of the spans that lie in the page cache, asked of the kernel without reading them.

    Raises StoreError where that cannot be asked.
    """
    size = os.fstat(fd).st_size
    inside = [(start, min(length, size - start)) for start, length in spans if start < size]
    if not inside:
        return 0
    page = mmap.PAGESIZE
    library = ctypes.CDLL(None, use_errno=True)
    total = 0
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as window:
        view = np.frombuffer(window, np.uint8)
        base = view.ctypes.data
        for start, length in inside:
            first = start - start % page
            told = np.zeros(-(-(start + length - first) // page), np.uint8)
            failed = library.mincore(
                ctypes.c_void_p(base + first),
                ctypes.c_size_t(start + length - first),
                ctypes.c_void_p(told.ctypes.data),
            )
            if failed:
                del view
                raise StoreError(f"mincore refuses: error {ctypes.get_errno()}")
            total += min(length, int(np.count_nonzero(told & 1)) * page)
        del view
    return total


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="store-cold")


def bring(fd: int, spans: Sequence[Span]) -> list[Future[None]]:
    """Have the spans read into the page cache, in their order, on threads of their own.

    The futures are done when they are there; nobody has to wait for them.
    """
    return [_pool().submit(partial(_read, fd, spans[lane::THREADS])) for lane in range(THREADS)]


def _read(fd: int, spans: Sequence[Span]) -> None:
    scratch = bytearray(max((length for _, length in spans), default=0))
    for start, length in spans:
        try:
            os.preadv(fd, [memoryview(scratch)[:length]], start)
        except (OSError, AttributeError):
            return  # what reads the map will say what is wrong
