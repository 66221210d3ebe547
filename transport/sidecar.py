"""A worker's handle on the child process of one rdma link and one epoch.

The child can be stuck in a way that no exception ends, so every wait here has a deadline after
which the child is killed, and there is no way back: the link forms anew with a new child.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transport.batch import SLOT, SLOTS
from transport.errors import LinkError
from transport.shared import SharedMemory

Fabric = Literal["ring", "jaccl"]
COMMAND = (sys.executable, "-P", "-m", "transport.child")
FORM_SECONDS = 15.0
PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class Plan:
    """How the two children of one epoch find each other."""

    fabric: Fabric
    rank: int
    epoch: int
    nonce: bytes
    hosts: tuple[str, str] = ("", "")
    """ring: "address:port" of rank 0 and rank 1."""
    devices: str = ""
    """jaccl: path of the cable map (JSON matrix of device names)."""
    redis_url: str = ""
    """jaccl: where the ranks meet."""
    link: str = ""
    command: Sequence[str] = field(default=COMMAND)


class Sidecar:
    """One child process and the memory shared with it."""

    def __init__(self, plan: Plan, form_seconds: float = FORM_SECONDS) -> None:
        self.plan = plan
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._dead: str | None = None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._memory = SharedMemory.create(SLOT * SLOTS)
        hosts = _hosts(plan.hosts) if plan.fabric == "ring" else None
        try:
            self._process = subprocess.Popen(
                [*plan.command, f"rank{plan.rank}", plan.link],  # told for whoever lists processes
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(self._memory.fd, *([] if hosts is None else [hosts])),
                env=_environment(plan, hosts),
                cwd=Path(__file__).parents[1],
                start_new_session=True,  # a terminal's interrupt is the worker's to handle
            )
        finally:
            if hosts is not None:
                os.close(hosts)
        self._reader = threading.Thread(target=self._read, name="link-child", daemon=True)
        self._reader.start()
        self._form_seconds = form_seconds
        try:
            self._tell(
                {
                    "fd": self._memory.fd,
                    "rank": plan.rank,
                    "epoch": plan.epoch,
                    "nonce": plan.nonce.hex(),
                    "fabric": plan.fabric,
                    "deadline": form_seconds,
                    "redis_url": plan.redis_url,
                    "link": plan.link,
                }
            )
        except LinkError:  # it has ended already, and nobody gets what is held for it
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def slot(self, index: int) -> memoryview:
        """One slot of the shared memory; release it (`with`) after use."""
        return self._memory.view[index * SLOT : (index + 1) * SLOT]

    def wait_up(self) -> None:
        """Until the group stands and has tested itself; raises LinkError."""
        event = self.event(self._form_seconds + 2)
        if event.get("event") != "up":
            raise self._broken(f"the child said {event} where it should be up")

    def send(self, slot: int, nbytes: int, sequence: int) -> None:
        """Let the child send what is in a slot."""
        self._tell({"op": "send", "slot": slot, "nbytes": nbytes, "sequence": sequence})

    def receive(self, slot: int) -> None:
        """Let the child wait for one batch and put it into a slot."""
        self._tell({"op": "recv", "slot": slot})

    def event(self, seconds: float) -> dict[str, Any]:
        """The child's next event; on silence the child is killed. Raises LinkError."""
        event = self.poll(seconds)
        if event is None:
            raise self._broken(f"no progress for {seconds:g} s; peer frozen or cut off")
        return event

    def poll(self, seconds: float) -> dict[str, Any] | None:
        """The child's next event or None; raises LinkError if the child failed or has ended."""
        try:
            event = self._events.get(timeout=seconds) if seconds else self._events.get_nowait()
        except queue.Empty:
            return None
        if event is None:
            raise self._broken("the child process of the link has ended")
        if event.get("event") == "error":
            raise self._broken(str(event.get("reason")))
        return event

    def kill(self) -> None:
        """End the child at once; safe from any thread, any number of times."""
        with self._lock:
            if self._dead is None:
                self._dead = "the link was closed"
        with contextlib.suppress(OSError):
            self._process.kill()
        self._events.put(None)

    def close(self) -> None:
        """Kill the child and release all that was held for it; only by the sidecar's user."""
        self.kill()
        self._process.wait(10)
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._memory.close()

    def _broken(self, reason: str) -> LinkError:
        with self._lock:
            if self._dead is None:
                self._dead = reason
            reason = self._dead
        self.kill()
        return LinkError(f"rdma link: {reason}")

    def _tell(self, command: Mapping[str, object]) -> None:
        # Commands are far smaller than a pipe, so this never blocks on a frozen child.
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        except (OSError, ValueError):  # ValueError: the pipe was closed here, as the link ended
            raise self._broken("the child process of the link has ended") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while line := self._process.stdout.readline(4096):
                self._events.put(json.loads(line))
        self._events.put(None)


def free_port(host: str) -> int:
    """A port that was free a moment ago: mx.distributed takes only numbers, never sockets.

    From below those that systems hand out by themselves (Linux from 32768, macOS from 49152), so
    that no connection made meanwhile gets it. Raises LinkError if none is free.
    """
    for _ in range(100):
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise LinkError(f"no port between {PORTS[0]} and {PORTS[-1]} is free on {host}", "failed")


def ring_address(host: str, other: str = "") -> str:
    """The "host:port" of a rank of a ring, and not that of the `other` rank: on one machine two
    draws may be the same one. Raises LinkError as `free_port` does."""
    while (own := f"{host}:{free_port(host)}") == other:
        pass
    return own


def _hosts(hosts: tuple[str, str]) -> int:
    """What the ring reads where the ranks are from: a pipe, which is gone with its last reader."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        json.dump([[host] for host in hosts], file)  # a few bytes, which the pipe holds
    return reading


def _environment(plan: Plan, hosts: int | None) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MLX_", "JACCL_"))  # a stray setting would differ between hosts
    }
    kept["MLX_RANK"] = str(plan.rank)
    if hosts is not None:
        kept["MLX_HOSTFILE"] = f"/dev/fd/{hosts}"
    else:
        kept["MLX_IBV_DEVICES"] = plan.devices
    return kept
