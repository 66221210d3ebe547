"""Real processes that die, refuse to start, ignore signals and leave others behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_kit import eventually

from scheduler.host import supervisor as module
from scheduler.host.supervisor import CONFIGURATION, Service, StackFailed, Supervisor

# They wait by short sleeps: a signal that comes just before `signal.pause()` does not end it.
IDLE = """
import os, signal, sys, time
from scheduler.host import lifeline
lifeline.watch()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
STUBBORN = """
import os, signal, time
from scheduler.host import lifeline
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("up", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("up", child.pid, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays short enough to go through several of them."""
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.02)
    monkeypatch.setattr(module, "_LAST_DELAY", 0.08)
    monkeypatch.setattr(module, "_SAVING", 0.2)
    monkeypatch.setattr(module, "_INSISTING", 0.2)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(os.environ, drain_seconds=60.0)
    yield made
    made.stop()


def service(path: Path, script: str, name: str = "one", **more: Any) -> Service:
    command = [sys.executable, "-P", "-c", script]
    return Service(name, command, path / "logs" / f"{name}.log", delay=0.02, **more)


def numbers_of(one: Service) -> list[int]:
    """What a service has printed after "up"."""
    text = one.log_file.read_text() if one.log_file.exists() else ""
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("up ")]


def until(supervisor: Supervisor, condition: Any, what: str) -> Any:
    def look() -> Any:
        supervisor.tick(0.01)
        return condition()

    return eventually(look, what)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # an orphan may wait to be reaped by whoever adopted it
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_killed_process_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    one = supervisor.add(service(tmp_path, IDLE))
    for count in (1, 2, 3):
        until(supervisor, lambda count=count: len(numbers_of(one)) == count, "it does not come up")
        assert (one.restarts, one.pid) == (count - 1, numbers_of(one)[-1])
        os.kill(numbers_of(one)[-1], signal.SIGKILL)
    assert len(set(numbers_of(one))) == 3
    assert one.log_file.stat().st_mode & 0o077 == 0


def test_the_delay_doubles_to_its_limit_and_is_forgotten(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervisor.add(service(tmp_path, "import sys; sys.exit(1)"))
    seen = []
    for restarts in range(1, 5):
        until(supervisor, lambda n=restarts: one.restarts == n, "it is not started again")
        seen.append(one.delay)
    assert seen == [0.04, 0.08, 0.08, 0.08]
    monkeypatch.setattr(module, "_STABLE", -1.0)  # every life is a long one now
    until(supervisor, lambda: one.restarts == 5, "it is not started again")
    assert one.delay == 0.04


def test_a_process_that_cannot_run_ends_the_stack(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(service(tmp_path, IDLE))
    script = f"import sys; print('first'); print('no such model\\n'); sys.exit({CONFIGURATION})"
    bad = supervisor.add(service(tmp_path, script, "bad"))
    with pytest.raises(StackFailed, match=r"^bad cannot run: no such model$"):
        supervisor.wait_until(lambda: False, 120, "the stack")
    assert bad.restarts == 0


def test_waiting_says_what_is_wrong(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(StackFailed, match="nothing was not ready within 0 s"):
        supervisor.wait_until(lambda: False, 0.0, "nothing")
    one = supervisor.add(service(tmp_path, "print('out of luck'); raise SystemExit(1)"))
    with pytest.raises(StackFailed, match="see the logs in"):
        supervisor.wait_until(lambda: False, -1.0, "the stack")
    until(supervisor, lambda: one.restarts > 1, "it is not started again")
    until(supervisor, lambda: one.last_line() == "out of luck", "it says nothing")
    with pytest.raises(StackFailed, match=r"one keeps ending, its last line is 'out of luck'"):
        supervisor.wait_until(lambda: False, -1.0, "the stack")
    supervisor.request_stop()
    with pytest.raises(StackFailed, match="stopped before it was ready"):
        supervisor.wait_until(lambda: False, 30, "the stack")
    supervisor.run()


def test_the_last_line_of_a_long_log(tmp_path: Path) -> None:
    one = service(tmp_path, "")
    assert one.last_line() == ""
    one.log_file.parent.mkdir()
    one.log_file.write_bytes(b"x" * 10_000 + b"\xff\nlast \xe4\n\n")
    assert one.last_line() == "last �"


def test_stopping_leaves_nothing_behind(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = [
        supervisor.add(service(tmp_path, script, name))
        for name, script in (("idle", IDLE), ("stubborn", STUBBORN), ("parent", PARENT))
    ]
    until(supervisor, lambda: all(numbers_of(one) for one in services), "they do not come up")
    pids = [*(one.pid or 0 for one in services), numbers_of(services[2])[0]]
    supervisor._drain = 0.0
    waits, wait = 0, supervisor._wait

    def patiently(group: list[Service], seconds: float) -> bool:
        """Its time is over only when it has heard: a busy machine may be slow to tell it."""
        nonlocal waits
        ended, waits = wait(group, seconds), waits + 1
        if not ended and waits <= 2:
            log = services[1].log_file
            eventually(lambda: log.read_text().count("asked") == waits, "it hears nothing")
        return ended

    monkeypatch.setattr(supervisor, "_wait", patiently)
    supervisor.stop()
    assert [gone(pid) for pid in pids[:3]] == [True] * 3
    eventually(lambda: gone(pids[3]), "a grandchild is left")
    assert services[1].log_file.read_text().count("asked") == 2  # told twice, then killed
    supervisor.stop()


def test_a_dead_process_takes_its_children_along(supervisor: Supervisor, tmp_path: Path) -> None:
    parent = supervisor.add(service(tmp_path, PARENT))
    until(supervisor, lambda: numbers_of(parent), "it does not come up")
    os.kill(parent.pid or 0, signal.SIGKILL)
    until(supervisor, lambda: len(numbers_of(parent)) == 2, "it is not started again")
    eventually(lambda: gone(numbers_of(parent)[0]), "the first grandchild is left")
    assert not gone(numbers_of(parent)[1])


def test_what_stops_last_outlives_the_others(supervisor: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = (
        "import signal, sys, time\n"
        f"def end(*_):\n    open({str(order)!r}, 'a').write(sys.argv[1]); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up 1', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    last, first = service(tmp_path, script, "l", stop_last=True), service(tmp_path, script, "f")
    for one in (last, first):
        one.command.append(one.name)
        supervisor.add(one)
        until(supervisor, lambda one=one: numbers_of(one), "it does not come up")
    supervisor.stop()
    assert order.read_text() == "fl"


# --- a supervisor in a process of its own, for signals ------------------------------------------


class Remote:
    """A supervising process with the given services; it prints their pids once they are up."""

    def __init__(self, path: Path, scripts: dict[str, str], drain: float = 600.0) -> None:
        code = (
            "import json, os, sys\nfrom pathlib import Path\n"
            "from scheduler.host.supervisor import Service, Supervisor\n"
            "spec = json.loads(sys.argv[1])\n"
            "s = Supervisor(os.environ, spec['drain'])\ns.install_signals()\n"
            "for name, script in spec['scripts'].items():\n"
            "    log = Path(spec['path']) / f'{name}.log'\n"
            "    command = [sys.executable, '-P', '-c', script]\n"
            "    s.add(Service(name, command, log, stop_last=name == 'last'))\n"
            "up = lambda: all(b'up ' in x.log_file.read_bytes() for x in s.services)\n"
            "s.wait_until(up, 60, 'it')\n"
            "print(json.dumps({x.name: x.pid for x in s.services}), flush=True)\n"
            "s.run()\nprint('stopping', flush=True)\ns.stop()\n"
        )
        spec = json.dumps({"drain": drain, "path": str(path), "scripts": scripts})
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, spec], stdout=subprocess.PIPE, text=True
        )
        self.pids: dict[str, int] = json.loads(self.line())
        self.path = path

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def log(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        for pid in self.pids.values():
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_stack(tmp_path: Path, number: int) -> None:
    with Remote(tmp_path, {"a": IDLE, "last": IDLE}) as remote:
        remote.process.send_signal(number)
        assert remote.line() == "stopping\n"
        assert remote.process.wait(90) == 0
        assert all(gone(pid) for pid in remote.pids.values())


def test_a_supervisor_killed_outright_takes_its_children_along(tmp_path: Path) -> None:
    with Remote(tmp_path, {"a": IDLE, "b": IDLE}) as remote:
        remote.process.kill()
        for pid in remote.pids.values():
            eventually(lambda pid=pid: gone(pid), "a child outlives the supervisor")


def test_a_second_signal_hurries_the_first_group_only(tmp_path: Path) -> None:
    """The drain is ten minutes here; with the second signal the worker ends, then Redis."""
    worker = STUBBORN.replace(
        'lambda *_: print("asked", flush=True)',
        'lambda *_: (seen.append(1), print("asked", flush=True), len(seen) == 2 and os._exit(0))',
    ).replace("import os, signal, time", "import os, signal, time; seen = []")
    with Remote(tmp_path, {"worker": worker, "last": IDLE}) as remote:
        remote.process.send_signal(signal.SIGTERM)
        assert remote.line() == "stopping\n"
        eventually(lambda: "asked" in remote.log("worker"), "the worker is not asked")
        assert not gone(remote.pids["last"])
        remote.process.send_signal(signal.SIGTERM)
        assert remote.process.wait(90) == 0
        assert remote.log("worker").count("asked") == 2


def test_signals_are_given_back(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    supervisor = Supervisor(os.environ, 0.0)
    supervisor.install_signals()
    one = supervisor.add(service(tmp_path, IDLE))
    until(supervisor, lambda: numbers_of(one), "it does not come up")
    signal.raise_signal(signal.SIGTERM)
    assert supervisor.stopping
    supervisor.stop()
    assert not one.running
    assert [signal.getsignal(number) for number in numbers] == before


def test_stopping_from_another_thread(supervisor: Supervisor, tmp_path: Path) -> None:
    one = supervisor.add(service(tmp_path, IDLE))
    other = threading.Thread(target=supervisor.stop)
    other.start()
    other.join()
    assert not one.running


def test_a_long_log_is_turned_over_at_the_next_start(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "log_bytes", 100)
    log_file = tmp_path / "idle.log"
    log_file.write_text("x" * 101)
    supervisor.add(Service("idle", [sys.executable, "-c", IDLE], log_file))
    eventually(lambda: "up" in log_file.read_text(), "it does not start")
    assert "x" not in log_file.read_text().split("up")[0]
    assert (tmp_path / "idle.log.1").read_text() == "x" * 101


def test_a_log_line_is_told_without_its_stamp(tmp_path: Path) -> None:
    log_file = tmp_path / "x.log"
    log_file.write_text("2026-11-29 21:02:33,123 tandem.decode the model is incomplete\n")
    assert Service("x", [], log_file).last_line() == "the model is incomplete"
