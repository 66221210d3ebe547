"""One end of a link in a network namespace of its own, driven by lines on stdin.

`hold`: what comes in is not taken beyond its first piece until `go`, and "held" is said. `go`: it
is, and a sender that is silent for `deadline` seconds is given up from now on. To a sender a number
is an attempt to deliver, and after `ask` to borrow. With `hasty` before it the receiver has only
`deadline` seconds once the link is formed, with `cut` for that as well.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from link_parts import FINGERPRINT, LONG, SECRET, MemorySink, contents, deliver, make_state

from store.codec.header import Piece
from transport import receiver as receiving_end
from transport.desk import Desk
from transport.errors import LinkError
from transport.protocol import Ask
from transport.receiver import Receiver
from transport.sender import Sender
from transport.sink import Loan

receiving_end.HANDSHAKE_SECONDS = LONG  # a machine that stalls is no fault of who shakes hands
STATE = make_state([1000] + [200_000] * 10 + [1_500_000], seed=77)
going = threading.Event()
going.set()
orders: queue.Queue[str] = queue.Queue()
hasten: list[Receiver] = []


def say(text: str) -> None:
    print(text, flush=True)


class Reporting(MemorySink):
    """Says what became of a transfer."""

    def piece(self, transfer: str, piece: Piece) -> None:
        super().piece(transfer, piece)
        if len(self.pieces[transfer]) == 1:
            say("moving")
            going.wait(60)

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


def listen(deadline: float) -> None:
    """Obey `hold` and `go` at once; the other lines wait their turn."""
    for line in sys.stdin:
        if line == "hold\n":
            going.clear()
            say("held")
        elif line == "go\n":
            for receiver in hasten:
                for session in list(receiver._sessions.values()):
                    session.deadline = deadline
            going.set()
        else:
            orders.put(line)


def receive(host: str) -> None:
    receiver = Receiver(host, 0, SECRET, Reporting(), LONG, lender=Lender())
    hasten.append(receiver)
    say(str(receiver.address[1]))
    orders.get()
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
    while True:
        line = orders.get()
        sink = Reporting()
        forming = deadline if line.startswith("cut ") else LONG
        using = deadline if line.startswith("hasty ") else LONG
        line = line.removeprefix("hasty ").removeprefix("cut ")
        try:
            sender = Sender.connect((host, port), SECRET, forming, desk=Desk(sink, LONG))
        except LinkError as error:
            say(f"no link: {error.code}")
            continue
        sender.deadline = using
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
    threading.Thread(target=listen, args=(float(deadline),), daemon=True).start()
    if role == "receive":
        receive(host)
    else:
        send(host, float(deadline), int(rest[0]))
