"""One supervisor for the processes of a stack: it starts them, restarts what dies, stops them all.

A process that dies is started again after a delay that doubles from half a second to thirty, and
is forgotten once the process has run for a minute. A process that cannot start for a reason that
a restart does not cure says so by its exit status (`CONFIGURATION`), which ends the whole stack.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from scheduler.host import lifeline, logs

log = logging.getLogger("tandem.supervisor")

CONFIGURATION = 78
"""Exit status (EX_CONFIG of sysexits.h) of a process that a restart would not help."""
# When and who, before what a worker's log line says.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [\w.]+ ")
#: Seconds between two looks at the sizes of logs.
_LOOK_AT_LOGS = 60.0
_FIRST_DELAY, _LAST_DELAY, _STABLE = 0.5, 30.0, 60.0
#: Seconds after the drain for a worker to write the states that only its memory holds.
_SAVING = 70.0
#: Seconds to end in for a process that was told twice.
_INSISTING = 10.0
#: Seconds for the system to end what was killed; on a busy machine that is not at once.
_DYING = 60.0


class StackFailed(Exception):
    """A process of the stack cannot run; the message says which and quotes its last line."""


@dataclass
class Service:
    """One supervised process."""

    name: str
    command: list[str]
    log_file: Path
    stop_last: bool = False
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    delay: float = _FIRST_DELAY
    next_start: float = 0.0
    restarts: int = 0
    group: int | None = None
    """Process group of the newest process; those that it started are members too."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.running else None

    def last_line(self) -> str:
        """The last line the process wrote, for an error message."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return _STAMP.sub("", lines[-1].strip()) if lines else ""


class Supervisor:
    """Runs services until told to stop. Not thread-safe: one thread drives it."""

    def __init__(self, environment: Mapping[str, str], drain_seconds: float) -> None:
        self.services: list[Service] = []
        self.environment = dict(environment)
        self._drain = drain_seconds
        self.log_bytes, self.log_files = logs.MAX_BYTES, logs.KEPT
        self.own_log: Path | None = None
        self._logs_seen = float("-inf")
        self.duties: list[Callable[[], None]] = []
        """Called in every tick of `run`; each must return at once."""
        self._stopping = False
        self._hurried = False
        self._closed = False
        self._handlers: dict[int, Any] = {}
        self._life_read, self._life_write = os.pipe()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    def add(self, service: Service) -> Service:
        """Start `service` now and keep it running from now on."""
        self.services.append(service)
        self._start(service)
        return service

    def find(self, name: str) -> Service:
        return next(service for service in self.services if service.name == name)

    def install_signals(self) -> None:
        """SIGTERM, SIGINT and SIGHUP stop the stack; a second one stops it without draining.

        Main thread only. `stop` puts the handlers back that were there before.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._on_signal)
        # A child's death wakes the loop at once instead of at the next tick.
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def request_stop(self) -> None:
        self._stopping = True

    def wait_until(self, ready: Callable[[], bool], deadline: float, what: str) -> None:
        """Supervise until `ready()`; raise StackFailed after `deadline` seconds or on a stop."""
        end = time.monotonic() + deadline
        while not ready():
            if self._stopping:
                raise StackFailed("stopped before it was ready")
            if time.monotonic() > end:
                raise StackFailed(f"{what} was not ready within {deadline:.0f} s: {self._hint()}")
            self.tick(0.1)

    def run(self) -> None:
        """Supervise until a stop is requested."""
        while not self._stopping:
            for duty in self.duties:
                duty()
            self._look_at_logs()
            self.tick(1.0)

    def _look_at_logs(self) -> None:
        if time.monotonic() - self._logs_seen < _LOOK_AT_LOGS:
            return
        self._logs_seen = time.monotonic()
        for path in (*(service.log_file for service in self.services), self.own_log):
            if path is not None:
                logs.turn_over(path, self.log_bytes, self.log_files)

    def tick(self, timeout: float) -> None:
        """Restart what died and is due, then wait for a signal or at most `timeout` seconds."""
        now = time.monotonic()
        for service in self.services:
            if service.running or self._stopping:
                continue
            if service.process is not None:
                self._note_death(service, now)
            if now >= service.next_start:
                service.restarts += 1
                self._start(service)
        self._sleep(timeout)

    def restart(self, environment: Mapping[str, str]) -> None:
        """Stop all but what stops last, drained, and start it anew in another environment."""
        self.environment = dict(environment)
        group = [service for service in self.services if not service.stop_last]
        self._end(group)
        for service in group:
            if not self._stopping:
                service.process, service.delay, service.restarts = None, _FIRST_DELAY, 0
                self._start(service)

    def _end(self, group: list[Service]) -> None:
        """Stop processes: drain, then insist, then kill."""
        self._signal(group, signal.SIGTERM)
        if not self._wait(group, self._drain + _SAVING):
            self._signal(group, signal.SIGTERM)
            if not self._wait(group, _INSISTING):
                self._signal(group, signal.SIGKILL)
                self._wait(group, _DYING)

    def stop(self) -> None:
        """Stop everything and leave nothing behind: drain, then insist, then kill. Idempotent."""
        self._stopping = True
        if self._closed:
            return
        self._closed = True
        first = [service for service in self.services if not service.stop_last]
        last = [service for service in self.services if service.stop_last]
        for group in (first, last):
            self._end(group)
        for descriptor in (self._life_read, self._life_write):
            os.close(descriptor)
        if self._handlers:
            if threading.current_thread() is not threading.main_thread():
                return  # signals still write to the socket
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._wake_read.close()
        self._wake_write.close()

    def _start(self, service: Service) -> None:
        service.log_file.parent.mkdir(parents=True, exist_ok=True)
        logs.turn_over(service.log_file, self.log_bytes, self.log_files)
        log_fd = os.open(service.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            service.process = subprocess.Popen(
                service.command,
                env={**self.environment, lifeline.VARIABLE: str(self._life_read)},
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(self._life_read,),
                start_new_session=True,  # Ctrl-C reaches the supervisor, which then drains
            )
        finally:
            os.close(log_fd)
        service.group = service.process.pid
        service.started = time.monotonic()
        log.info("started %s as process %d", service.name, service.process.pid)

    def _note_death(self, service: Service, now: float) -> None:
        assert service.process is not None
        status = service.process.wait()
        service.process = None
        _clear(service)
        if status == CONFIGURATION:
            raise StackFailed(f"{service.name} cannot run: {service.last_line()}")
        if now - service.started > _STABLE:
            service.delay = _FIRST_DELAY
        service.next_start = now + service.delay
        log.warning(
            "%s ended with status %d; starting it again in %.1f s (its log: %s)",
            service.name, status, service.delay, service.log_file,
        )  # fmt: skip
        service.delay = min(_LAST_DELAY, service.delay * 2)

    def _hint(self) -> str:
        for service in self.services:
            if service.restarts:
                return f"{service.name} keeps ending, its last line is {service.last_line()!r}"
        return "see the logs in " + str(self.services[0].log_file.parent if self.services else "")

    def _signal(self, services: list[Service], number: int) -> None:
        for service in services:
            if service.process and service.running:
                service.process.send_signal(number)

    def _wait(self, services: list[Service], seconds: float) -> bool:
        """Whether all have ended within `seconds`, or soon after a second signal."""
        end = time.monotonic() + seconds
        while [service for service in services if _alive(service)]:
            if self._hurried:
                end = min(end, time.monotonic() + _INSISTING)
                self._hurried = False
            if time.monotonic() > end:
                return False
            self._sleep(0.1)
        return True

    def _sleep(self, timeout: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            if selector.select(timeout):
                try:
                    while self._wake_read.recv(64):
                        pass
                except BlockingIOError:
                    pass

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._stopping:
            self._drain, self._hurried = 0.0, True
            # Redis stays: the workers hand their jobs back to it.
            hurried = [service for service in self.services if not service.stop_last]
            self._signal(hurried, signal.SIGTERM)
        self._stopping = True


def _alive(service: Service) -> bool:
    alive = service.running
    if not alive:
        _clear(service)  # at once: its number may soon be another's
    return alive


def _clear(service: Service) -> None:
    """Kill what an ended process has left: a Redis whose keeper was killed, for instance."""
    if service.group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(service.group, signal.SIGKILL)
        service.group = None
