"""Exports and imports that pass through the store's RPC piece by piece, for other machines.

A bundle is written to a file of this machine first, so that reading it holds up nobody; few are
there at once, and one that nobody has read from for long is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import StoreError

if TYPE_CHECKING:
    from store.store import Store

MAX_OPEN = 4
KEEP_SECONDS = 600.0
MAX_READ = 8 << 20
"""Bytes of one answer."""


class _Bundles:
    """Bundles under way, by name: a number that their way gives a sense, and when they were last
    used."""

    def __init__(self, store: Store, directory: Path) -> None:
        """Removes what an earlier process left in `directory`, which is made when needed."""
        self._store = store
        self._directory = directory
        self._lock = threading.Lock()
        self._open: dict[str, tuple[int, float]] = {}
        with contextlib.suppress(OSError):
            for path in directory.iterdir():
                path.unlink(missing_ok=True)


class Outlet(_Bundles):
    """Bundles on their way out, each an open file. Thread-safe."""

    def open(self, ident: str) -> dict[str, Any]:
        """Write a bundle of conversation `ident`: {"name", "bytes"}. Raises StoreError."""
        name = secrets.token_hex(8)
        with self._lock:
            self._sweep()
            if len(self._open) >= MAX_OPEN:
                raise StoreError(f"{MAX_OPEN} conversations are being exported: try again later")
            self._open[name] = (-1, time.monotonic())
        path = self._directory / name
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._store.export_conversation(ident, path)
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.close(name)
            raise StoreError(f"the export cannot be written: {error.strerror}") from error
        except BaseException:
            self.close(name)
            raise
        path.unlink(missing_ok=True)  # it is gone with this process, whatever happens
        with self._lock:
            self._open[name] = (fd, time.monotonic())
        return {"name": name, "bytes": os.fstat(fd).st_size}

    def read(self, name: str, offset: int) -> bytes:
        """Up to MAX_READ bytes of a bundle; none at its end. Raises StoreError."""
        with self._lock:
            fd, _ = self._open.get(name, (-1, 0.0))
            if fd < 0:
                raise StoreError("this export is not open any more: begin it again")
            self._open[name] = (fd, time.monotonic())
            return os.pread(fd, MAX_READ, offset)

    def close(self, name: str) -> None:
        """Forget a bundle; harmless where it is gone."""
        with self._lock:
            fd, _ = self._open.pop(name, (-1, 0.0))
        if fd >= 0:
            os.close(fd)

    def close_all(self) -> None:
        """Forget all of them."""
        for name in list(self._open):
            self.close(name)

    def _sweep(self) -> None:
        limit = time.monotonic() - KEEP_SECONDS
        for name, (fd, used) in list(self._open.items()):
            if fd >= 0 and used < limit:
                del self._open[name]
                os.close(fd)


class Inlet(_Bundles):
    """Bundles on their way in, one file each, imported once they are whole. Thread-safe."""

    def open(self, nbytes: int) -> str:
        """Begin a bundle of so many bytes; its name. Raises StoreError where it does not fit."""
        with self._lock:
            limit = time.monotonic() - KEEP_SECONDS
            for name in [name for name, (_, used) in self._open.items() if used < limit]:
                self._drop(name)
            if len(self._open) >= MAX_OPEN:
                raise StoreError(f"{MAX_OPEN} conversations are being imported: try again later")
            name = secrets.token_hex(8)
            try:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                reserve = self._store.environment.reserve_bytes
                if not 0 < nbytes <= shutil.disk_usage(self._directory).free - reserve:
                    raise StoreError(f"there is no room on this disk for {nbytes} bytes")
                os.close(os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except OSError as error:
                raise StoreError(f"the import cannot be written: {error.strerror}") from error
            self._open[name] = (nbytes, time.monotonic())
            return name

    def write(self, name: str, data: bytes) -> None:
        """The next bytes of a bundle. Raises StoreError."""
        with self._lock:
            left, _ = self._open.get(name, (-1, 0.0))
            if not 0 < len(data) <= left:
                raise StoreError("this import is not open, or longer than was said")
            try:
                with self._path(name).open("ab") as file:
                    file.write(data)
            except OSError as error:
                raise StoreError(f"the import cannot be written: {error.strerror}") from error
            self._open[name] = (left - len(data), time.monotonic())

    def end(self, name: str) -> dict[str, Any]:
        """Store a bundle that is whole: as `Store.import_conversation`. Raises StoreError."""
        with self._lock:
            if self._open.get(name, (-1, 0.0))[0] != 0:
                raise StoreError("this import is not open, or shorter than was said")
        return self._store.import_conversation(self._path(name))

    def close(self, name: str) -> None:
        """Forget a bundle; harmless where it is gone."""
        with self._lock:
            self._drop(name)

    def _path(self, name: str) -> Path:
        return self._directory / name

    def _drop(self, name: str) -> None:
        if self._open.pop(name, None) is not None:
            self._path(name).unlink(missing_ok=True)
