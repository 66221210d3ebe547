"""A peer process is killed or frozen at every stage; the other end gets over it in bounded time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from link_parts import (
    FINGERPRINT,
    LONG,
    SECRET,
    MemorySink,
    Peer,
    contents,
    deliver,
    link_threads,
    make_piece,
    make_state,
    open_files,
    receiving,
    session_of,
)

from transport.errors import LinkError
from transport.sender import Sender

DEADLINE = 3.0
"""For who is found out by it, from then on; until then, and between sound ends, it is LONG."""
SIZES = [300_000] * 6 + [500_000]
BLOWS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    files = open_files()
    yield
    assert link_threads() == []
    assert open_files() <= files


@pytest.mark.rotate(3)
@pytest.mark.parametrize("blow", BLOWS, ids=["die", "freeze"])
@pytest.mark.parametrize("stage", ["idle", "offer", "ready", "mid", "ack"])
def test_receiver_process_fails(stage: str, blow: signal.Signals) -> None:
    state = make_state(SIZES)
    peer = Peer("receive", stage, LONG)
    sender = Sender.connect(("127.0.0.1", int(peer.line())), SECRET, LONG)
    caught: list[LinkError] = []

    def run() -> None:
        try:
            deliver(sender, "t-1", state)
        except LinkError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    if stage == "idle":
        peer.signal(blow)
        sender.deadline = DEADLINE
        thread.start()
    else:
        thread.start()
        assert peer.line() == stage
        peer.signal(blow)
        sender.deadline = DEADLINE
    thread.join(60)
    assert not thread.is_alive()
    assert [error.code for error in caught] == ["lost"]
    sender.close()
    assert not sender.alive
    peer.close()
    sink = MemorySink()
    with receiving(sink) as receiver:
        again = Sender.connect(receiver.address, SECRET, LONG)
        deliver(again, "t-1", state, attempt=2)
        again.close()
    assert contents(sink.finished["t-1"]) == contents(state)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("blow", BLOWS, ids=["die", "freeze"])
@pytest.mark.parametrize("stage", ["idle", "ready", "mid", "after"])
def test_sender_process_fails(stage: str, blow: signal.Signals) -> None:
    sink = MemorySink()
    state = make_state(SIZES)
    with receiving(sink) as receiver:
        bystander = Sender.connect(receiver.address, SECRET, LONG)
        other = bystander.offer("t-other", fingerprint=FINGERPRINT, tokens=16, nbytes=2000)
        peer = Peer("send", stage, LONG, receiver.address[1])
        if stage == "after":
            assert peer.line() == "done"
        assert peer.line() == stage
        session = session_of(receiver, "peer")
        peer.signal(blow)
        session.deadline = DEADLINE
        if stage in ("ready", "mid"):
            sink.wait_for("abort", "t-peer")
        other.send([make_piece("rows", 0, 16, bytes(1000))])
        again = Sender.connect(receiver.address, SECRET, LONG)
        report = deliver(again, "t-peer", state, attempt=2)
        assert report.duplicate == (stage == "after")
        other.finish(make_piece("snapshot", 16, 16, bytes(1000)))
        if blow == signal.SIGSTOP:
            peer.signal(signal.SIGCONT)  # what it still sends belongs to a link that is over
        again.close()
        bystander.close()
        peer.close()
    assert contents(sink.finished["t-peer"]) == contents(state)
    assert len(sink.finished["t-other"]) == 2
    assert sink.held == 0
    assert sink.events.count(("done", "t-peer")) == 1


def test_a_frozen_sender_that_thaws_cannot_touch_a_newer_attempt() -> None:
    sink = MemorySink()
    state = make_state(SIZES, seed=7)
    with receiving(sink) as receiver:
        peer = Peer("send", "mid", LONG, receiver.address[1])
        assert peer.line() == "mid"
        session = session_of(receiver, "peer")
        peer.signal(signal.SIGSTOP)
        session.deadline = DEADLINE
        sink.wait_for("abort", "t-peer")
        sender = Sender.connect(receiver.address, SECRET, LONG)
        transfer = sender.offer(
            "t-peer", fingerprint=FINGERPRINT, tokens=96, nbytes=sum(SIZES), attempt=2
        )
        transfer.send(state[:2])
        peer.signal(signal.SIGCONT)
        peer.say("go on")
        assert peer.process.wait(60) != 0
        transfer.send(state[2:-1])
        transfer.finish(state[-1])
        sender.close()
        peer.close()
    assert contents(sink.finished["t-peer"]) == contents(state)


def test_sigterm_ends_a_receiver_that_waits_for_a_frozen_sender() -> None:
    peer = Peer("receive", "none", LONG)
    sender = Sender.connect(("127.0.0.1", int(peer.line())), SECRET, LONG)
    transfer = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=16, nbytes=2000)
    transfer.send([make_piece("rows", 0, 16, bytes(1000))])
    peer.signal(signal.SIGTERM)
    peer.process.wait(60)
    with pytest.raises(LinkError):
        transfer.finish(make_piece("snapshot", 16, 16, bytes(1000)))
    sender.close()
    peer.close()
