"""No bytes from a stranger crash the decoders, build more than their bound, or pass as valid."""

from __future__ import annotations

import contextlib
import dataclasses
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import auth, frame, protocol
from transport.errors import CODES, LinkError
from transport.frame import Frame, cut

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
names = st.text("ABCxyz0189_.:-", min_size=1, max_size=128)
texts = st.text(max_size=128)
epochs = st.integers(1, (1 << 63) - 1)
digests = st.binary(min_size=16, max_size=16)
counts = st.integers(1, 1 << 16)

messages = st.one_of(
    st.builds(
        protocol.Hello,
        node=names,
        protocol=u32,
        codec=u32,
        tandem=texts,
        mlx=texts,
        system=texts,
        epoch=u64,
    ),
    st.builds(
        protocol.Offer,
        transfer=names,
        attempt=st.integers(1, 1 << 20),
        response=names,
        fingerprint=digests,
        start=st.integers(0, 1000),
        tokens=st.integers(1000, 1 << 20),
        nbytes=st.integers(0, 1 << 40),
        block_tokens=u32,
        purpose=names,
        number=u32,
    ),
    st.builds(
        protocol.Ready,
        number=u32,
        nbytes=st.integers(0, 1 << 40),
        part=st.integers(frame.MIN_PART, frame.MAX_PART),
    ),
    st.builds(protocol.Ack, number=u32, nbytes=st.integers(0, 1 << 36), duplicate=st.booleans()),
    st.builds(
        protocol.Nack, number=u32, code=st.sampled_from(sorted(CODES)), reason=st.text(max_size=512)
    ),
    st.builds(protocol.Abort, number=u32, reason=st.text(max_size=512)),
    st.builds(protocol.Ping, count=u32),
    st.builds(
        protocol.Form,
        epoch=epochs,
        nonce=digests,
        fabric=st.sampled_from(["ring", "jaccl"]),
        host=st.text(max_size=64),
    ),
    st.builds(protocol.Meet, epoch=epochs, host=st.text(max_size=64)),
    st.builds(protocol.Formed, epoch=epochs),
    st.builds(protocol.Burst, count=counts),
    st.builds(
        protocol.Ask,
        number=u32,
        transfer=names,
        turn=names,
        response=names,
        fingerprint=digests,
        tokens=st.integers(1, (1 << 32) - 1),
    ),
    st.builds(protocol.Want, count=counts),
    st.builds(protocol.Turn, count=st.just(1)),
)


@given(messages)
def test_messages_come_back_equal(message: protocol.Message) -> None:
    data = protocol.encode(message)
    assert protocol.length(data[:4]) == len(data) - 4
    assert protocol.decode(data[4:]) == message


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_link_error(data: bytes) -> None:
    try:
        message = protocol.decode(data)
    except LinkError:
        return
    protocol.encode(message)


@given(messages, st.data())
def test_a_changed_message_is_valid_or_a_link_error(
    message: protocol.Message, data: st.DataObject
) -> None:
    body = bytearray(protocol.encode(message)[4:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(LinkError):
        protocol.encode(protocol.decode(bytes(body)))


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | texts
values = st.recursive(
    scalars | st.binary(max_size=32), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(messages, st.data())
def test_a_message_with_any_other_field_value_is_valid_or_a_link_error(
    message: protocol.Message, data: st.DataObject
) -> None:
    fields = dataclasses.asdict(message)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(values)
    with contextlib.suppress(LinkError):
        protocol.encode(protocol.decode(msgpack.packb({"type": message.TYPE, **fields})))


@given(st.text(st.characters(), max_size=2000))
def test_any_reason_can_be_carried(reason: str) -> None:
    message = protocol.Abort(1, protocol.brief(reason))
    assert protocol.decode(protocol.encode(message)[4:]) == message


@pytest.mark.parametrize("size", [0, protocol.MAX_CONTROL + 1, 0xFFFFFFFF])
def test_message_lengths_are_bounded(size: int) -> None:
    with pytest.raises(LinkError, match="control message"):
        protocol.length(struct.pack("<I", size))


def test_deep_or_large_messages_are_refused() -> None:
    bombs = [
        b"\x91" * 10_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ]
    for bomb in bombs:
        with pytest.raises(LinkError):
            protocol.decode(bomb)


def test_unknown_and_missing_keys_are_refused() -> None:
    for body in ({"type": "ping"}, {"type": "ping", "count": 1, "more": 2}, {"type": "evil"}, {}):
        with pytest.raises(LinkError):
            protocol.decode(msgpack.packb(body))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    part = draw(st.integers(frame.MIN_PART, frame.MAX_PART))
    payload = draw(st.integers(0, frame.MAX_PAYLOAD))
    offset = draw(st.integers(0, max(0, -(-payload // part) - 1))) * part
    first = offset == 0
    return Frame(
        kind=draw(st.sampled_from([frame.ROWS, frame.SNAPSHOT])),
        epoch=draw(u64),
        transfer=draw(u32),
        sequence=draw(st.integers(0, frame.MAX_PIECES - 1)),
        offset=offset,
        length=min(part, payload - offset),
        payload=payload,
        header=draw(st.integers(1, frame.MAX_HEADER)) if first else 0,
        digest=draw(u64),
    )


@given(frames())
def test_frames_come_back_equal(original: Frame) -> None:
    data = original.pack()
    assert len(data) == frame.SIZE == 64
    assert Frame.unpack(data) == original


@given(frames(), st.integers(0, 63), st.integers(1, 255))
def test_any_changed_byte_of_a_frame_is_noticed(original: Frame, at: int, flip: int) -> None:
    data = bytearray(original.pack())
    data[at] ^= flip
    with pytest.raises(LinkError):
        Frame.unpack(data)


@given(st.binary(max_size=80))
def test_any_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(LinkError):
        Frame.unpack(data)


@given(
    st.builds(
        Frame,
        kind=st.integers(0, 3),
        epoch=u64,
        transfer=u32,
        sequence=u32,
        offset=u64,
        length=u64,
        payload=u64,
        header=u32,
        digest=u64,
    )
)
def test_frames_beyond_their_bounds_are_refused(wild: Frame) -> None:
    try:
        read = Frame.unpack(wild.pack())
    except LinkError:
        return
    assert read.offset + read.length <= read.payload <= frame.MAX_PAYLOAD
    assert read.length <= frame.MAX_PART
    assert read.header <= frame.MAX_HEADER


@given(st.integers(0, 1 << 26), st.integers(frame.MIN_PART, frame.MAX_PART))
def test_parts_cover_a_payload_exactly(payload: int, part: int) -> None:
    at = 0
    for offset, length in cut(payload, part):
        assert offset == at
        assert length == min(part, payload - offset)
        at += length
    assert at == payload


@given(st.binary(min_size=0, max_size=80))
def test_any_bytes_are_a_preamble_or_a_link_error(data: bytes) -> None:
    try:
        preamble = auth.Preamble.unpack(data)
    except LinkError:
        return
    assert preamble.index < auth.MAX_STREAMS
