"""Reports of the nightly check of the store: one JSON file a night, the latest kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from scheduler.passwords import write_private

_PREFIX = "store-check-"


def directory(data: Path) -> Path:
    """Where they lie."""
    return data / "reports"


def newest(data: Path) -> dict[str, Any] | None:
    """The latest report, or None."""
    for path in sorted(directory(data).glob(f"{_PREFIX}*.json"), reverse=True):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def keep(data: Path, report: dict[str, Any], count: int, now: float | None = None) -> Path:
    """Write a report with its time (`at`), and remove all but the `count` latest."""
    at = time.time() if now is None else now
    directory(data).mkdir(mode=0o700, parents=True, exist_ok=True)
    name = time.strftime(f"{_PREFIX}%Y-%m-%d-%H%M%S.json", time.localtime(at))
    path = directory(data) / name
    write_private(path, json.dumps({**report, "at": at}))
    for old in sorted(directory(data).glob(f"{_PREFIX}*.json"))[:-count]:
        old.unlink(missing_ok=True)
    return path
