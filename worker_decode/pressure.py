"""What this machine is short of: memory, asked of the system, and disk, as the store finds it.

Short of memory, idle conversations move to the store at once. Short of disk, states are no longer
saved, and of an answer whose record cannot be written no turn remains; it is given all the same.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store.errors import StoreFull

log = logging.getLogger("tandem.decode")

#: Levels of macOS: 1 normal, 2 warning, 4 critical.
MAC_LEVEL = b"kern.memorystatus_vm_pressure_level"
CRITICAL = 4
#: Share of Linux' memory that is still available when it is called short.
LEAST_SHARE = 0.03


class Hardship:
    """What the node goes without now; as text it is "" or one line for its operator."""

    def __init__(self) -> None:
        self.pressed: Callable[[], bool] = pressed
        self.squeezed = False
        self._full = ""

    def __str__(self) -> str:
        short = "short of memory: idle conversations move to the store at once"
        return "; ".join(part for part in (self._full, short * self.squeezed) if part)

    def feel(self) -> None:
        """Ask the system about memory."""
        squeezed, self.squeezed = self.squeezed, self.pressed()
        if self.squeezed and not squeezed:
            log.warning("%s", self)

    def note(self, error: Exception | None) -> None:
        """A state or a record was not written; only for want of room is it a hardship."""
        if isinstance(error, StoreFull):
            self._full = f"not saved: {error}"

    def over(self) -> None:
        """Something was written again."""
        self._full = ""


def pressed() -> bool:
    """True where memory is critically short; False too where the system does not say."""
    if sys.platform == "darwin":
        return _mac_level() >= CRITICAL
    try:
        return linux_pressed(Path("/proc/meminfo").read_text())
    except OSError:
        return False


def linux_pressed(meminfo: str) -> bool:
    """The same from the text of /proc/meminfo."""
    found: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0])
    total = found.get("MemTotal", 0)
    return bool(total) and found.get("MemAvailable", total) < LEAST_SHARE * total


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("c"))


def _mac_level() -> int:
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    failed = _library().sysctlbyname(MAC_LEVEL, ctypes.byref(level), ctypes.byref(size), None, 0)
    return 0 if failed else level.value
