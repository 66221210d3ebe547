"""Logs that do not grow for ever, while the processes that write them keep them open.

The writers append to a descriptor that they were given. So a full log is copied and then cut, as
logrotate's copytruncate does; what is written between the two is lost, a line at most.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 16 << 20
KEPT = 3


def turn_over(path: Path, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> bool:
    """Move a log of over `max_bytes` bytes to PATH.1, earlier ones to .2 and so on.

    At most `kept` earlier logs remain. Returns whether it was turned over; a disk that is full
    only drops the copy.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except OSError:
        return False
    for number in range(kept, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(_earlier(path, number - 1), _earlier(path, number))
    copy = _earlier(path, 1)
    try:
        descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with path.open("rb") as source, os.fdopen(descriptor, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError:
        copy.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
    return True


def _earlier(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log; none where there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max(400 * lines, 4 << 20)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def follow(paths: list[Path], wait: float = 0.5) -> Iterator[tuple[Path, str]]:
    """Lines as they are appended to any of the logs, for ever; a log that was cut begins anew."""
    offsets = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    while True:
        for path in paths:
            try:
                size = path.stat().st_size
                if size < offsets[path]:
                    offsets[path] = 0
                if size == offsets[path]:
                    continue
                with path.open("rb") as file:
                    file.seek(offsets[path])
                    block = file.read(1 << 20)
            except OSError:
                continue
            whole = block[: block.rfind(b"\n") + 1] or block
            offsets[path] += len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                yield path, line
        time.sleep(wait)
