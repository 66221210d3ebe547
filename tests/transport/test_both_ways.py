"""States that are asked for cross the same link the other way, over streams and over batches."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis
from fault_cells import children
from link_parts import (
    FINGERPRINT,
    LONG,
    SECRET,
    MemorySink,
    contents,
    deliver,
    link_threads,
    make_state,
    open_files,
    receiving,
)
from link_redis import client, redis_socket
from link_rogues import RogueReceiver, RogueSender

from store.codec.header import Piece
from transport import rdma
from transport.desk import Desk
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.exchange import Exchange
from transport.incoming import Incoming
from transport.protocol import Ack, Ask, Nack, Offer, Ready, Turn, Want
from transport.sender import Sender
from transport.sink import Loan

__all__ = ["client", "redis_socket"]

DEADLINE = 5.0
"""For who is found out by it, from then on; until then, and between sound ends, it is LONG."""
HERE = Path(__file__).parent
STATE = make_state([1_000_000] * 20 + [20_000_000], seed=11)
BACK = make_state([700_000] * 30 + [18_000_000], seed=12)


class Shelf:
    """A lender that has some states."""

    def __init__(self, states: dict[str, list[Piece]]) -> None:
        self.states = states
        self.lent = 0
        self.between: Callable[[int], None] = lambda index: None

    def lend(self, ask: Ask) -> AbstractContextManager[Loan]:
        return self._lend(ask)

    @contextmanager
    def _lend(self, ask: Ask) -> Iterator[Loan]:
        state = self.states.get(ask.turn)
        if state is None:
            raise LinkError(f"no state after {ask.turn}", "missing")
        self.lent += 1
        try:
            nbytes = sum(len(piece.payload) for piece in state)
            yield Loan(state[-1].header.stop, nbytes, 16, self._pieces(state))
        finally:
            self.lent -= 1

    def _pieces(self, state: list[Piece]) -> Iterator[Piece]:
        for index, piece in enumerate(state):
            self.between(index)
            yield piece


class StruckSink(MemorySink):
    """Does something when the third piece has come."""

    struck: Callable[[], None] | None = None

    def piece(self, transfer: str, piece: Piece) -> None:
        super().piece(transfer, piece)
        if self.struck is not None and len(self.pieces[transfer]) == 3:
            self.struck()


class Borrower:
    """The other end: a sink for what comes back, and who was refused."""

    def __init__(self) -> None:
        self.sink = StruckSink()
        self.desk = Desk(self.sink, LONG)
        self.refused: dict[str, LinkError] = {}
        self.changed = threading.Condition()

    def ask(self, sender: Sender, turn: str, name: str) -> None:
        sender.ask(
            name, turn=turn, response="r", fingerprint=FINGERPRINT, tokens=16,
            refused=lambda error: self._refuse(name, error),
        )  # fmt: skip

    def _refuse(self, name: str, error: LinkError) -> None:
        with self.changed:
            self.refused[name] = error
            self.changed.notify_all()

    def wait_refused(self, name: str) -> LinkError:
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.refused, 60)
        return self.refused[name]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    files = open_files()
    yield
    assert link_threads() == []
    assert open_files() <= files


@contextmanager
def both_ends(
    way: str, client: redis.Redis, shelf: Shelf, borrower: Borrower
) -> Iterator[tuple[MemorySink, Sender]]:
    """A receiver that lends and a sender that asks, over tcp or over a ring of children."""
    sink = MemorySink()
    if way == "tcp":
        with receiving(sink, lender=shelf) as receiver:
            sender = Sender.connect(receiver.address, SECRET, LONG, desk=borrower.desk)
            try:
                yield sink, sender
            finally:
                sender.close()
        return
    one, other = Epochs(client, "prefill-1"), Epochs(client, "decode-1")
    mesh = f"{tempfile.gettempdir()}/tandem-mesh-{secrets.token_hex(6)}"
    command = (sys.executable, "-P", str(HERE / "fault_child.py"), "none", mesh)
    ring = (*command[:-1], "") if way == "ring" else command
    one.start()
    other.start()
    try:
        with receiving(sink, lender=shelf, epochs=other, command=ring) as receiver:
            sender = rdma.connect(
                receiver.address, SECRET, one, LONG,
                fabric="ring", command=ring, desk=borrower.desk,
            )  # fmt: skip
            try:
                yield sink, sender
            finally:
                sender.close()
    finally:
        one.stop()
        other.stop()
        client.connection_pool.disconnect()


@pytest.mark.parametrize(
    "way",
    ["tcp", pytest.param("ring", marks=pytest.mark.rotate(2)), "jaccl"],
)
def test_states_cross_both_ways_at_once(way: str, client: redis.Redis) -> None:
    client.connection_pool.disconnect()
    shelf, borrower = Shelf({"turn-1": BACK, "small": make_state([0])}), Borrower()
    with both_ends(way, client, shelf, borrower) as (sink, sender):
        for number in range(2):
            borrower.ask(sender, "turn-1", f"l-{number}")
            report = deliver(sender, f"t-{number}", STATE)
            assert report.path == ("tcp" if way == "tcp" else "rdma")
        borrower.ask(sender, "small", "l-2")
        for name in ("l-0", "l-1", "l-2"):
            borrower.sink.wait_for("done", name)
        assert sender.control_bytes < 64 << 10  # of all five together
    assert [contents(sink.finished[f"t-{n}"]) for n in range(2)] == [contents(STATE)] * 2
    assert [contents(borrower.sink.finished[f"l-{n}"]) for n in range(2)] == [contents(BACK)] * 2
    assert shelf.lent == sink.held == borrower.sink.held == 0
    assert not borrower.refused


def test_several_nodes_lend_to_several_and_one_that_dies_hurts_no_other() -> None:
    shelves = [Shelf({"turn-1": make_state([500_000] * 6, seed)}) for seed in (21, 22)]
    borrowers = Borrower(), Borrower()
    gate = threading.Event()
    with contextlib.ExitStack() as stack:
        receivers = [
            stack.enter_context(receiving(MemorySink(), lender=shelf)) for shelf in shelves
        ]
        links = {
            (i, j): Sender.connect(receiver.address, SECRET, LONG, desk=borrower.desk)
            for i, borrower in enumerate(borrowers)
            for j, receiver in enumerate(receivers)
        }
        for link in links.values():
            stack.callback(link.close)
        for shelf in shelves:
            shelf.between = lambda index: (gate.wait(60) if index == 3 else None, None)[1]
        for (i, j), link in links.items():
            borrowers[i].ask(link, "turn-1", f"l-{i}{j}")
            borrowers[i].sink.wait_for("piece", f"l-{i}{j}", 3)
        links[0, 0].fail(LinkError("cut"))
        gate.set()
        borrowers[0].sink.wait_for("abort", "l-00")
        for i, j in ((0, 1), (1, 0), (1, 1)):
            borrowers[i].sink.wait_for("done", f"l-{i}{j}")
            lent = shelves[j].states["turn-1"]
            assert contents(borrowers[i].sink.finished[f"l-{i}{j}"]) == contents(lent)
    assert [shelf.lent for shelf in shelves] == [0, 0]


def test_what_is_not_there_is_refused_and_the_link_goes_on(client: redis.Redis) -> None:
    shelf, borrower = Shelf({"turn-1": BACK}), Borrower()
    with both_ends("tcp", client, shelf, borrower) as (_, sender):
        borrower.ask(sender, "turn-2", "l-1")
        error = borrower.wait_refused("l-1")
        assert (error.code, str(error)) == ("missing", "no state after turn-2")
        borrower.ask(sender, "turn-1", "l-2")
        borrower.sink.wait_for("done", "l-2")
        borrower.sink.limit = 100  # memory that is not there
        borrower.ask(sender, "turn-1", "l-3")
        borrower.sink.wait_for("admit", "l-3")
        deliver(sender, "t-1", STATE)
    assert shelf.lent == 0


def test_who_got_a_state_is_not_refused_it_when_the_link_ends(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is here, and the link ends, before its offer has been dealt with."""
    shelf, borrower = Shelf({"small": make_state([0])}), Borrower()
    offered, cut = Incoming.offered, threading.Event()

    def slowly(incoming: Incoming, offer: Offer) -> None:
        offered(incoming, offer)
        borrower.sink.wait_for("done", "l-1")
        sender.fail(LinkError("cut"))
        cut.set()

    monkeypatch.setattr(Incoming, "offered", slowly)
    with both_ends("tcp", client, shelf, borrower) as (_, sender):
        borrower.ask(sender, "small", "l-1")
        assert cut.wait(60)
    assert not borrower.refused


@pytest.mark.parametrize("at", [0, 10, len(BACK) - 1])
def test_a_link_that_breaks_in_a_loan_fails_it_on_both_ends(at: int, client: redis.Redis) -> None:
    shelf, borrower = Shelf({"turn-1": BACK}), Borrower()
    with both_ends("tcp", client, shelf, borrower) as (_, sender):

        def strike(index: int) -> None:
            if index == at:
                sender.fail(LinkError("cut"))

        shelf.between = strike
        borrower.ask(sender, "turn-1", "l-1")
        borrower.sink.wait_for("abort", "l-1")
    assert shelf.lent == borrower.sink.held == 0


@pytest.mark.rotate(8)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["die", "freeze"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", ["ring", "jaccl"])
def test_a_child_that_fails_in_a_loan_fails_it_on_both_ends(
    way: str, rank: int, blow: signal.Signals, client: redis.Redis
) -> None:
    client.connection_pool.disconnect()
    # More than the slots of both ends hold, so that the blow comes before the last batch.
    shelf, borrower = Shelf({"turn-1": make_state([4_000_000] * 30, 13)}), Borrower()
    with both_ends(way, client, shelf, borrower) as (sink, sender):
        pids = children()
        (exchange,) = sender._ways
        assert isinstance(exchange, Exchange)
        exchange._patience = DEADLINE
        borrower.sink.struck = lambda: os.kill(pids[rank], blow)
        borrower.ask(sender, "turn-1", "l-1")
        borrower.sink.wait_for("abort", "l-1")
        with pytest.raises(LinkError):
            deliver(sender, "t-1", STATE)
    assert shelf.lent == sink.held == borrower.sink.held == 0
    assert link_threads() == []  # each ends its child
    assert children() == {}


def test_a_lender_that_raises_is_told_and_harms_nobody(client: redis.Redis) -> None:
    shelf, borrower = Shelf({"turn-1": BACK}), Borrower()
    with both_ends("tcp", client, shelf, borrower) as (_, sender):

        def strike(index: int) -> None:
            if index == 3:
                raise OSError("disk")

        shelf.between = strike
        borrower.ask(sender, "turn-1", "l-1")
        borrower.sink.wait_for("abort", "l-1")
        shelf.between = lambda index: None
        borrower.ask(sender, "turn-1", "l-2")
        borrower.sink.wait_for("done", "l-2")
    assert shelf.lent == 0


def test_a_link_that_lends_counts_as_busy(client: redis.Redis) -> None:
    """A better backend is not tried meanwhile: that would end it."""
    shelf, borrower = Shelf({"turn-1": BACK}), Borrower()
    asked, gate = threading.Event(), threading.Event()
    shelf.between = lambda index: ((asked.set(), gate.wait(60)) if index == 5 else None, None)[1]
    with both_ends("tcp", client, shelf, borrower) as (_, sender):
        assert not sender.busy
        borrower.ask(sender, "turn-1", "l-1")
        assert sender.busy
        assert asked.wait(60)
        assert sender.busy
        gate.set()
        borrower.sink.wait_for("done", "l-1")
        limit = time.monotonic() + 60
        while sender.busy:
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_too_many_asks_are_refused() -> None:
    gate = threading.Event()
    shelf = Shelf({"turn-1": make_state([10])})
    shelf.between = lambda index: (gate.wait(60), None)[1]
    with receiving(MemorySink(), lender=shelf) as receiver:
        rogue = RogueSender(receiver.address)
        for number in range(6):
            rogue.control.send(Ask(number, f"l-{number}", "turn-1", "r", FINGERPRINT, 16))
        answers = [rogue.answer() for _ in range(6)]
        busy = [each for each in answers if isinstance(each, Nack)]
        assert [each.code for each in busy] == ["busy", "busy"]
        for offer in answers:
            if isinstance(offer, Offer):
                rogue.control.send(Nack(offer.number, "memory", "no"))
        gate.set()
        rogue.close()


def test_a_receiver_without_a_lender_says_so() -> None:
    with receiving(MemorySink()) as receiver:
        rogue = RogueSender(receiver.address)
        rogue.control.send(Ask(0, "l-0", "turn-1", "r", FINGERPRINT, 16))
        answer = rogue.answer()
        assert isinstance(answer, Nack)
        assert answer.code == "missing"
        rogue.close()


@pytest.mark.parametrize(
    "message", [Turn(1), Ready(0, 1, 4096), Ack(0, 1), Want(1)], ids=lambda m: m.TYPE
)
def test_answers_to_nothing_end_the_link(message: Turn | Ready | Ack | Want) -> None:
    with receiving(MemorySink()) as receiver:
        rogue = RogueSender(receiver.address)
        rogue.control.send(message)
        assert rogue.ended()
        rogue.close()


@pytest.mark.parametrize("message", ["want", "offer"])
def test_what_nobody_asked_for_is_not_taken(message: str) -> None:
    rogue = RogueReceiver()
    hello = threading.Thread(target=lambda: made.append(rogue.open()))
    made: list[tuple[object, object]] = []
    hello.start()
    sender = Sender.connect(rogue.address, SECRET, LONG, streams=1)
    hello.join(60)
    control, _ = made[0]
    offer = Offer("t", 1, "t", FINGERPRINT, 0, 1, 1, 16)
    control.send(Want(1) if message == "want" else offer)  # type: ignore[attr-defined]
    with pytest.raises(LinkError):
        sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=1)
    sender.close()
    rogue.close()
