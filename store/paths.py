"""Where a stack's store and its owner's socket lie, by the same rule as the configuration's."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path


def data_dir(given: str | None = None) -> Path:
    """The data directory: as given, else TANDEM_DATA, else the platform's place for such data."""
    if chosen := given or os.environ.get("TANDEM_DATA"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "tandem"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base).absolute() / "tandem"


def store_dir(data: Path) -> Path:
    """The directory that the decode worker of this data directory owns."""
    return data / "store"


def socket_path(data: Path, node: str = "local") -> Path:
    """The socket of the store's owner on this machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    tag = hashlib.blake2b(os.fsencode(data), digest_size=4).hexdigest()
    return Path(base) / f"tandem-{os.getuid()}-{tag}" / f"store-{node}.sock"
