"""What keeps a chaos run going: restarts of what dies, thaws of what is frozen, and the client."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from chaos_points import write_pid
from jobs_kit import HERE, Server, Worker

from scheduler.config import Config

#: The named points. RQ's "popped", "prepared" and "started" are one atomic step here: after_take.
#: "Before save" is before_commit, "around the finishing MULTI" are before_ and after_finish*.
POINTS = (
    "after_take_prefill", "mid_prefill", "prefilled", "after_handing_off", "mid_hand_off",
    "before_finish_prefill", "after_finish_prefill",
    "after_take_decode", "mid_decode", "before_commit", "before_finish", "after_finish",
)  # fmt: skip
API_POINTS = ("before_accept", "after_accept")
VICTIMS = ("prefill", "decode", "redis", "api", "supervisor")

#: Frozen for longer than a lease: what it ran is given to others while it sleeps.
FREEZE = 4.0
WORKER: dict[str, Any] = {"chunk_s": 0.01, "tail_s": 0.01, "step_s": 0.004, "lease": 3, "slots": 3,
                          "log": "CRITICAL", "parks": 2, "max_attempts": 20}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One fault: who is hit, where, and how."""

    victim: str
    point: str
    act: str
    nth: int

    def spec(self, folder: Path) -> dict[str, Any]:
        """What every process of the run is told; the one that comes to the point acts on it."""
        return {
            **WORKER,
            "point": self.point,
            "act": self.act,
            "nth": self.nth,
            "once": str(folder / "fired"),
            "victim": str(folder / f"{self.victim}.pid"),
        }


def plans() -> list[Plan]:
    """Every victim at every point, killed and frozen; in an order that mixes them, always equal."""
    found = [
        Plan(victim, point, act, 1 + (number + len(point)) % 3)
        for number, victim in enumerate(VICTIMS)
        for point in (*POINTS, *(API_POINTS if victim == "api" else ()))
        for act in ("kill", "stop")
    ]
    random.Random(7).shuffle(found)
    return found


class Keeper(threading.Thread):
    """Keeps one process: starts it anew when it has died, thaws it when it is frozen.

    `make` starts it and returns its Popen. Its process id is in `<folder>/<name>.pid`, unless it
    writes that itself.
    """

    def __init__(
        self, name: str, folder: Path, make: Callable[[], subprocess.Popen[bytes]], *, writes: bool
    ) -> None:
        super().__init__(daemon=True)
        self._make = make
        self._file = None if writes else folder / f"{name}.pid"
        self._done = threading.Event()
        self.process = self._begin()

    def run(self) -> None:
        while not self._done.wait(0.02):
            pid, status = os.waitpid(self.process.pid, os.WNOHANG | os.WUNTRACED)
            if not pid:
                continue
            if os.WIFSTOPPED(status):
                self._done.wait(FREEZE)
                os.kill(pid, signal.SIGCONT)
            else:
                self.process.returncode = -1
                self.process = self._begin()

    def close(self) -> int:
        """Stop keeping it, and stop it; its exit status."""
        self._done.set()
        self.join()
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(180)

    def _begin(self) -> subprocess.Popen[bytes]:
        process = self._make()
        if self._file is not None:
            write_pid(self._file, process.pid)
        return process


def keep_worker(role: str, url: str, folder: Path, plan: Plan) -> Keeper:
    """A fake worker that stays."""
    spec = {**plan.spec(folder), "lock_dir": str(folder)}
    return Keeper(role, folder, lambda: Worker(role, url, **spec).process, writes=False)


def keep_redis(server: Server, folder: Path) -> Keeper:
    """A Redis that stays; `server` runs already."""

    def start() -> subprocess.Popen[bytes]:
        if server.process is None or server.process.poll() is not None:
            server.start()
        process: subprocess.Popen[bytes] | None = server.process
        assert process is not None
        return process

    return Keeper("redis", folder, start, writes=False)


def keep_stack(config: Config, folder: Path, plan: Plan) -> Keeper:
    """A supervisor with everything below it, started anew when it dies."""
    spec = {
        "config": config.model_dump(mode="json"), "dir": str(folder), "worker": plan.spec(folder),
    }  # fmt: skip
    command = [sys.executable, "-P", str(HERE / "chaos_stack.py"), json.dumps(spec)]

    def start() -> subprocess.Popen[bytes]:
        with (folder / "stack.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    return Keeper("supervisor", folder, start, writes=True)


class Thaw(threading.Thread):
    """Thaws a frozen API, whose supervisor sees only that it lives.

    It does so again and again: who freezes it marks that before it does, and may be slow.
    """

    def __init__(self, pid_file: Path, fired: Path) -> None:
        super().__init__(daemon=True)
        self._pid_file, self._fired = pid_file, fired
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            if self._fired.exists():
                self.done.wait(FREEZE)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(self._pid_file.read_text()), signal.SIGCONT)


class Client:
    """A client of the API that gives up soon and asks again, as agents do."""

    def __init__(self, config: Config) -> None:
        self._http = httpx.Client(base_url=config.api_url, timeout=2.5, trust_env=False)

    def create(self, key: str, body: dict[str, Any]) -> str:
        """Submit until it is accepted; with the same key always the same job."""
        return str(self._post("/v1/responses", body, {"Idempotency-Key": key})["id"])

    def cancel(self, resp: str) -> None:
        """Cancel, and ask again until somebody answers."""
        self._post(f"/v1/responses/{resp}/cancel", {}, {})

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        deadline = time.monotonic() + 180
        while True:
            try:
                answer = self._http.post(path, json=body, headers=headers)
                if answer.status_code == 200:
                    return answer.json()
                assert answer.status_code in (429, 500, 502, 503), answer.text
                why = answer.text
            except httpx.TransportError as error:
                why = repr(error)
            assert time.monotonic() < deadline, why
            time.sleep(0.05)
