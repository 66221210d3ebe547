"""A child ends when its parent does, however the parent ends.

The supervisor keeps the writing end of a pipe; each child inherits the reading end, whose number
is in ``TANDEM_LIFELINE``. When the supervisor is gone, even by SIGKILL, the pipe reports its end
and the child stops as if it had been sent SIGTERM. (Linux could ask the kernel for this; macOS
has no such call.)

``python -m scheduler.host.lifeline COMMAND...`` runs a program that knows nothing of this, our
Redis for one, and stops it in the same way.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

VARIABLE = "TANDEM_LIFELINE"


def watch(on_end: Callable[[], None] | None = None) -> bool:
    """Call `on_end` (default: SIGTERM to this process) when the parent is gone.

    Returns False, and watches nothing, in a process that was not started by a supervisor.
    """
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return False
    descriptor = int(number)
    os.set_inheritable(descriptor, False)

    def wait() -> None:
        while os.read(descriptor, 64):
            pass
        (on_end or (lambda: os.kill(os.getpid(), signal.SIGTERM)))()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    return True


def main(
    command: list[str], keep: Sequence[int] = (), linger: Callable[[], None] = lambda: None
) -> int:
    """Run `command`, forward SIGTERM and SIGINT to it, and end with its status.

    `keep` are descriptors that the command inherits. When the parent is gone, the command is
    stopped as soon as `linger` returns. A status above 128 names the signal that ended it, as in
    a shell.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: FrameType | None = None) -> None:
        if child is None:
            early.append(number)  # between the two lines below
        else:
            child.send_signal(number)

    def end() -> None:
        linger()
        os.kill(os.getpid(), signal.SIGTERM)  # only the main thread asks for the child's state

    woken, wake = socket.socketpair()
    wake.setblocking(False)
    with woken, wake:
        # A wait for the child itself ends only by a signal that comes while this very thread is
        # inside it; these bytes are there whenever and wherever one came.
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGINT, forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Whoever started us may have blocked them, and a block is inherited.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
        environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
        child = subprocess.Popen(command, pass_fds=keep, env=environment)
        for number in early:
            child.send_signal(number)
        watch(end)
        while (status := child.poll()) is None:
            woken.recv(64)
        signal.set_wakeup_fd(-1)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
