"""A state crosses a TCP link: whole, in order, once; and refusals, aborts and strangers."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from types import SimpleNamespace

import pytest
from link_parts import (
    FINGERPRINT,
    LONG,
    SECRET,
    MemorySink,
    contents,
    deliver,
    link_threads,
    make_piece,
    make_state,
    open_files,
    receiving,
)
from redis_kit import eventually

from store.codec.header import Piece
from transport.control import Control
from transport.errors import LinkError, Refused
from transport.protocol import Message, Offer, Ping
from transport.receiver import Receiver
from transport.sender import Sender
from transport.session import Session
from transport.sink import Grant, Refusal
from transport.wire import Connection


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [[0], [1], [0, 0, 0], [1 << 20], [(1 << 20) + 1, 3], [5, 1 << 21, 7, (3 << 20) - 1]],
    ids=str,
)
def test_pieces_arrive_whole_and_in_order(streams: int, sizes: list[int]) -> None:
    sink = MemorySink()
    state = make_state(sizes)
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG, streams=streams)
        report = deliver(sender, "t-1", state)
        assert contents(sink.finished["t-1"]) == contents(state)
        assert (report.bytes, report.path, report.streams) == (sum(sizes), "tcp", streams)
        assert 0 <= report.exposed_seconds <= report.seconds
        assert not report.duplicate
        sender.close()
    assert sink.held == 0
    assert sink.events[0] == ("admit", "t-1")
    assert sink.events[-1] == ("done", "t-1")


def test_many_small_pieces_keep_their_order() -> None:
    sink = MemorySink()
    state = make_state([i % 97 for i in range(600)])
    with receiving(sink, part=4096) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG, streams=4)
        deliver(sender, "t-1", state)
        sender.close()
    assert contents(sink.finished["t-1"]) == contents(state)


def test_several_senders_and_transfers_at_once() -> None:
    sink = MemorySink()
    states = {f"t-{i}": make_state([200_000, 100, 300_000 + i], seed=i) for i in range(12)}
    failures: list[BaseException] = []

    def work(sender: Sender, names: list[str]) -> None:
        try:
            for name in names:
                deliver(sender, name, states[name])
        except BaseException as error:
            failures.append(error)

    with receiving(sink) as receiver:
        senders = [Sender.connect(receiver.address, SECRET, LONG) for _ in range(2)]
        names = sorted(states)
        threads = [
            threading.Thread(target=work, args=(senders[i % 2], names[i::4])) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for sender in senders:
            sender.close()
    assert not failures
    assert {name: contents(got) for name, got in sink.finished.items()} == {
        name: contents(state) for name, state in states.items()
    }


def test_interleaved_transfers_of_one_sender() -> None:
    sink = MemorySink()
    first, second = make_state([70_000, 80_000], 1), make_state([90_000, 10], 2)
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        a = sender.offer("t-a", fingerprint=FINGERPRINT, tokens=16, nbytes=150_000)
        b = sender.offer("t-b", fingerprint=FINGERPRINT, tokens=16, nbytes=90_010)
        a.send(first[:-1])
        b.send(second[:-1])
        b.finish(second[-1])
        a.finish(first[-1])
        sender.close()
    assert contents(sink.finished["t-a"]) == contents(first)
    assert contents(sink.finished["t-b"]) == contents(second)


def test_a_refusal_leaves_the_link_sound() -> None:
    sink = MemorySink(limit=1000)
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        with pytest.raises(Refused, match="no room for 2000 bytes") as caught:
            sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=2000)
        assert caught.value.code == "memory"
        with pytest.raises(Refused, match="another model") as caught:
            sender.offer("t-1", fingerprint=bytes(16), tokens=1, nbytes=10)
        assert caught.value.code == "fingerprint"
        deliver(sender, "t-1", make_state([500, 400]))
        sender.close()
    assert sink.events.count(("abort", "t-1")) == 0


def test_a_grant_smaller_than_needed_is_a_refusal() -> None:
    class Mean(MemorySink):
        def admit(self, offer: Offer) -> Grant | Refusal:
            super().admit(offer)
            return Grant(10)

    sink = Mean()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        with pytest.raises(Refused, match="granted 10 bytes"):
            sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=11)
        sink.wait_for("abort", "t-1")
        sender.close()
    assert sink.held == 0


def test_a_state_larger_than_offered_never_leaves() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        transfer = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=100)
        with pytest.raises(LinkError, match="larger than the 100 bytes granted"):
            transfer.send([make_piece("rows", 0, 16, bytes(101))])
        transfer.abort("too large")
        sink.wait_for("abort", "t-1")
        sender.close()
    assert ("piece", "t-1") not in sink.events


def test_a_finished_transfer_is_acknowledged_again_but_not_taken_again() -> None:
    sink = MemorySink()
    state = make_state([1000, 2000])
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        deliver(sender, "t-1", state)
        again = deliver(sender, "t-1", state, attempt=2)
        assert again.duplicate
        sender.close()
        other = Sender.connect(receiver.address, SECRET, LONG)
        assert deliver(other, "t-1", state, attempt=3).duplicate
        other.close()
    assert sink.events.count(("admit", "t-1")) == 1
    assert sink.events.count(("done", "t-1")) == 1


def test_a_newer_attempt_replaces_an_older_one() -> None:
    sink = MemorySink()
    state = make_state([100_000, 200_000, 5])
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        old = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=32, nbytes=300_005)
        old.send(state[:1])
        sink.wait_for("piece", "t-1")
        with pytest.raises(Refused, match="attempt 1 of this transfer is under way"):
            sender.offer("t-1", fingerprint=FINGERPRINT, tokens=32, nbytes=300_005)
        deliver(sender, "t-1", state, attempt=2)
        with pytest.raises(LinkError, match="newer attempt"):
            old.finish(state[-1])
        sender.close()
    assert contents(sink.finished["t-1"]) == contents(state)
    calls = [what for what, _ in sink.events if what != "piece"]
    assert calls == ["admit", "abort", "admit", "done"]


def test_late_data_of_an_aborted_attempt_is_dropped() -> None:
    sink = MemorySink()
    state = make_state([400_000] * 8 + [9])
    with receiving(sink, part=4096) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        for attempt in range(1, 20):
            transfer = sender.offer(
                "t-1", fingerprint=FINGERPRINT, tokens=32, nbytes=3_200_009, attempt=attempt
            )
            transfer.send(state[:-1])
            transfer.abort("changed my mind")
        deliver(sender, "t-1", state, attempt=20)
        assert sender.alive
        sender.close()
    assert contents(sink.finished["t-1"]) == contents(state)
    assert len(sink.aborted) == 19
    assert sink.held == 0


def test_abort_from_another_thread_ends_a_wait() -> None:
    hold = threading.Event()

    class Slow(MemorySink):
        def done(self, transfer: str) -> None:
            hold.wait(60)
            super().done(transfer)

    sink = Slow()
    state = make_state([10, 10])
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        transfer = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=20)
        transfer.send(state[:-1])
        caught: list[LinkError] = []

        def wait() -> None:
            try:
                transfer.finish(state[-1])
            except LinkError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        sink.wait_for("piece", "t-1", 2)
        transfer.abort("the client left")
        thread.join(60)
        assert [error.code for error in caught] == ["aborted"]
        hold.set()
        sender.close()


def test_the_receiving_side_can_abort() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        transfer = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=100)
        assert receiver.abort("t-1", "no slot any more")
        assert not receiver.abort("t-2", "unknown")
        sink.wait_for("abort", "t-1")
        with pytest.raises(LinkError, match="no slot any more") as caught:
            transfer.finish(make_piece("snapshot", 16, 16, bytes(100)))
        assert caught.value.code == "aborted"
        deliver(sender, "t-1", make_state([10, 10]), attempt=2)
        sender.close()


@pytest.mark.parametrize("method", ["admit", "buffer", "piece", "done"])
def test_a_sink_that_raises_fails_its_transfer_only(method: str) -> None:
    class Broken(MemorySink):
        broken = True

    def fail(*_: object) -> None:
        if sink.broken:
            raise RuntimeError("disk on fire")
        return original(*_)

    sink = Broken()
    original = getattr(sink, method)
    setattr(sink, method, fail)
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        with pytest.raises(LinkError, match="disk on fire") as caught:
            deliver(sender, "t-1", make_state([1000, 2000]))
        assert caught.value.code == "failed"
        sink.broken = False
        deliver(sender, "t-1", make_state([1000, 2000]), attempt=2)
        sender.close()
    assert sink.held == 0


def test_a_damaged_payload_is_never_handed_over() -> None:
    sink = MemorySink()
    state = make_state([3000, 4000, 10])
    bad = bytearray(state[1].payload)
    bad[77] ^= 1
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        with pytest.raises(LinkError) as caught:
            deliver(sender, "t-1", [state[0], Piece(state[1].header, memoryview(bad)), state[2]])
        assert caught.value.code == "corrupt"
        sink.wait_for("abort", "t-1")
        deliver(sender, "t-1", state, attempt=2)
        sender.close()
    assert contents(sink.finished["t-1"]) == contents(state)


def test_nothing_may_follow_the_snapshot() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        transfer = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=100)
        transfer.finish(make_piece("snapshot", 0, 0, b"x"))
        transfer.send([make_piece("rows", 0, 16, b"y")])
        sender.close()
    assert len(sink.finished["t-1"]) == 1


def test_a_wrong_secret_is_refused_by_both_ends() -> None:
    with receiving(MemorySink()) as receiver:
        with pytest.raises(LinkError, match="does not hold this link's secret"):
            Sender.connect(receiver.address, b"x" * 32, LONG)
        with pytest.raises(LinkError, match="at least 16 bytes"):
            Sender.connect(receiver.address, b"short", LONG)
        assert receiver.stats()["links"] == 0


def test_a_stranger_is_dropped_and_others_are_served() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        web = socket.create_connection(receiver.address)
        web.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(64))
        silent = [socket.create_connection(receiver.address) for _ in range(8)]
        sender = Sender.connect(receiver.address, SECRET, LONG)
        deliver(sender, "t-1", make_state([10, 10]))
        web.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert web.recv(100) == b""
        for sock in [web, *silent]:
            sock.close()
        sender.close()


def test_no_receiver_is_an_error_at_once() -> None:
    with socket.socket() as sock:  # its port is nobody else's, and nobody listens there
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(LinkError, match="cannot reach"):
            Sender.connect(sock.getsockname()[:2], SECRET, LONG)


def test_a_server_that_says_nothing_is_an_error_in_time() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(LinkError, match="frozen or cut off"):
        Sender.connect(sock.getsockname()[:2], SECRET, 3.0)
    sock.close()


def test_several_addresses_share_the_streams() -> None:
    sink = MemorySink()
    receiver = Receiver(["127.0.0.1", "127.0.0.1"], 0, SECRET, sink, LONG)
    assert len(set(receiver.addresses)) == 2
    sender = Sender.connect(receiver.addresses, SECRET, LONG, streams=4)
    state = make_state([3_000_000, 10])
    deliver(sender, "t-1", state)
    sender.close()
    receiver.close()
    assert contents(sink.finished["t-1"]) == contents(state)


def test_a_link_that_ends_gives_back_every_grant() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        transfer = sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=100)
        sender.close()
        sink.wait_for("abort", "t-1")
        with pytest.raises(LinkError, match="closed"):
            transfer.send([make_piece("rows", 0, 16, b"x")])
        with pytest.raises(LinkError, match="closed"):
            sender.offer("t-2", fingerprint=FINGERPRINT, tokens=1, nbytes=100)
        assert not sender.alive
    assert sink.held == 0


def test_a_grant_runs_out() -> None:
    class Hasty(MemorySink):
        def admit(self, offer: Offer) -> Grant | Refusal:
            super().admit(offer)
            return Grant(offer.nbytes, seconds=0.0)

    sink = Hasty()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        with contextlib.suppress(LinkError):  # it may have run out before READY was sent
            sender.offer("t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=100)
        sender.tell(Ping(1))  # a receiver looks at its grants when something comes, or in time
        sink.wait_for("abort", "t-1")
        assert "grant ran out" in sink.aborted[0][1]
        sender.close()


def test_idle_links_stay_alive_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pings of three deadlines, by a clock that waits for the answers: no machine is too slow
    for it. The data streams' own deadlines pass meanwhile."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("transport.sender.time", clock)
    monkeypatch.setattr("transport.session.time", clock)
    poll, read_idle, attach = Control.poll, Connection.read_idle, Session.attach
    listening: set[Control] = set()
    streams: list[Connection] = []
    idle: list[Connection] = []

    def briefly(control: Control, seconds: float) -> Message | None:
        listening.add(control)
        return poll(control, 0.01)

    def attached(session: Session, index: int, connection: Connection) -> None:
        attach(session, index, connection)
        connection.set_deadline(0.05)
        streams.append(connection)

    def read(connection: Connection, view: memoryview) -> bool:
        came = read_idle(connection, view)
        if not came:
            idle.append(connection)
        return came

    monkeypatch.setattr(Control, "poll", briefly)
    monkeypatch.setattr(Session, "attach", attached)
    monkeypatch.setattr(Connection, "read_idle", read)
    sink = MemorySink()
    with receiving(sink) as receiver:
        sender = Sender.connect(receiver.address, SECRET, LONG)
        eventually(lambda: sender._control in listening, "the sender does not listen")
        for _ in range(12):  # a dozen pings and their answers
            heard = sender._control.received
            clock.now += LONG / 4
            eventually(lambda heard=heard: sender._control.received > heard, "no answer to a ping")
        eventually(lambda: all(idle.count(each) > 3 for each in streams), "no stream was idle")
        assert len(streams) == 2
        assert sender.alive
        for each in streams:
            each.set_deadline(LONG)
        deliver(sender, "t-1", make_state([10, 10]))
        sender.close()


def test_a_state_goes_over_and_only_what_is_new_comes_back() -> None:
    here, there = MemorySink(), MemorySink()
    state = make_state([5000, 6000, 700])
    with receiving(here) as ours, receiving(there) as theirs:
        over = Sender.connect(theirs.address, SECRET, LONG)
        back = Sender.connect(ours.address, SECRET, LONG)
        deliver(over, "t-1", state)
        new = [make_piece("rows", 32, 48, bytes(900)), make_piece("snapshot", 48, 48, bytes(800))]
        transfer = back.offer(
            "t-1", fingerprint=FINGERPRINT, tokens=48, start=32, nbytes=1700, purpose="return"
        )
        transfer.send(new[:1])
        assert transfer.finish(new[1]).bytes == 1700
        over.close()
        back.close()
    assert contents(there.finished["t-1"]) == contents(state)
    assert contents(here.finished["t-1"]) == contents(new)


def test_nothing_is_left_after_a_hundred_links() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        deliver_once(receiver, "t-warm")
        gc.collect()
        files = open_files()
        for i in range(100):
            if i % 3:
                deliver_once(receiver, f"t-{i}")
                continue
            sender = Sender.connect(receiver.address, SECRET, LONG)
            transfer = sender.offer(f"t-{i}", fingerprint=FINGERPRINT, tokens=1, nbytes=1000)
            transfer.send([make_piece("rows", 0, 16, bytes(900))])
            sender.close()
            sink.wait_for("abort", f"t-{i}")
    assert open_files() < files
    assert link_threads() == []
    assert sink.held == 0


def deliver_once(receiver: Receiver, name: str) -> None:
    sender = Sender.connect(receiver.address, SECRET, LONG)
    deliver(sender, name, make_state([1000, 10]))
    sender.close()
