"""The data directory and the runtime directory: private, and owned by one stack at a time."""

from __future__ import annotations

import argparse
import fcntl
import os
import stat
from pathlib import Path
from typing import Self

from scheduler.config import Config, ConfigError

#: Longest path of a socket in bytes; macOS allows 104, its end included.
MAX_SOCKET = 100


class Claim:
    """An exclusive claim on a data directory, released when the process ends.

    Raises ConfigError when the directory cannot be written or another Tandem runs on it.
    """

    def __init__(self, path: Path) -> None:
        make_usable(path)
        self.path = path / "tandem.lock"
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            self.release()
            raise ConfigError(_in_use(path, owner)) from None
        except OSError as error:
            self.release()
            raise ConfigError(_unusable(path, error)) from None

    def release(self) -> None:
        """Give the directory up. Harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def owner(path: Path) -> int | None:
    """Process id of the Tandem that runs on a data directory, or None where none does."""
    try:
        descriptor = os.open(path / "tandem.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        found = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return int(found) if found.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def check_free(path: Path) -> None:
    """Raise ConfigError where another Tandem runs on a data directory; nothing is made there."""
    if (process := owner(path)) is not None:
        raise ConfigError(_in_use(path, str(process)))


def prepare(config: Config) -> None:
    """Create the directories that every process of a stack needs, for this user only.

    Raises ConfigError naming the directory, the cause and the cure.
    """
    for socket in (config.redis_socket, config.store_socket):
        if len(os.fsencode(socket)) > MAX_SOCKET:
            raise ConfigError(
                f"runtime directory {config.runtime_dir} is too long for a socket "
                f"({MAX_SOCKET} bytes at most with {socket.name}): set XDG_RUNTIME_DIR "
                "to a shorter directory"
            )
    make_usable(config.data_dir)
    make_private(config.data_dir / "logs")
    if config.runtime_dir.is_symlink():  # made by somebody else, in a directory all may write to
        raise ConfigError(f"{config.runtime_dir} is a symbolic link: remove it")
    make_private(config.runtime_dir)


def make_usable(path: Path) -> None:
    """Create `path` with mode 0700; one that exists must be this user's and writable.

    Its mode is left alone: it may hold other things. Raises ConfigError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(_unusable(path, error)) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{path} is not a directory of this user: remove it or choose another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"directory {path} is not writable: change its mode or choose another")


def make_private(path: Path) -> None:
    """The same for a directory that is Tandem's alone: others lose access to it."""
    make_usable(path)
    try:
        if stat.S_IMODE(path.stat().st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigError(_unusable(path, error)) from None


def _in_use(path: Path, process: str) -> str:
    return (
        f"data directory {path} is in use by another Tandem (process {process or '?'}): "
        "stop it, or choose another directory with --data"
    )


def _unusable(path: Path, error: OSError) -> str:
    return (
        f"directory {path} cannot be used: {error.strerror or error}: "
        "make it writable, or choose another with --data"
    )


def directory(text: str) -> Path:
    """A directory named on the command line; an empty name would mean the current one.

    Raises argparse.ArgumentTypeError.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name is no directory")
    return Path(text)
