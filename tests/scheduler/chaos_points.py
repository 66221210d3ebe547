"""Named points at which a process of the tests is killed, frozen or held, once in a run.

`point` is where, `nth` at which visit, `act` "kill", "stop" or "hold". The victim is the process
itself, or the one whose process id stands in the file `victim`. `once` names a file that marks the
fault as done, so that whoever is started anew does not repeat it. A process that is held says so by
the file `hold`.there, and goes on once there is a file `hold`.go; its other threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The test has ended long before.
HOLD_SECONDS = 300.0


class Points:
    """The points of one process. Thread-safe."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._visits = 0
        self._lock = threading.Lock()

    def at(self, point: str) -> None:
        """Passing a named point: the fault happens here if it was planned so."""
        spec = self._spec
        if spec.get("point") != point:
            return
        with self._lock:
            self._visits += 1
            if self._visits != spec.get("nth", 1) or not self._first():
                return
        if spec.get("act") == "hold":
            _wait(spec["hold"])
            return
        victim = os.getpid()
        if spec.get("victim"):
            victim = int(Path(spec["victim"]).read_text())
        kill = spec.get("act", "kill") == "kill"
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL if kill else signal.SIGSTOP)
        if victim == os.getpid():
            # The signal is for the process: this thread may run on before it takes effect.
            time.sleep(0.5)

    def _first(self) -> bool:
        once = self._spec.get("once")
        if not once:
            return True
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True


def _wait(hold: str) -> None:
    Path(f"{hold}.there").touch()
    end = time.monotonic() + HOLD_SECONDS
    while not Path(f"{hold}.go").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody lets go of {hold}")
        time.sleep(0.01)


def write_pid(path: Path, pid: int) -> None:
    """Say who is to be hit, or another number that a process reads. Atomic."""
    new = path.with_suffix(".new")
    new.write_text(str(pid))
    new.replace(path)
