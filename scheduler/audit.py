"""Who did what: one JSON object a line in `logs/audit.log`, for submissions and everything undone.

A line says when, by whom (owner and address), what (`action`), on what (`id`), and how it ended
where that is not plain. It never holds what was said. The file is for its user alone and is turned
over by size; earlier ones are `audit.log.1` (the newest) to `audit.log.9`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger("tandem.audit")

Action = Literal[
    "submit",
    "resume",
    "cancel",
    "delete",
    "upload",
    "batch",
    "dashboard",
    "owner",
    "refused",
    "import",
    "export",
    "fork",
]
MAX_BYTES = 16 << 20
KEPT = 9


class Audit:
    """Appends to one file. Thread-safe; a line is written whole or not at all."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max = max_bytes
        self._lock = threading.Lock()
        self._file = -1

    @classmethod
    def of(cls, data_dir: Path) -> Audit:
        """The audit log of a data directory."""
        return cls(data_dir / "logs" / "audit.log")

    def note(self, action: Action, ident: str, *, owner: str, address: str, **more: Any) -> None:
        """Add one line. `ident`: what was acted on. A log that cannot be written is reported."""
        line: dict[str, Any] = {"at": round(time.time(), 3), "action": action, "id": ident[:200]}
        line |= {"owner": owner, "from": address, **more}
        data = json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._write(data)
        except OSError as error:
            log.error("the audit log cannot be written (%s): %s", error.strerror, data.decode())

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        with self._lock:
            self._drop()

    def _write(self, data: bytes) -> None:
        if self._file >= 0 and os.fstat(self._file).st_size + len(data) > self._max:
            self._turn_over()
        if self._file < 0:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
        os.write(self._file, data)

    def _turn_over(self) -> None:
        self._drop()
        for number in range(KEPT - 1, -1, -1):
            old = self.path.with_name(f"{self.path.name}.{number}") if number else self.path
            if old.exists():
                os.replace(old, self.path.with_name(f"{self.path.name}.{number + 1}"))

    def _drop(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
