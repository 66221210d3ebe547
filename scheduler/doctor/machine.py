"""Checks of the machine under any system: memory, the model's fit, disk, limits, secrets."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scheduler.config import Config, ConfigError
from scheduler.doctor.finding import Check, fail, ok, skip, warn
from scheduler.passwords import Passwords

SURVEY_SECONDS = 120.0
#: Share of the working set that weights may take: the rest is for state and activations.
COMFORTABLE, POSSIBLE = 0.85, 1.0
#: Open files that a stack may need: clients, streams, connections to Redis, the link.
FILES = 1024


def survey(model: Path | None) -> dict[str, Any]:
    """What the engine says of this device and the model's files; `error` where it cannot."""
    command = [sys.executable, "-P", "-m", "engine.survey"]
    command += ["--model", str(model)] if model else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SURVEY_SECONDS, check=False
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": f"the engine could not be asked ({type(error).__name__})"}
    return found if isinstance(found, dict) else {"error": "the engine gave no answer"}


def memory(found: dict[str, Any], on_mac: bool = sys.platform == "darwin") -> Check:
    """`memory`: Metal or CPU, the memory, the recommended working set."""
    name = "memory"
    if "error" in found:
        return fail(
            name,
            "MLX does not work here",
            str(found["error"]),
            "install again: pip install -c constraints.txt -e .",
        )
    device = found["device"]
    evidence = (
        f"{device['name']}: memory {device['memory_bytes'] / 1e9:.0f} GB, working set "
        f"{device['working_set_bytes'] / 1e9:.0f} GB, mlx {device['mlx']}"
    )
    if device["kind"] != "metal":
        if on_mac:
            return fail(
                name,
                "there is no Metal",
                evidence,
                "use a Mac with Apple silicon, and a Python for arm64",
            )
        return ok(name, "MLX runs on the CPU, for development", evidence)
    return ok(name, f"{device['memory_bytes'] / 1e9:.0f} GB of unified memory", evidence)


def absent(name_of: str, unknown: str, alone: bool) -> Check:
    """`model`: its files are not here. `unknown`: why they cannot be fetched, "" where they may."""
    name = "model"
    if not unknown:
        return warn(
            name,
            f"the files of {name_of} are not here yet",
            "no directory of that name",
            f"they are fetched at the first start, or: tandem model push {name_of}",
        )
    if alone:
        return fail(
            name,
            f"there is no model {name_of} here, and none to be fetched",
            unknown,
            "correct its name (`tandem init --force --model NAME`), or name its directory with "
            "--model DIR",
        )
    return warn(
        name,
        f"the files of {name_of} are not here, and cannot be fetched",
        unknown,
        f"run `tandem model push {name_of}` on the machine that has them; or correct the name, or "
        "name their directory: `tandem init --force --model DIR`",
    )


def model(found: dict[str, Any], directory: Path, prefill_only: bool) -> Check:
    """`model`: whether its files are whole and its weights fit this machine."""
    name = "model"
    if "error" in found:
        return skip(name, "the engine could not be asked", str(found["error"]))
    if not found.get("whole"):
        return fail(
            name,
            "its files are not whole",
            str(found.get("problem")),
            "run `tandem model verify`, and push or fetch it again",
        )
    weights, working = found["weights"], found["device"]["working_set_bytes"]
    share = weights / working
    evidence = (
        f"{directory.name}: {weights / 1e9:.1f} GB of weights, working set {working / 1e9:.1f} GB "
        f"({share:.0%})"
    )
    if share > POSSIBLE:
        if prefill_only:
            return fail(
                name,
                "it does not fit the prefill machine: decode only is the plan",
                evidence,
                "leave this machine out: `roles = []` on the other makes it prefill too, at its "
                "own speed; or choose a more quantised model",
            )
        return fail(
            name,
            "it does not fit this machine",
            evidence,
            "choose a smaller or more quantised model",
        )
    if share > COMFORTABLE:
        return warn(
            name,
            "it fits, with little room for conversations",
            evidence,
            "choose a more quantised model, or a lower store.hot_gb",
        )
    return ok(name, "it fits", evidence)


def disk(path: Path, size_gb: float, low_gb: float, used: int = 0) -> Check:
    """`store disk`: room for the store's cap; `used` bytes of it exist already."""
    name = "store disk"
    at = path
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    evidence = f"{free / 1e9:.1f} GB free, the store holds {used / 1e9:.1f} of {size_gb:g} GB"
    if free < low_gb * 1e9:
        return fail(
            name,
            "the disk is nearly full: states are no longer saved",
            evidence,
            "free some space, or move data_dir; conversations go on, and are recomputed when they "
            "have left memory",
        )
    if free + used < size_gb * 1e9:
        return warn(
            name,
            "the disk cannot hold the store's cap",
            evidence,
            f"set store.size_gb to at most {(free + used) * 0.9 / 1e9:.0f}",
        )
    return ok(name, f"{free / 1e9:.0f} GB free", evidence)


def limits(files: int | None = None) -> Check:
    """`ulimits`: open files. Tandem raises its own soft limit up to the hard one."""
    name = "ulimits"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reach = files if files is not None else (1 << 20 if hard == resource.RLIM_INFINITY else hard)
    evidence = f"open files: soft {soft}, hard {reach}"
    if reach < FILES:
        return warn(
            name,
            f"at most {reach} open files",
            evidence,
            "run `launchctl limit maxfiles 65536 200000` on a Mac, or set LimitNOFILE",
        )
    return ok(name, f"up to {reach} open files", evidence)


def secrets(config: Config) -> Check:
    """`secrets`: whether the password file is there and private."""
    name = "secrets"
    path = config.redis.password_file
    if path is None:
        return skip(name, "no redis.password_file: Redis is this machine's own")
    try:
        found = Passwords.read(path)
    except ConfigError as error:
        return fail(name, "the password file cannot be used", str(error), "run `tandem init`")
    users = ", ".join(found.users) or "one password"
    return ok(name, "passwords are in a private file", f"{path}: mode 0600, {users}")
