"""A receiver or a sender in a process of its own, driven by lines on stdin.

Each role reports a line when it reaches a stage and waits there, so that a test can kill or
freeze it exactly then.
"""

from __future__ import annotations

import sys

from link_parts import FINGERPRINT, SECRET, MemorySink, make_state

from transport import receiver as receiving_end
from transport.receiver import Receiver
from transport.sender import Sender
from transport.sink import Grant, Refusal

receiving_end.HANDSHAKE_SECONDS = 60.0  # a machine that stalls is no fault of who shakes hands
SIZES = [300_000] * 6 + [500_000]


def say(text: str) -> None:
    print(text, flush=True)


def pause(stage: str, wanted: str) -> None:
    """Report the stage and wait for a line, if it is the wanted one."""
    if stage == wanted:
        say(stage)
        sys.stdin.readline()


class PausingSink(MemorySink):
    """Stops at one stage of a transfer."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def admit(self, offer: object) -> Grant | Refusal:
        pause("offer", self.stage)
        return super().admit(offer)  # type: ignore[arg-type]

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        pause("ready", self.stage)
        return super().buffer(transfer, nbytes)

    def piece(self, transfer: str, piece: object) -> None:
        if len(self.pieces[transfer]) == 3:
            pause("mid", self.stage)
        super().piece(transfer, piece)  # type: ignore[arg-type]

    def done(self, transfer: str) -> None:
        pause("ack", self.stage)
        super().done(transfer)


def receive(stage: str, deadline: float) -> None:
    receiver = Receiver("127.0.0.1", 0, SECRET, PausingSink(stage), deadline)
    say(str(receiver.address[1]))
    for line in sys.stdin:
        if line.strip() == "quit":
            break
    receiver.close()


def send(stage: str, deadline: float, port: int) -> None:
    sender = Sender.connect(("127.0.0.1", port), SECRET, deadline, node="peer")
    pause("idle", stage)
    state = make_state(SIZES)
    transfer = sender.offer(
        "t-peer", fingerprint=FINGERPRINT, tokens=96, nbytes=sum(SIZES), attempt=1
    )
    pause("ready", stage)
    transfer.send(state[:3])
    pause("mid", stage)
    transfer.send(state[3:-1])
    transfer.finish(state[-1])
    say("done")
    pause("after", stage)
    sender.close()


if __name__ == "__main__":
    role, stage, deadline, *rest = sys.argv[1:]
    if role == "receive":
        receive(stage, float(deadline))
    else:
        send(stage, float(deadline), int(rest[0]))
