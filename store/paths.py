"""Where a stack's store, its owner's socket and models lie: the rule for all rooms."""

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


def models_dir() -> Path:
    """Where fetched and converted models lie, shared by all stacks of a user.

    TANDEM_MODELS, else the platform's place. On a Mac not that for caches, which the system may
    clear when the disk is full, under a server that reads them; models that an earlier version has
    put there are used where they lie, as long as there is nothing in the new place.
    """
    if chosen := os.environ.get("TANDEM_MODELS"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        library = Path.home() / "Library"
        place = library / "Application Support" / "tandem" / "models"
        old = library / "Caches" / "tandem" / "models"
        return old if not _filled(place) and _filled(old) else place
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "tandem" / "models"


def _filled(path: Path) -> bool:
    """Whether models lie in a directory."""
    try:
        return any((entry / "config.json").is_file() for entry in path.iterdir())
    except OSError:
        return False


def store_dir(data: Path) -> Path:
    """The directory that the decode worker of this data directory owns."""
    return data / "store"


def runtime_dir(data: Path) -> Path:
    """Directory of a stack's sockets, the same however a process of this user was started.

    Short, because macOS allows 104 bytes for a socket's path. Not in macOS' directory for temporary
    files: that is another one for a daemon of launchd than for a terminal, and what nobody has read
    for three days is deleted from it, also under a server that listens there.
    """
    tag = hashlib.blake2b(os.fsencode(data), digest_size=4).hexdigest()
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not base and sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "tandem" / "run" / tag
    return Path(base or tempfile.gettempdir()) / f"tandem-{os.getuid()}-{tag}"


def socket_path(data: Path, node: str = "local") -> Path:
    """The socket of the store's owner on this machine."""
    return runtime_dir(data) / f"store-{node}.sock"
