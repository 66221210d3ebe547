"""A child ends when its parent does, and a program that knows nothing of this does too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scheduler.host import lifeline

# A signal that comes just before `signal.pause()` is told to Python when the next one ends it: who
# waits by it may wait for ever. These wait by short sleeps.
CHILD = """
import signal, sys, time
from scheduler.host import lifeline
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(lifeline.watch(), lifeline.watch(), flush=True)
while True:
    time.sleep(0.1)
"""
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGINT, lambda *_: sys.exit(4))
print("running", flush=True)
while True:
    time.sleep(0.1)
"""


def spawn(command: Sequence[str], life: int | None) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != lifeline.VARIABLE}
    if life is not None:
        environment[lifeline.VARIABLE] = str(life)
    return subprocess.Popen(
        [sys.executable, "-P", *command],
        env=environment,
        pass_fds=() if life is None else (life,),
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_end_of_the_pipe_ends_the_child() -> None:
    reading, writing = os.pipe()
    with spawn(["-c", CHILD], reading) as child:
        os.close(reading)
        assert first_line(child) == "True False"
        os.close(writing)
        assert child.wait(90) == 7


def test_without_a_parent_nothing_is_watched() -> None:
    with spawn(["-c", CHILD], None) as child:
        assert first_line(child) == "False False"
        child.terminate()
        assert child.wait(90) == 7


def test_a_parents_sudden_death(tmp_path: Path) -> None:
    """The whole way: SIGKILL to a process that holds the writing end."""
    script = (
        "import os, subprocess, sys\n"
        "r, w = os.pipe()\n"
        f"env = {{**os.environ, {lifeline.VARIABLE!r}: str(r)}}\n"
        "subprocess.Popen([sys.executable, '-P', '-c', sys.argv[1]], env=env, pass_fds=[r])\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"True False\n"
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == b""  # returns once the child has ended too


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 3), (signal.SIGINT, 4)])
def test_signals_are_passed_on_to_a_program(number: int, status: int) -> None:
    with spawn(["-m", "scheduler.host.lifeline", sys.executable, "-c", PROGRAM], None) as keeper:
        assert first_line(keeper) == "running"
        keeper.send_signal(number)
        assert keeper.wait(90) == status


def test_a_program_ends_with_the_pipe() -> None:
    reading, writing = os.pipe()
    command = ["-m", "scheduler.host.lifeline", sys.executable, "-c", PROGRAM]
    with spawn(command, reading) as keeper:
        os.close(reading)
        assert first_line(keeper) == "running"
        os.close(writing)
        assert keeper.wait(90) == 3


@pytest.mark.parametrize(
    ("script", "status"),
    [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_programs_status_is_the_keepers(script: str, status: int) -> None:
    with spawn(["-m", "scheduler.host.lifeline", sys.executable, "-c", script], None) as keeper:
        assert keeper.wait(90) == status


def test_a_program_sees_nothing_of_the_lifeline() -> None:
    reading, writing = os.pipe()
    show = f"import os; print(os.environ.get({lifeline.VARIABLE!r}), len(os.listdir('/dev/fd')))"
    with spawn(["-c", show], None) as plain:
        expected = first_line(plain)
    with spawn(["-m", "scheduler.host.lifeline", sys.executable, "-c", show], reading) as keeper:
        assert first_line(keeper) == expected
        assert keeper.wait(90) == 0
    os.close(reading)
    os.close(writing)


def test_a_signal_before_the_program_runs_reaches_it() -> None:
    """SIGTERM while the keeper is inside Popen: neither it nor the program may be left over."""
    script = (
        "import os, signal, subprocess, sys\n"
        "from scheduler.host import lifeline\n"
        "class Popen(subprocess.Popen):\n"
        "    def __init__(self, *a, **k):\n"
        "        super().__init__(*a, **k)\n"
        "        os.read(k['pass_fds'][0], 1)\n"  # the program has its handlers
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "lifeline.subprocess.Popen = Popen\n"
        "r, w = os.pipe()\n"
        "os.set_inheritable(w, True)\n"
        "program = sys.argv[1].replace('flush=True)', f'flush=True); import os; os.write({w}, b\"x\")')\n"  # noqa: E501
        "sys.exit(lifeline.main([sys.executable, '-c', program], keep=[r, w]))\n"
    )
    with spawn(["-c", script, PROGRAM], None) as keeper:
        assert keeper.wait(90) == 3


def test_who_starts_it_may_have_blocked_signals() -> None:
    """A mask is inherited, and with SIGCHLD in it nothing would tell of the program's end."""
    command = [sys.executable, "-P", "-m", "scheduler.host.lifeline", "true"]
    blocked = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        keeper = subprocess.Popen(command)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        assert keeper.wait(60) == 0
    finally:
        keeper.kill()
        keeper.wait()


def test_a_signal_that_another_thread_is_given_is_passed_on() -> None:
    """As one is that comes between two looks of the main thread: nothing interrupts its wait."""
    script = (
        "import signal, sys, threading\n"
        "from scheduler.host import lifeline\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "sys.exit(lifeline.main([sys.executable, '-c', sys.argv[1]]))\n"
    )
    open_again = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\nprint("
    with spawn(["-c", script, PROGRAM.replace("print(", open_again)], None) as keeper:
        assert first_line(keeper) == "running"
        keeper.terminate()
        assert keeper.wait(90) == 3
