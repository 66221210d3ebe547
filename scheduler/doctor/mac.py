"""Checks of macOS itself, each a pure function of what a command printed."""

from __future__ import annotations

import re
from pathlib import Path

from scheduler.doctor.capture import Output
from scheduler.doctor.finding import Check, fail, ok, skip, warn

#: RDMA over Thunderbolt needs at least this macOS; frames larger than 4 KiB need 26.3.
LEAST = (26, 2)
BETTER = (26, 3)


def product(sample: Output | None) -> tuple[str, str] | None:
    """Version and build of `sw_vers`, or None where it did not say."""
    if sample is None:
        return None
    version = re.search(r"ProductVersion:\s*([\d.]+)", sample.text)
    build = re.search(r"BuildVersion:\s*(\w+)", sample.text)
    return (version[1], build[1]) if version and build else None


def operating_system(sample: Output | None) -> Check:
    """`os`: the build; both machines need the same one for RDMA."""
    name = "os"
    found = product(sample)
    if found is None:
        evidence = "sw_vers is missing" if sample is None else sample.last
        return warn(name, "the version of macOS could not be read", evidence, "run sw_vers")
    version, build = found
    number = tuple(int(part) for part in version.split(".")[:2])
    evidence = f"sw_vers: {version} ({build})"
    if number < LEAST:
        return warn(
            name,
            f"macOS {version} has no RDMA over Thunderbolt; the link speaks TCP",
            evidence,
            "update both machines to the same macOS, 26.3 or newer",
        )
    if number < BETTER:
        return warn(
            name,
            f"macOS {version} cuts RDMA transfers into frames of 4 KiB",
            evidence,
            "update both machines to the same macOS, 26.3 or newer",
        )
    return ok(name, f"macOS {version}", evidence)


def number_of(sample: Output | None, key: str) -> int | None:
    """An integer of `sysctl`'s output, or None."""
    found = re.search(rf"^{re.escape(key)}:\s*(\d+)\s*$", sample.text, re.M) if sample else None
    return int(found[1]) if found else None


def wired_limit(sample: Output | None, weights: int) -> Check:
    """`wired limit`: whether the GPU may keep a model of `weights` bytes resident."""
    name = "wired limit"
    memory = number_of(sample, "hw.memsize")
    limit = number_of(sample, "iogpu.wired_limit_mb")
    if memory is None or limit is None:
        evidence = "sysctl is missing" if sample is None else sample.last
        return warn(
            name,
            "the wired limit could not be read",
            evidence,
            "run `sysctl hw.memsize iogpu.wired_limit_mb`",
        )
    evidence = f"iogpu.wired_limit_mb {limit}, hw.memsize {memory / 1e9:.0f} GB"
    if limit == 0:
        return ok(name, "the system's own limit", evidence)
    if limit * (1 << 20) < weights:
        return fail(
            name,
            f"{limit / 1024:.0f} GiB are fewer than the model's {weights / 1e9:.0f} GB",
            evidence,
            "run `sudo sysctl iogpu.wired_limit_mb=0` (it lasts until the next boot)",
        )
    if limit * (1 << 20) > memory - (8 << 30):
        return warn(
            name,
            "it leaves the system less than 8 GiB",
            evidence,
            f"run `sudo sysctl iogpu.wired_limit_mb={(memory - (16 << 30)) >> 20}`",
        )
    return ok(name, f"raised to {limit / 1024:.0f} GiB", evidence)


def sleep(sample: Output | None) -> Check:
    """`sleep`: a machine that serves must not fall asleep, and must come back after a power cut."""
    name = "sleep"
    cure = "run `sudo pmset -a sleep 0 disksleep 0 powernap 0 autorestart 1`"
    if sample is None:
        return warn(name, "the sleep settings could not be read", "pmset is missing", cure)
    found = dict(re.findall(r"^\s*([A-Za-z]\w*)\s+(\d+)", sample.text, re.M))
    if "sleep" not in found:
        return warn(name, "the sleep settings could not be read", sample.last, cure)
    evidence = "pmset: " + ", ".join(
        f"{key} {found[key]}" for key in ("sleep", "disksleep", "autorestart") if key in found
    )
    if found["sleep"] != "0" and found.get("SleepDisabled") != "1":
        return fail(name, f"the machine sleeps after {found['sleep']} min", evidence, cure)
    wrong = [key for key in ("disksleep", "powernap") if found.get(key, "0") != "0"]
    if wrong:
        return warn(name, f"{' and '.join(wrong)} is on", evidence, cure)
    if found.get("autorestart") == "0":
        return warn(name, "after a power cut the machine stays off", evidence, cure)
    return ok(name, "it does not sleep", evidence)


def autostart(sample: Output | None, service: Path | None, *, daemon: bool, alone: bool) -> Check:
    """`autostart`: when the service begins, and whether it may reach the other machine then.

    `service` is its file, `sample` what `fdesetup status` printed, `alone` whether this machine
    does everything.
    """
    name = "autostart"
    if service is None:
        return skip(name, "no service is installed: `tandem service install`")
    evidence = str(service)
    if not daemon and not alone:
        return warn(
            name,
            "macOS lets an agent reach the other machine only once that was allowed at the screen",
            evidence,
            "run `tandem service uninstall`, then `tandem service install --system`; or allow "
            "Python in System Settings, Privacy & Security, Local Network",
        )
    when = "at every boot" if daemon else "when its user logs in"
    if sample is not None and "FileVault is On" in sample.text:
        return ok(name, f"{when}, after the disk is unlocked (FileVault)", evidence)
    return ok(name, when, evidence)
