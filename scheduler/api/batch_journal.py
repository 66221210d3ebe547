"""What has become of each line of a batch: appended to one file as it is known.

The journal is what makes a batch survive the death of every process: a line that stands in it has
its answer and is never run again. It becomes the output and error files when all lines stand in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Journal:
    """The journal of one batch; one process writes it (see the driver's lock)."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that was cut short by a crash is dropped."""
        self._where: dict[int, tuple[int, int, bool]] = {}
        self.completed = self.failed = 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        self._end = 0
        for raw in self._file:
            try:
                if not raw.endswith(b"\n"):
                    break
                entry = json.loads(raw)
                self._enter(int(entry["n"]), bool(entry["ok"]), len(raw))
            except (ValueError, KeyError, TypeError):
                break
        self._file.truncate(self._end)

    def __contains__(self, number: int) -> bool:
        return number in self._where

    def __len__(self) -> int:
        return len(self._where)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, number: int, ok: bool, line: dict[str, Any]) -> None:
        """Enter the answer to a line: `ok` for the output file, else for the error file."""
        entry = {"n": number, "ok": ok, "line": line}
        raw = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._file.seek(self._end)
        self._file.write(raw)
        self._file.flush()
        self._enter(number, ok, len(raw))

    def answers(self, ok: bool) -> Iterator[dict[str, Any]]:
        """Lines of the output file, or of the error file, in the order of the input."""
        for number in sorted(self._where):
            start, length, good = self._where[number]
            if good == ok:
                self._file.seek(start)
                line: dict[str, Any] = json.loads(self._file.read(length))["line"]
                yield line

    def _enter(self, number: int, ok: bool, length: int) -> None:
        if number not in self._where:
            self.completed += ok
            self.failed += not ok
            self._where[number] = (self._end, length, ok)
        self._end += length
