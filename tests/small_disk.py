"""A real disk that is small enough to fill: a tmpfs, where this process may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A directory on a disk of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Write until nothing more fits."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def free(self) -> None:
        """Give the space back."""
        self._ballast.unlink()


@contextmanager
def small_disk(megabytes: int) -> Iterator[Disk]:
    """A disk of so many megabytes; skips the test where none can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk needs Linux and root")
    path = Path(tempfile.mkdtemp(prefix="t-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        path.rmdir()
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
        path.rmdir()
