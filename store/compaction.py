"""Giving disk space back: LMDB's file never shrinks, so it is copied without its free pages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from store.environment import Environment
from store.errors import StoreError


def compact(path: Path) -> tuple[int, int]:
    """Rewrite the store in `path` without free pages; returns its size in bytes before and after.

    The store must not be open anywhere: raises StoreError if it is, or if the disk has no room
    for the copy. The old file is replaced only when the copy is complete and on disk.
    """
    environment = Environment.open(path, 0, create=False)
    data = path / "data.mdb"
    fresh = path / "compact.part"
    try:
        with environment.read() as txn:
            need = environment.live_pages(txn) * environment.page_size
        before = data.stat().st_size
        if need + (64 << 20) > shutil.disk_usage(path).free:
            raise StoreError(f"the copy needs {need >> 20} MiB free on the disk of {path}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        environment.env.copy(str(fresh), compact=True)
        (fresh / "data.mdb").chmod(0o600)
        after = (fresh / "data.mdb").stat().st_size
        with (fresh / "data.mdb").open("rb+") as file:
            os.fsync(file.fileno())
        environment.close(keep_lock=True)
        (fresh / "data.mdb").replace(data)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    finally:
        environment.close()
        shutil.rmtree(fresh, ignore_errors=True)
    return before, after
