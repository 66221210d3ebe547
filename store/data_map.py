"""The data file's bytes as memory, for reading values that lie in the page cache.

LMDB has the file mapped as well, but gives no more than views that die with a transaction, and
finding a value that way touches each of its pages first. This map lives as long as any view of it.
It is never written to; LMDB writes to the file, and a map of a file shows what is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_FAILED = ctypes.c_void_p(-1).value


class DataMap:
    """`size` bytes of a file from its beginning; the file may be shorter and grow meanwhile, and
    does not shrink."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._end = 0
        self._memory = _mapped(fd, size)

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """Bytes of the file; None beyond its end, where a look would end the process."""
        stop, memory = offset + nbytes, self._memory
        if stop > self._end and stop <= memory.nbytes:
            try:
                self._end = os.fstat(self._fd).st_size
            except OSError:  # closed meanwhile
                return None
        if offset < 0 or stop > min(self._end, memory.nbytes):
            return None
        return memory[offset:stop]

    def close(self) -> None:
        """Give no more views. The map itself goes with the last one that is left."""
        self._memory = memoryview(b"")


def _mapped(fd: int, size: int) -> memoryview:
    """A map of a file as read-only bytes; no bytes where the system refuses one."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # The mmap module refuses more than the file has, and what is mapped must not move.
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _FAILED:
        return memoryview(b"")
    whole = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(whole, library.munmap, address, size).atexit = False
    return memoryview(whole).cast("B").toreadonly()
