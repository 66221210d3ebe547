"""Wrong bytes at every stage, from either end: bounded, contained, and made good afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

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
    session_of,
)
from link_rogues import RogueReceiver, RogueSender, next_offer, take

from transport import protocol
from transport.control import Control
from transport.errors import LinkError, Refused
from transport.frame import SNAPSHOT, header_digest
from transport.protocol import Abort, Ack, Nack, Offer, Ping, Ready
from transport.sender import Sender
from transport.session import Session
from transport.wire import Connection

DEADLINE = 1.5
"""For who is found out by it, once its link has been formed; between sound ends it is LONG."""
PART = 4096
STATE = make_state([10_000, 5_000, 4096, 7_000], seed=3)
TOTAL = sum(len(piece.payload) for piece in STATE)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    files = open_files()
    yield
    assert link_threads() == []
    assert open_files() <= files


def ready(rogue: RogueSender, nbytes: int = TOTAL) -> None:
    assert isinstance(rogue.offer("t-1", nbytes), Ready)


def everything(rogue: RogueSender) -> list[bytes]:
    return [frame for i, piece in enumerate(STATE) for frame in rogue.frames(piece, i, PART)]


# What a sender does wrong, and what becomes of it: the link ends, the transfer is refused with a
# code, or all is well.


def garbage_before_offer(rogue: RogueSender) -> None:
    rogue.control.connection.write(protocol.LENGTH.pack(9) + b"\xc1garbage!")


def huge_message_before_offer(rogue: RogueSender) -> None:
    rogue.control.connection.write(protocol.LENGTH.pack(0xFFFFFFFF))


def half_a_message(rogue: RogueSender) -> None:
    rogue.control.connection.write(protocol.LENGTH.pack(100) + b"\x81")


def wrong_message(rogue: RogueSender) -> None:
    rogue.control.send(Ready(0, 1, PART))


def silence(rogue: RogueSender) -> None:
    """No ping, nothing."""


def silence_after_ready(rogue: RogueSender) -> None:
    ready(rogue)


def data_before_offer(rogue: RogueSender) -> None:
    rogue.data[0].write(*everything(rogue))


def data_of_a_later_offer(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(*rogue.frames(STATE[0], 0, PART, number=1))


def garbage_after_ready(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(b"GET / HTTP/1.1\r\n" * 8)


def damaged_frame(rogue: RogueSender) -> None:
    ready(rogue)
    frame = bytearray(rogue.frames(STATE[0], 0, PART)[0])
    frame[40] ^= 4
    rogue.data[0].write(frame)


def wrong_epoch(rogue: RogueSender) -> None:
    ready(rogue)
    frame, header, payload = rogue.parts(STATE[0], 0, PART)[0]
    rogue.data[0].write(replace(frame, epoch=rogue.epoch ^ 1).pack(), header, payload)


def short_part(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(rogue.frames(STATE[0], 0, PART)[0][:-1])
    rogue.data[0].kill()


def stalled_part(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(rogue.frames(STATE[0], 0, PART)[0][:-1])


def stalled_frame(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(rogue.frames(STATE[0], 0, PART)[0][:30])


def same_offer_number_again(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.control.send(Offer("t-2", 1, "t-2", FINGERPRINT, 0, 1, 10, 16, number=0))


ENDS_THE_LINK = [
    garbage_before_offer,
    huge_message_before_offer,
    half_a_message,
    wrong_message,
    silence,
    silence_after_ready,
    data_before_offer,
    data_of_a_later_offer,
    garbage_after_ready,
    damaged_frame,
    wrong_epoch,
    short_part,
    stalled_part,
    stalled_frame,
    same_offer_number_again,
]


STALLED = (half_a_message, stalled_part, stalled_frame)
"""Faults that only the deadline of a connection shows."""
SILENT = (silence, silence_after_ready)
"""Faults that only the deadline of the link shows."""


@pytest.mark.parametrize("fault", ENDS_THE_LINK, ids=lambda fault: fault.__name__)
def test_a_fault_of_a_sender_that_ends_its_link(
    fault: Callable[[RogueSender], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MemorySink()
    attach = Session.attach

    def hastily(session: Session, index: int, connection: Connection) -> None:
        attach(session, index, connection)
        connection.set_deadline(DEADLINE)  # between two frames it may be silent longer

    with receiving(sink, part=PART) as receiver:
        bystander = Sender.connect(receiver.address, SECRET, LONG)
        other = bystander.offer("t-other", fingerprint=FINGERPRINT, tokens=16, nbytes=1000)
        with monkeypatch.context() as patch:
            if fault in STALLED:
                patch.setattr(Session, "attach", hastily)
            rogue = RogueSender(receiver.address)
        session = session_of(receiver, "rogue")
        if fault in STALLED:
            session.control.connection.set_deadline(DEADLINE)
        fault(rogue)
        if fault in SILENT:
            session.deadline = DEADLINE
        assert rogue.ended()
        rogue.close()
        recover(sink, receiver.address)
        other.finish(make_piece("snapshot", 16, 16, bytes(1000)))
        bystander.close()
    assert sink.held == 0


def recover(sink: MemorySink, address: tuple[str, int], attempt: int = 2) -> None:
    """The same transfer over a fresh link arrives whole."""
    sender = Sender.connect(address, SECRET, LONG)
    assert not deliver(sender, "t-1", STATE, attempt=attempt).duplicate
    sender.close()
    assert contents(sink.finished["t-1"]) == contents(STATE)


def long_state(rogue: RogueSender) -> None:
    ready(rogue, 9_999)
    rogue.data[0].write(rogue.frames(STATE[0], 0, PART)[0])


def long_state_later(rogue: RogueSender) -> None:
    ready(rogue, TOTAL - 1)
    rogue.data[0].write(*everything(rogue))


def wrong_part_size(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(*rogue.frames(STATE[0], 0, 5000))


def parts_that_disagree(rogue: RogueSender) -> None:
    ready(rogue)
    first, header, payload = rogue.parts(STATE[0], 0, PART)[0]
    second, _, more = rogue.parts(STATE[0], 0, PART)[1]
    rogue.data[0].write(first.pack(), header, payload)
    rogue.data[0].write(replace(second, kind=SNAPSHOT).pack(), more)


def corrupt_payload(rogue: RogueSender) -> None:
    ready(rogue)
    frames = [bytearray(frame) for frame in everything(rogue)]
    frames[1][-1] ^= 1
    rogue.data[0].write(*frames)


def corrupt_piece_header(rogue: RogueSender) -> None:
    ready(rogue)
    frame, header, payload = rogue.parts(STATE[1], 0, PART)[0]
    bad = bytearray(header)
    bad[20] ^= 1
    rogue.data[0].write(frame.pack(), bad, payload)


def wrong_kind(rogue: RogueSender) -> None:
    ready(rogue)
    for frame, header, payload in rogue.parts(STATE[0], 0, PART):
        rogue.data[0].write(replace(frame, kind=SNAPSHOT).pack(), header, payload)


def wrong_size_in_header(rogue: RogueSender) -> None:
    ready(rogue)
    longer = make_piece("rows", 0, 16, bytes(5000)).header.pack()
    for frame, header, payload in rogue.parts(STATE[2], 0, PART):
        assert header
        changed = replace(frame, header=len(longer), digest=header_digest(longer))
        rogue.data[0].write(changed.pack(), longer, payload)


def duplicate_part(rogue: RogueSender) -> None:
    ready(rogue)
    part = rogue.frames(STATE[0], 0, PART)[0]
    rogue.data[0].write(part, part)


def duplicate_piece(rogue: RogueSender) -> None:
    ready(rogue)
    piece = rogue.frames(STATE[2], 0, PART)
    rogue.data[0].write(*piece, *piece)


def snapshot_not_last(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(*rogue.frames(STATE[0], 1, PART), *rogue.frames(STATE[3], 0, PART))


def piece_after_snapshot(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(*rogue.frames(STATE[3], 1, PART), *rogue.frames(STATE[0], 2, PART))


def second_snapshot(rogue: RogueSender) -> None:
    ready(rogue)
    rogue.data[0].write(*rogue.frames(STATE[3], 2, PART), *rogue.frames(STATE[3], 1, PART))


def aborted(rogue: RogueSender) -> None:
    ready(rogue)
    frames = everything(rogue)
    rogue.data[0].write(*frames[:3])
    rogue.control.send(Abort(0, "no reason"))


FAILS_THE_TRANSFER = [
    (long_state, "memory"),
    (long_state_later, "memory"),
    (wrong_part_size, "protocol"),
    (parts_that_disagree, "protocol"),
    (corrupt_payload, "corrupt"),
    (corrupt_piece_header, "corrupt"),
    (wrong_kind, "protocol"),
    (wrong_size_in_header, "protocol"),
    (duplicate_part, "protocol"),
    (duplicate_piece, "protocol"),
    (snapshot_not_last, "protocol"),
    (piece_after_snapshot, "protocol"),
    (second_snapshot, "protocol"),
    (aborted, "aborted"),
]


@pytest.mark.parametrize(
    ("fault", "code"), FAILS_THE_TRANSFER, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_fault_of_a_sender_that_fails_its_transfer(
    fault: Callable[[RogueSender], None], code: str
) -> None:
    sink = MemorySink()
    with receiving(sink, part=PART) as receiver:
        rogue = RogueSender(receiver.address)
        fault(rogue)
        answer = rogue.answer()
        assert isinstance(answer, Nack)
        assert answer.code == code
        assert sink.held == 0
        # The link itself is sound: late data is dropped, and the next attempt succeeds over it.
        rogue.data[0].write(*rogue.frames(STATE[1], 1, PART))
        assert isinstance(rogue.offer("t-1", TOTAL, number=1, attempt=2), Ready)
        for i, piece in enumerate(STATE):
            rogue.data[0].write(*rogue.frames(piece, i, PART, number=1))
        assert rogue.answer() == Ack(1, TOTAL)
        rogue.close()
    assert contents(sink.finished["t-1"]) == contents(STATE)


def test_pieces_may_overtake_each_other_on_the_way() -> None:
    sink = MemorySink()
    with receiving(sink, part=PART) as receiver:
        rogue = RogueSender(receiver.address, streams=2)
        ready(rogue)
        frames = everything(rogue)
        for i, frame in enumerate(reversed(frames)):
            rogue.data[i % 2].write(frame)
        assert rogue.answer() == Ack(0, TOTAL)
        rogue.close()
    assert contents(sink.finished["t-1"]) == contents(STATE)


def test_a_piece_that_never_comes_keeps_the_state_unused() -> None:
    for missing in range(len(STATE) - 1):
        sink = MemorySink()
        with receiving(sink, part=PART) as receiver:
            rogue = RogueSender(receiver.address)
            ready(rogue)
            for i, piece in enumerate(STATE):
                if i != missing:
                    rogue.data[0].write(*rogue.frames(piece, i, PART))
            rogue.control.send(Ping(1))
            assert rogue.control.receive() == Ping(1)
            assert ("done", "t-1") not in sink.events
            rogue.close()
            sink.wait_for("abort", "t-1")
            recover(sink, receiver.address)


def test_a_sender_that_dies_after_its_last_byte_has_delivered() -> None:
    sink = MemorySink()
    with receiving(sink, part=PART) as receiver:
        rogue = RogueSender(receiver.address)
        ready(rogue)
        rogue.data[0].write(*everything(rogue))
        sink.wait_for("done", "t-1")
        rogue.close()
        sender = Sender.connect(receiver.address, SECRET, LONG)
        assert deliver(sender, "t-1", STATE, attempt=2).duplicate
        sender.close()
    assert sink.events.count(("done", "t-1")) == 1


def test_too_many_open_offers_are_refused() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        rogue = RogueSender(receiver.address)
        answers = [rogue.offer(f"t-{i}", 10, number=i) for i in range(40)]
        assert {type(answer) for answer in answers} == {Ready, Nack}
        assert all(answer.code == "busy" for answer in answers if isinstance(answer, Nack))
        rogue.close()


# What a receiver does wrong. Each function plays one receiver to its end.


def refuses(control: Control, data: Connection) -> None:
    control.send(Nack(next_offer(control).number, "memory", "no room at all"))


def never_answers(control: Control, data: Connection) -> None:
    next_offer(control)


def answers_with_garbage(control: Control, data: Connection) -> None:
    next_offer(control)
    control.connection.write(protocol.LENGTH.pack(3) + b"\xc1\xc1\xc1")


def answers_with_an_offer(control: Control, data: Connection) -> None:
    control.send(next_offer(control))


def hangs_up_after_the_offer(control: Control, data: Connection) -> None:
    next_offer(control)
    control.connection.kill()


def hangs_up_the_stream(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    data.kill()
    control.send(Ready(offer.number, offer.nbytes, PART))


def gives_up_mid_way(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    control.send(Ready(offer.number, offer.nbytes, PART))
    take(data)
    control.send(Nack(offer.number, "failed", "disk full"))


def hangs_up_mid_way(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    control.send(Ready(offer.number, offer.nbytes, PART))
    take(data)
    control.connection.kill()


def acknowledges_too_early(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    control.send(Ready(offer.number, offer.nbytes, PART))
    control.send(Ack(offer.number, 0))


def acknowledges_without_ready(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    control.send(Ack(offer.number, offer.nbytes))


def acknowledges_other_sizes(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    control.send(Ready(offer.number, offer.nbytes, PART))
    while take(data).kind != SNAPSHOT:
        pass
    control.send(Ack(offer.number, TOTAL - 1))


def never_acknowledges_but_lives(control: Control, data: Connection) -> None:
    offer = next_offer(control)
    control.send(Ready(offer.number, offer.nbytes, PART))
    while not isinstance(message := control.receive(), Abort):
        control.try_send(message)  # a sender that has given up does not wait for its echo


RECEIVER_FAULTS = [
    (refuses, "memory"),
    (never_answers, "lost"),
    (answers_with_garbage, "protocol"),
    (answers_with_an_offer, "protocol"),
    (hangs_up_after_the_offer, "lost"),
    (hangs_up_the_stream, "lost"),
    (gives_up_mid_way, "failed"),
    (hangs_up_mid_way, "lost"),
    (acknowledges_too_early, "protocol"),
    (acknowledges_without_ready, "protocol"),
    (acknowledges_other_sizes, "protocol"),
    (never_acknowledges_but_lives, "lost"),
]


@pytest.mark.parametrize(
    ("fault", "code"), RECEIVER_FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_fault_of_a_receiver(fault: Callable[[Control, Connection], None], code: str) -> None:
    rogue = RogueReceiver()
    problems: list[BaseException] = []

    def play() -> None:
        try:
            fault(*rogue.open())
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    patience = DEADLINE if fault in (never_answers, never_acknowledges_but_lives) else LONG
    sender = Sender.connect(rogue.address, SECRET, LONG, streams=1)
    sender.deadline = patience
    with pytest.raises(LinkError) as caught:
        deliver(sender, "t-1", STATE)
    assert caught.value.code == code
    assert isinstance(caught.value, Refused) == (fault is refuses)
    sender.close()
    thread.join(60)
    rogue.close()
    assert not problems
    sink = MemorySink()
    with receiving(sink) as receiver:
        recover(sink, receiver.address)


@pytest.mark.parametrize(
    ("field", "what"), [("protocol", "link protocol"), ("codec", "state format")]
)
def test_versions_that_differ_are_named_on_both_ends(field: str, what: str) -> None:
    rogue = RogueReceiver()
    thread = threading.Thread(target=lambda: rogue.greet(**{field: 99, "tandem": "9.9"}))
    thread.start()
    with pytest.raises(LinkError, match=rf"{what} \d here .* 99 on rogue \(Tandem 9.9\)") as caught:
        Sender.connect(rogue.address, SECRET, LONG)
    assert caught.value.code == "version"
    thread.join(60)
    rogue.close()


def test_one_link_that_fails_hurts_no_other() -> None:
    sink = MemorySink()
    state = make_state([100_000] * 5, seed=9)
    with receiving(sink, part=PART) as receiver:
        good = Sender.connect(receiver.address, SECRET, LONG)
        transfer = good.offer("t-good", fingerprint=FINGERPRINT, tokens=64, nbytes=500_000)
        for i, fault in enumerate([damaged_frame, wrong_epoch, data_before_offer]):
            transfer.send([state[i]])
            rogue = RogueSender(receiver.address)
            fault(rogue)
            assert rogue.ended()
            rogue.close()
        transfer.send([state[3]])
        transfer.finish(state[4])
        good.close()
    assert contents(sink.finished["t-good"]) == contents(state)
