"""One end of a link in a network namespace of its own, driven by lines on stdin."""

from __future__ import annotations

import sys

from link_parts import SECRET, MemorySink, contents, deliver, make_state

from store.codec.header import Piece
from transport.errors import LinkError
from transport.receiver import Receiver
from transport.sender import Sender

STATE = make_state([1000] + [200_000] * 10 + [1_500_000], seed=77)


def say(text: str) -> None:
    print(text, flush=True)


class Reporting(MemorySink):
    """Says what became of a transfer."""

    def piece(self, transfer: str, piece: Piece) -> None:
        super().piece(transfer, piece)
        if len(self.pieces[transfer]) == 1:
            say("moving")

    def done(self, transfer: str) -> None:
        super().done(transfer)
        whole = contents(self.finished[transfer]) == contents(STATE)
        say("whole" if whole else "damaged")

    def abort(self, transfer: str, reason: str) -> None:
        super().abort(transfer, reason)
        say("aborted")


def receive(host: str, deadline: float) -> None:
    receiver = Receiver(host, 0, SECRET, Reporting(), deadline)
    say(str(receiver.address[1]))
    sys.stdin.readline()
    receiver.close()


def send(host: str, deadline: float, port: int) -> None:
    for line in sys.stdin:
        try:
            sender = Sender.connect((host, port), SECRET, deadline)
        except LinkError as error:
            say(f"no link: {error.code}")
            continue
        try:
            report = deliver(sender, "t-1", STATE, attempt=int(line))
            say(f"delivered {report.bytes}")
        except LinkError as error:
            say(f"failed: {error.code}")
        finally:
            sender.close()


if __name__ == "__main__":
    role, host, deadline, *rest = sys.argv[1:]
    if role == "receive":
        receive(host, float(deadline))
    else:
        send(host, float(deadline), int(rest[0]))
