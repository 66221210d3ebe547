"""Control messages: small msgpack maps with a length prefix, on a connection of their own.

Every message is a frozen dataclass. Decoding bounds the message's size before it is read, the
count and length of everything in it, and the range of every number; it never builds anything
that a peer sized. Unknown keys and missing keys are errors.
"""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

import msgpack

from transport.errors import CODES, Code, LinkError
from transport.frame import MAX_PART, MAX_PAYLOAD, MIN_PART

PROTOCOL = 2
MAX_CONTROL = 16 << 10
LENGTH = struct.Struct("<I")
MAX_TRANSFER = 1 << 40
MAX_TEXT = 512
_U32 = (1 << 32) - 1
_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def _name(what: str, value: object) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise LinkError(
            f"{what} is not a name of 1..128 characters A-Z a-z 0-9 _ . : -", "protocol"
        )


def _text(what: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or len(value) > limit or not _encodable(value):
        raise LinkError(f"{what} is not a text of at most {limit} characters", "protocol")


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise LinkError(f"{what} is not a whole number in {low}..{high}", "protocol")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message each way. `protocol` and `codec` must be equal, the rest is told."""

    TYPE: ClassVar[str] = "hello"
    node: str
    protocol: int
    codec: int
    tandem: str
    mlx: str
    system: str
    boot: str = ""
    epoch: int = 0

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _name("node", self.node)
        for what in ("protocol", "codec"):
            _count(what, getattr(self, what), 0, _U32)
        for what in ("tandem", "mlx", "system", "boot"):
            _text(what, getattr(self, what), 128)
        _count("epoch", self.epoch, 0, (1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class Offer:
    """A state that a sender wants to deliver.

    `transfer` names it over all attempts; `attempt` grows with each; `number` tells attempts apart
    within one link. `tokens` is the least position the snapshot will stand at (an answer may be
    begun before it is taken), `start` the first token whose rows travel, `nbytes` an upper estimate
    of all payload bytes.
    """

    TYPE: ClassVar[str] = "offer"
    transfer: str
    attempt: int
    response: str
    fingerprint: bytes
    start: int
    tokens: int
    nbytes: int
    block_tokens: int
    purpose: str = "handoff"
    number: int = 0

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        for what in ("transfer", "response", "purpose"):
            _name(what, getattr(self, what))
        if not isinstance(self.fingerprint, bytes) or len(self.fingerprint) != 16:
            raise LinkError("fingerprint is not 16 bytes", "protocol")
        _count("attempt", self.attempt, 1, _U32)
        _count("start", self.start, 0, _U32)
        _count("tokens", self.tokens, self.start, _U32)
        _count("nbytes", self.nbytes, 0, MAX_TRANSFER)
        _count("block_tokens", self.block_tokens, 0, _U32)
        _count("number", self.number, 0, _U32)


@dataclass(frozen=True, slots=True)
class Ready:
    """The receiver holds `nbytes` of memory for this transfer; parts are of `part` bytes."""

    TYPE: ClassVar[str] = "ready"
    number: int
    nbytes: int
    part: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("number", self.number, 0, _U32)
        _count("nbytes", self.nbytes, 0, MAX_TRANSFER)
        _count("part", self.part, MIN_PART, MAX_PART)


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything arrived, was verified and taken over; or had been before (`duplicate`)."""

    TYPE: ClassVar[str] = "ack"
    number: int
    nbytes: int
    duplicate: bool = False

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("number", self.number, 0, _U32)
        _count("nbytes", self.nbytes, 0, MAX_PAYLOAD * 16)
        if type(self.duplicate) is not bool:
            raise LinkError("duplicate is not a truth value", "protocol")


@dataclass(frozen=True, slots=True)
class Nack:
    """The receiver refuses or gives up a transfer, or has nothing for an Ask; and says why."""

    TYPE: ClassVar[str] = "nack"
    number: int
    code: Code
    reason: str

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("number", self.number, 0, _U32)
        if not isinstance(self.code, str) or self.code not in CODES:
            raise LinkError("unknown refusal code", "protocol")
        _text("reason", self.reason, MAX_TEXT)


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gives a transfer up; what is still on the way is dropped by its number."""

    TYPE: ClassVar[str] = "abort"
    number: int
    reason: str

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("number", self.number, 0, _U32)
        _text("reason", self.reason, MAX_TEXT)


@dataclass(frozen=True, slots=True)
class Ping:
    """Sign of life, sent by the sender; the receiver answers with the same count."""

    TYPE: ClassVar[str] = "ping"
    count: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("count", self.count, 0, _U32)


@dataclass(frozen=True, slots=True)
class Form:
    """The sender wants an rdma group of this epoch; `host` is its own "address:port" for ring."""

    TYPE: ClassVar[str] = "form"
    epoch: int
    nonce: bytes
    fabric: str
    host: str

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("epoch", self.epoch, 1, (1 << 63) - 1)
        if not isinstance(self.nonce, bytes) or len(self.nonce) != 16:
            raise LinkError("nonce is not 16 bytes", "protocol")
        if not isinstance(self.fabric, str) or self.fabric not in ("ring", "jaccl"):
            raise LinkError("unknown fabric", "protocol")
        _text("host", self.host, 64)


@dataclass(frozen=True, slots=True)
class Meet:
    """The receiver's child has been started; `host` is its "address:port" for ring."""

    TYPE: ClassVar[str] = "meet"
    epoch: int
    host: str

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("epoch", self.epoch, 1, (1 << 63) - 1)
        _text("host", self.host, 64)


@dataclass(frozen=True, slots=True)
class Formed:
    """The receiver's group stands and has tested itself."""

    TYPE: ClassVar[str] = "formed"
    epoch: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("epoch", self.epoch, 1, (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Burst:
    """The sender's child is about to send so many batches: post as many receives."""

    TYPE: ClassVar[str] = "burst"
    count: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("count", self.count, 1, 1 << 16)


@dataclass(frozen=True, slots=True)
class Ask:
    """The end that formed the link wants the state after `turn` from the other one.

    The answer is an Offer of `transfer`, in the other direction, or a Nack with this `number`,
    which is of the same count as the numbers of offers. `tokens` is how many the state should hold.
    """

    TYPE: ClassVar[str] = "ask"
    number: int
    transfer: str
    turn: str
    response: str
    fingerprint: bytes
    tokens: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        for what in ("transfer", "turn", "response"):
            _name(what, getattr(self, what))
        if not isinstance(self.fingerprint, bytes) or len(self.fingerprint) != 16:
            raise LinkError("fingerprint is not 16 bytes", "protocol")
        _count("number", self.number, 0, _U32)
        _count("tokens", self.tokens, 1, _U32)


@dataclass(frozen=True, slots=True)
class Want:
    """The end that did not form the link has so many more batches ready for its child to send."""

    TYPE: ClassVar[str] = "want"
    count: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("count", self.count, 1, 1 << 16)


@dataclass(frozen=True, slots=True)
class Turn:
    """The end that formed the link has posted a receive: the other's child sends one batch."""

    TYPE: ClassVar[str] = "turn"
    count: int

    def validate(self) -> None:
        """Raise LinkError where a field is out of bounds."""
        _count("count", self.count, 1, 1)


Message = (
    Hello | Offer | Ready | Ack | Nack | Abort | Ping | Form | Meet | Formed | Burst
    | Ask | Want | Turn
)  # fmt: skip
TYPES: dict[str, type[Message]] = {
    kind.TYPE: kind
    for kind in (
        Hello, Offer, Ready, Ack, Nack, Abort, Ping, Form, Meet, Formed, Burst, Ask, Want, Turn,
    )
}  # fmt: skip
M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Length prefix and msgpack map; raises LinkError if the message breaks its own bounds."""
    message.validate()
    body: bytes = msgpack.packb({"type": message.TYPE, **asdict(message)})
    if len(body) > MAX_CONTROL:
        raise LinkError(f"control message of {len(body)} bytes is too long", "protocol")
    return LENGTH.pack(len(body)) + body


def brief(reason: object) -> str:
    """Any text cut and cleaned so that a message may carry it."""
    return str(reason)[:MAX_TEXT].encode("utf-8", "replace").decode()


def length(prefix: bytes | bytearray | memoryview) -> int:
    """Length of the message that follows a prefix; raises LinkError beyond MAX_CONTROL."""
    (size,) = LENGTH.unpack(prefix)
    if not 0 < size <= MAX_CONTROL:
        raise LinkError(f"control message of {size} bytes, limit {MAX_CONTROL}", "protocol")
    return int(size)


def decode(body: bytes | bytearray | memoryview) -> Message:
    """One message from its msgpack map; raises LinkError on anything but a valid one."""
    if len(body) > MAX_CONTROL:
        raise LinkError("control message is too long", "protocol")
    try:
        raw: Any = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_str_len=4 * MAX_TEXT,
            max_bin_len=1024,
            max_array_len=0,
            max_map_len=16,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise LinkError(f"control message is not valid msgpack: {error}", "protocol") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise LinkError("control message is not a map with a type", "protocol")
    kind = TYPES.get(raw.pop("type"))
    if kind is None:
        raise LinkError("control message of unknown type", "protocol")
    if set(raw) != {field.name for field in fields(kind)}:
        raise LinkError(f"{kind.TYPE} message has other keys than it should", "protocol")
    message = kind(**raw)
    message.validate()
    return message
