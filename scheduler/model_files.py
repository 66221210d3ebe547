"""Make sure the model's files are on this machine, through the engine, in a process of its own.

The control plane never imports MLX or the engine; the engine's library reports its progress as
JSON lines on standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scheduler.config import Config, ConfigError

Progress = Callable[[str, int, int], None]


def ensure(config: Config, progress: Progress) -> Config:
    """Find, fetch or convert the model; return the configuration with its directory.

    `progress(stage, done, total)` is called while that takes time; `total` is 0 where unknown.
    Raises ConfigError with the engine's one line when the model cannot be had.
    """
    if config.model_dir is not None:
        return config
    command = [sys.executable, "-P", "-m", "engine.fetch", config.model]
    command += ["--models-dir", str(config.models_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    outcome: dict[str, str] = {}
    try:
        for line in process.stdout:
            report = json.loads(line)
            if "stage" in report:
                progress(report["stage"], report["done"], report["total"])
            else:
                outcome = report
        errors = process.stderr.read()
    finally:
        process.terminate()
        process.wait()
    if "path" not in outcome:
        last = errors.strip().splitlines()[-1] if errors.strip() else "no reason given"
        raise ConfigError(outcome.get("error") or f"model {config.model} could not be had: {last}")
    return config.model_copy(update={"model_dir": Path(outcome["path"])})
