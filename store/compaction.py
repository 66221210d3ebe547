"""Giving disk space back: LMDB's file never shrinks, so it is copied without its free pages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from store.environment import Environment
from store.errors import StoreFull


def copy(environment: Environment, folder: Path) -> int:
    """Copy an open environment without its free pages into `folder`; returns the bytes.

    The copy is of one moment and on disk when this returns. Raises StoreFull where the disk has
    no room for it.
    """
    with environment.read() as txn:
        need = environment.live_pages(txn) * environment.page_size
    if need + (64 << 20) > shutil.disk_usage(folder).free:
        raise StoreFull(f"the copy needs {need >> 20} MiB free on the disk of {folder}")
    environment.env.copy(str(folder), compact=True)
    data = folder / "data.mdb"
    data.chmod(0o600)
    with data.open("rb+") as file:
        os.fsync(file.fileno())
    return data.stat().st_size


def compact(path: Path) -> tuple[int, int]:
    """Rewrite the store in `path` without free pages; returns its size in bytes before and after.

    The store must not be open anywhere: raises StoreError if it is, or if the disk has no room
    for the copy. The old file is replaced only when the copy is complete and on disk.
    """
    environment = Environment.open(path, 0, create=False)
    data = path / "data.mdb"
    fresh = path / "compact.part"
    try:
        before = data.stat().st_size
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        after = copy(environment, fresh)
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
