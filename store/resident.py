"""What of the store's file is in memory, asked of the kernel without reading a page."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from store.errors import StoreError

_STEP = 1 << 30
Span = tuple[int, int]
"""Offset in the data file, and length."""


def resident_bytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache. Raises StoreError where that cannot be asked."""
    size = path.stat().st_size
    page = mmap.PAGESIZE
    library = ctypes.CDLL(None, use_errno=True)
    total = 0
    with path.open("rb") as file:
        for start in range(0, size, _STEP):
            length = min(_STEP, size - start)
            with mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ, offset=start) as window:
                view = np.frombuffer(window, np.uint8)
                told = np.zeros(-(-length // page), np.uint8)
                failed = library.mincore(
                    ctypes.c_void_p(view.ctypes.data),
                    ctypes.c_size_t(length),
                    ctypes.c_void_p(told.ctypes.data),
                )
                del view
            if failed:
                raise StoreError(f"mincore refuses {path}: error {ctypes.get_errno()}")
            total += int(np.count_nonzero(told & 1)) * page
    return min(total, size)


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
