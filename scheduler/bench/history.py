"""Results of `tandem bench`, one line a run, and what has changed since the last one here."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scheduler.record import JobError

FILE = "bench-history.jsonl"


def machine() -> str:
    """What figures may be compared within: the machine and its number of cores."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {platform.node()}"


def entry(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One run as it is written down."""
    try:
        ours = version("tandem-serve")
    except PackageNotFoundError:
        ours = "unknown"
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tandem": ours,
        "machine": machine(),
        "load": round(os.getloadavg()[0], 2),
        "results": {name: dict(result) for name, result in results.items()},
    }


def append(path: Path, run: Mapping[str, Any]) -> None:
    """Add one run to the file, for this user alone. Raises JobError where it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(fd, "a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from error


def last(path: Path) -> dict[str, dict[str, Any]]:
    """By benchmark, its last result on this machine that took its path; a damaged line is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            run = json.loads(line)
            if run["machine"] != machine():
                continue
            for name, result in run["results"].items():
                if result["ok"]:
                    found[name] = {**result, "at": run["at"]}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def changes(
    now: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """By benchmark and ratio: how much it is now of what it was, where both were measured alike."""
    found: dict[str, dict[str, float]] = {}
    for name, result in now.items():
        old = before.get(name)
        if old is None or not result["ok"] or old.get("arguments") != result.get("arguments"):
            continue
        for ratio, value in result["ratios"].items():
            was = old["ratios"].get(ratio)
            if isinstance(was, int | float) and was:
                found.setdefault(name, {})[ratio] = round(value / was, 3)
    return found
