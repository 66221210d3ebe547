"""One end of a link in a network namespace of its own, driven by lines on stdin."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from link_parts import FINGERPRINT, SECRET, MemorySink, contents, deliver, make_state

from store.codec.header import Piece
from transport.desk import Desk
from transport.errors import LinkError
from transport.protocol import Ask
from transport.receiver import Receiver
from transport.sender import Sender
from transport.sink import Loan

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


class Lender:
    """Lends the one state there is."""

    @contextmanager
    def lend(self, ask: Ask) -> Iterator[Loan]:
        nbytes = sum(len(piece.payload) for piece in STATE)
        yield Loan(96, nbytes, 16, iter(STATE))


def receive(host: str, deadline: float) -> None:
    receiver = Receiver(host, 0, SECRET, Reporting(), deadline, lender=Lender())
    say(str(receiver.address[1]))
    sys.stdin.readline()
    receiver.close()


def ask(sender: Sender, name: str, sink: Reporting) -> None:
    """Borrow the state; the sink says what becomes of it."""
    over = threading.Event()
    done, abort = sink.done, sink.abort
    sink.done = lambda transfer: (done(transfer), over.set())[0]  # type: ignore[method-assign]
    sink.abort = lambda *why: (abort(*why), over.set())[0]  # type: ignore[method-assign]
    sender.ask(
        name, turn="turn", response="r", fingerprint=FINGERPRINT, tokens=96,
        refused=lambda error: (say(f"refused: {error.code}"), over.set())[0],
    )  # fmt: skip
    over.wait(60)


def send(host: str, deadline: float, port: int) -> None:
    for line in sys.stdin:
        sink = Reporting()
        try:
            sender = Sender.connect((host, port), SECRET, deadline, desk=Desk(sink, deadline))
        except LinkError as error:
            say(f"no link: {error.code}")
            continue
        if line.startswith("ask"):
            ask(sender, line.strip().replace(" ", "-"), sink)
            sender.close()
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
