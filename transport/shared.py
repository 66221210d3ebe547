"""Memory that a worker and its child share: anonymous, so that nothing can be left behind.

It has no name: the descriptor is inherited by the child, and the kernel frees the pages when the
last process that holds it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import secrets
import sys


class SharedMemory:
    """`nbytes` of shared memory; `fd` may be passed to a child, which calls `attach`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """New memory of zeros."""
        fd = _anonymous()
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> SharedMemory:
        """The parent's memory, in the child."""
        return cls(fd, nbytes)

    def close(self) -> None:
        """Give the memory up; it goes when the last slice of `view` does."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


def _anonymous() -> int:
    if sys.platform == "linux":
        return os.memfd_create("tandem-link", os.MFD_CLOEXEC)
    # What multiprocessing.shared_memory uses, without its tracker; a name has at most 31 bytes.
    posix = importlib.import_module("_posixshmem")
    name = f"/tandem-{secrets.token_hex(8)}"
    fd = int(posix.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    posix.shm_unlink(name)
    return fd
