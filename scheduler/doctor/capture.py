"""Output of the system's own commands, each with a deadline; None where a command is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SECONDS = 20.0
MAX_TEXT = 4 << 20

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "sw_vers": ("sw_vers",),
    "sysctl": ("sysctl", "hw.memsize", "machdep.cpu.brand_string", "iogpu.wired_limit_mb"),
    "pmset": ("pmset", "-g"),
    "filevault": ("fdesetup", "status"),
    "rdma_ctl": ("rdma_ctl", "status"),
    "ibv_devinfo": ("ibv_devinfo",),
    "thunderbolt": ("system_profiler", "SPThunderboltDataType", "-json"),
    "ports": ("networksetup", "-listallhardwareports"),
    "ifconfig": ("ifconfig",),
}
"""What is asked on a Mac, by the name of its sample. Every one is answered without privileges."""


@dataclass(frozen=True)
class Output:
    """What a command printed (both streams) and its exit status."""

    text: str
    status: int = 0

    @property
    def last(self) -> str:
        """The last line, for evidence."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1][:160] if lines else "no output"


Samples = Mapping[str, Output | None]


def run(command: tuple[str, ...]) -> Output | None:
    """Run one command; None where it does not exist or does not end in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = (done.stdout[:MAX_TEXT] + done.stderr[:MAX_TEXT]).decode("utf-8", "replace")
    return Output(text, done.returncode)


def samples(ask: Callable[[tuple[str, ...]], Output | None] = run) -> dict[str, Output | None]:
    """All samples of a Mac; empty elsewhere."""
    if sys.platform != "darwin":
        return {}
    return {name: ask(command) for name, command in COMMANDS.items()}
