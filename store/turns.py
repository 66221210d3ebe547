"""Turns: the durable truth of a conversation. Each stores its own token ids and its parent.

The full token ids at the end of a turn are those of its parent followed by its own, unless the
turn is `rebased` (its prompt was rendered differently from the stored past), when its own ids are
all of them. The record and the ids lie in `pages`; `turn` holds the links: number of tokens and of
children, parent, conversation. A tree is walked and deleted by the links alone, so that a damaged
record costs itself and not its neighbours.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from sys import byteorder
from typing import TYPE_CHECKING, Any

import msgpack

from store import pages
from store.errors import StoreError

if TYPE_CHECKING:
    from store.environment import Environment, Txn

MAX_ID = 80
_LINK = struct.Struct("<QI?")


@dataclass(slots=True)
class Turn:
    """One response and the input it answered.

    `prompt_ids` are the token ids of this turn's input that its parent does not hold (all of the
    prompt if `rebased`), `output_ids` the generated ones; `schedule` is the run-length list
    [[tokens, count], ...] of the forwards that built its state; `items` are JSON objects.
    `ledger` tells how the answer came about; whoever writes it knows what is in it.
    """

    id: str
    conversation: str
    parent: str | None = None
    owner: str = ""
    created: float = 0.0
    model: str = ""
    fingerprint: bytes = b""
    items: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    rebased: bool = False
    schedule: list[list[int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    status: str = "completed"
    finish: str = ""
    ledger: bytes = b""
    total: int = 0
    """Token ids up to the end of this turn; set by the store."""

    def to_dict(self) -> dict[str, Any]:
        """Plain msgpack types: ids as uint32 little-endian bytes, JSON values as JSON text.

        JSON has integers and lone surrogates that msgpack refuses, hence the text.
        """
        return {
            "id": self.id,
            "conversation": self.conversation,
            "parent": self.parent,
            "owner": self.owner,
            "created": self.created,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "items": json.dumps(self.items),
            "params": json.dumps(self.params),
            "prompt_ids": pack_ids(self.prompt_ids),
            "output_ids": pack_ids(self.output_ids),
            "rebased": self.rebased,
            "schedule": self.schedule,
            "usage": json.dumps(self.usage),
            "status": self.status,
            "finish": self.finish,
            "ledger": self.ledger,
            "total": self.total,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Turn:
        """The reverse of `to_dict`. Raises StoreError on unknown or missing fields."""
        try:
            turn = cls(**data)
            turn.items = json.loads(data["items"])
            turn.params = json.loads(data["params"])
            turn.usage = json.loads(data["usage"])
            turn.prompt_ids = unpack_ids(data["prompt_ids"])
            turn.output_ids = unpack_ids(data["output_ids"])
        except (TypeError, KeyError, ValueError) as error:
            raise StoreError(f"not a turn's record: {error}") from error
        return turn

    def truth(self) -> tuple[Any, ...]:
        """What may never differ between two writes of one turn id."""
        return (
            self.parent,
            self.fingerprint,
            self.rebased,
            pack_ids(self.prompt_ids),
            pack_ids(self.output_ids),
            self.status,
            self.finish,
        )


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as uint32 little-endian bytes. Raises StoreError on ids out of range."""
    try:
        values = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise StoreError(f"token ids must be integers from 0 to 2^32-1: {error}") from error
    if byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The reverse of `pack_ids`. Raises ValueError if the length is no multiple of 4."""
    values = array("I")
    values.frombytes(data)
    if byteorder == "big":
        values.byteswap()
    return values.tolist()


@dataclass(frozen=True, slots=True)
class Link:
    """The `turn` entry. `total` counts all token ids up to the end of the turn."""

    total: int
    children: int
    rebased: bool
    parent: str | None
    conversation: str

    def pack(self) -> bytes:
        """The form stored in `turn`."""
        names = f"{self.parent or ''} {self.conversation}".encode("ascii")
        return _LINK.pack(self.total, self.children, self.rebased) + names

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Link:
        """The reverse of `pack`. Raises StoreError when damaged."""
        try:
            total, children, rebased = _LINK.unpack_from(data)
            parent, conversation = bytes(data[_LINK.size :]).decode("ascii").split(" ")
        except (struct.error, ValueError) as error:
            raise StoreError(f"a turn's link is damaged ({error}): run a repair") from error
        return cls(total, children, rebased, parent or None, conversation)


def check_id(ident: str, what: str) -> bytes:
    """The key bytes of an id. Raises StoreError unless it is 1 to 80 printable ASCII characters."""
    if not (isinstance(ident, str) and 0 < len(ident) <= MAX_ID):
        raise StoreError(f"a {what} id has 1 to {MAX_ID} characters")
    if not (ident.isascii() and ident.isprintable()) or " " in ident:
        raise StoreError(f"{what} id {ident!r} has characters other than printable ASCII")
    return ident.encode("ascii")


class Turns:
    """Turn records; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def exists(self, txn: Txn, ident: str) -> bool:
        """Whether a turn of this id is stored."""
        return txn.get(check_id(ident, "turn"), db=self._environment.turn) is not None

    def get(self, txn: Txn, ident: str) -> Turn | None:
        """The turn, or None. Raises StoreError when its record is damaged."""
        key = check_id(ident, "turn")
        if txn.get(key, db=self._environment.turn) is None:
            return None
        record = pages.get(self._environment, txn, b"t" + key)
        ids = pages.get(self._environment, txn, b"i" + key)
        if record is None or ids is None:
            raise StoreError(f"turn {ident} has lost its record: run a repair")
        data: dict[str, Any] = msgpack.unpackb(record)
        cut = 4 * int(data.pop("prompt"))
        return Turn.from_dict({**data, "prompt_ids": ids[:cut], "output_ids": ids[cut:]})

    def put(self, txn: Txn, turn: Turn) -> bool:
        """Store a new turn; False if it is stored already with the same truth.

        Raises StoreError if another turn has the id or the parent does not exist.
        """
        key = check_id(turn.id, "turn")
        check_id(turn.conversation, "conversation")
        old = self.get(txn, turn.id)
        if old is not None:
            if old.truth() != turn.truth() or old.conversation != turn.conversation:
                raise StoreError(f"turn {turn.id} is stored with other contents: use a new id")
            return False
        base = 0
        if turn.parent is not None:
            parent = self.link(txn, turn.parent)
            self._count_child(txn, turn.parent, 1)
            base = 0 if turn.rebased else parent.total
        turn.total = base + len(turn.prompt_ids) + len(turn.output_ids)
        data = turn.to_dict()
        ids = data.pop("prompt_ids") + data.pop("output_ids")
        data["prompt"] = len(turn.prompt_ids)
        pages.put(self._environment, txn, b"t" + key, msgpack.packb(data))
        pages.put(self._environment, txn, b"i" + key, ids)
        link = Link(turn.total, 0, turn.rebased, turn.parent, turn.conversation)
        txn.put(key, link.pack(), db=self._environment.turn)
        return True

    def annotate(self, txn: Txn, ident: str, ledger: bytes) -> bool:
        """Put a ledger beside a stored turn; False where the turn is not there any more."""
        key = check_id(ident, "turn")
        if txn.get(key, db=self._environment.turn) is None:
            return False
        record = pages.get(self._environment, txn, b"t" + key)
        if record is None:
            raise StoreError(f"turn {ident} has lost its record: run a repair")
        pages.delete(self._environment, txn, b"t" + key)
        changed = msgpack.packb({**msgpack.unpackb(record), "ledger": ledger})
        pages.put(self._environment, txn, b"t" + key, changed)
        return True

    def link(self, txn: Txn, ident: str) -> Link:
        """What ties the turn to others. Raises StoreError if it is not stored."""
        found = txn.get(check_id(ident, "turn"), db=self._environment.turn)
        if found is None:
            raise StoreError(f"there is no turn {ident}")
        return Link.unpack(found)

    def path(self, txn: Txn, ident: str) -> list[Turn]:
        """The turn and all its ancestors, oldest first. Raises StoreError if one is missing."""
        turns: list[Turn] = []
        at: str | None = ident
        while at is not None:
            turn = self.get(txn, at)
            if turn is None:
                raise StoreError(f"there is no turn {at}")
            turns.append(turn)
            at = turn.parent
        return turns[::-1]

    def parent(self, txn: Txn, ident: str) -> str | None:
        """The parent's id, or None for a first turn. Raises StoreError if the turn is absent."""
        return self.link(txn, ident).parent

    def depth(self, txn: Txn, ident: str, limit: int) -> int:
        """Number of turns before this one, counted up to `limit`."""
        count = 0
        at = self.parent(txn, ident)
        while at is not None and count < limit:
            count += 1
            at = self.parent(txn, at)
        return count

    def ids(self, txn: Txn, ident: str) -> bytes:
        """All token ids up to the turn's end, uint32 LE. Raises StoreError if one is missing."""
        parts: list[bytes] = []
        at: str | None = ident
        while at is not None:
            link = self.link(txn, at)
            ids = pages.get(self._environment, txn, b"i" + at.encode("ascii"))
            if ids is None:
                raise StoreError(f"turn {at} has lost its token ids: run a repair")
            parts.append(ids)
            at = None if link.rebased else link.parent
        return b"".join(reversed(parts))

    def remove(self, txn: Txn, ident: str) -> str | None:
        """Delete a turn that has no children; returns its parent, whose count is lowered."""
        key = check_id(ident, "turn")
        parent = self.parent(txn, ident)
        pages.delete(self._environment, txn, b"t" + key)
        pages.delete(self._environment, txn, b"i" + key)
        txn.delete(key, db=self._environment.turn)
        if parent is not None and self.exists(txn, parent):
            self._count_child(txn, parent, -1)
        return parent

    def _count_child(self, txn: Txn, ident: str, change: int) -> None:
        link = self.link(txn, ident)
        changed = replace(link, children=link.children + change)
        txn.put(ident.encode("ascii"), changed.pack(), db=self._environment.turn)
