"""Make sure the model's files are on this machine, through the engine, in a process of its own.

The control plane never imports MLX or the engine; the engine's library reports its progress as
JSON lines on standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.config import DEFAULT_MODEL, Config, ConfigError, find_model

Progress = Callable[[str, int, int], None]


def is_fetchable(name: str) -> bool:
    """Whether a model of this name may come from elsewhere: the small default, or a hub name."""
    return name == DEFAULT_MODEL or ("/" in name and not name.startswith(("/", ".", "~")))


def unknown(config: Config) -> str:
    """Why a model that is not on this machine cannot be fetched either; empty where it may be."""
    name = config.model
    if find_model(config) is not None or is_fetchable(name):
        return ""
    if name.startswith(("/", "~", ".")):
        return f"there is no directory {name}"
    return (
        f"model {name!r} is neither {DEFAULT_MODEL!r}, a directory in {config.models_dir} nor an "
        "owner/name on the hub"
    )


def ensure(config: Config, progress: Progress) -> Config:
    """Find, fetch or convert the model; return the configuration with its directory.

    `progress(stage, done, total)` is called while that takes time; `total` is 0 where unknown.
    Raises ConfigError with the engine's one line when the model cannot be had.
    """
    if config.model_dir is not None:
        return config
    command = [sys.executable, "-P", "-m", "engine.fetch", config.model]
    command += ["--models-dir", str(config.models_dir)]
    outcome: dict[str, str] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # Not a pipe: nobody reads it meanwhile, and a downloader's bars would fill one.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                report = _report(line)
                if "stage" in report:
                    progress(report["stage"], report["done"], report["total"])
                elif report:
                    outcome = report
            process.wait()
        finally:
            process.terminate()  # it removes what is half made
            process.wait()
            process.stdout.close()
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    if "path" not in outcome:
        last = lines[-1] if lines else f"engine.fetch ended with status {process.returncode}"
        raise ConfigError(outcome.get("error") or f"model {config.model} could not be had: {last}")
    return config.model_copy(update={"model_dir": Path(outcome["path"])})


def _report(line: str) -> dict[str, Any]:
    """One line of the engine's output; empty where a library printed something of its own."""
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
