"""The data directory and the runtime directory: private, and owned by one stack at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Self

from scheduler.config import Config, ConfigError


class Claim:
    """An exclusive claim on a data directory, released when the process ends.

    Raises ConfigError when the directory cannot be written or another Tandem runs on it.
    """

    def __init__(self, path: Path) -> None:
        make_private(path)
        self.path = path / "tandem.lock"
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(_unwritable(path, error)) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise ConfigError(
                f"data directory {path} is in use by another Tandem (process {owner or '?'}): "
                "stop it, or choose another directory with --data"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Give the directory up. Harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def prepare(config: Config) -> None:
    """Create the directories a stack needs, for this user only.

    Raises ConfigError naming the directory and the cause.
    """
    for path in (config.data_dir, config.data_dir / "logs", config.runtime_dir):
        make_private(path)
    if len(os.fsencode(config.redis_socket)) > 100:
        raise ConfigError(
            f"runtime directory {config.runtime_dir} is too long for a socket (100 bytes at most): "
            "set XDG_RUNTIME_DIR to a shorter directory"
        )


def make_private(path: Path) -> None:
    """Create `path` with mode 0700, or check that it belongs to this user and can be written."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(_unwritable(path, error)) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{path} is not a directory of this user: remove it or choose another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"directory {path} is not writable: change its mode or choose another")


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"directory {path} cannot be used: {error.strerror or error}: "
        "make it writable, or choose another with --data"
    )
