"""States: which blocks and which snapshot a turn's cache consists of, and when it was last used.

A state that belongs to no turn bears a name of its own instead of a turn's id. That of a preamble,
which conversations share, begins with PREAMBLE, and it has no conversation once one that is kept
begins with it; that of a place inside a conversation's prompt, from which an edited or repeated
message goes on, begins with INSIDE.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgpack

from store.blocks import Blocks
from store.environment import Environment, Txn
from store.turns import check_id

PREAMBLE = "pre_"
INSIDE = "cut_"


@dataclass(frozen=True, slots=True)
class State:
    """The stored state of one turn: `tokens` positions, held by `head` (last block) and `snap`.

    `tag` is its owner's; `chain` the chained hash at its end, `anchor` that at the start of its
    last block.
    """

    turn: str
    conversation: str
    fingerprint: bytes
    tokens: int
    nbytes: int
    head: bytes
    snap: bytes
    created: float
    used: float
    own: int
    """Payload bytes that the save added, roughly what dropping the state frees."""
    depth: int
    new: int
    """New input tokens of the turn; with `depth` its class for `store.reuse`. Of a state inside a
    prompt: its tokens beyond the nearest one before."""
    tag: bytes
    chain: bytes
    anchor: bytes
    continued: bool = False
    """Whether a later state was built on this one."""

    @property
    def named(self) -> bool:
        """Whether it belongs to no turn."""
        return self.turn.startswith((PREAMBLE, INSIDE))

    @property
    def inside(self) -> bool:
        """Whether it stands inside a conversation's prompt."""
        return self.turn.startswith(INSIDE)

    def pack(self) -> bytes:
        """The form stored in `state`."""
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    def ref(self) -> StateRef:
        """What callers outside the store see."""
        return StateRef(
            self.turn, self.conversation, self.fingerprint, self.tokens, self.nbytes,
            self.created, self.used,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateRef:
    """A stored state: number of token positions, payload bytes and times (seconds since 1970)."""

    turn: str
    conversation: str
    fingerprint: bytes
    tokens: int
    nbytes: int
    created: float
    used: float

    def to_dict(self) -> dict[str, Any]:
        """Plain msgpack types."""
        return asdict(self)


class Pins:
    """Turns whose state is being read or written, counted in memory; eviction passes them over."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, turn: str) -> None:
        """Pin once more."""
        with self._lock:
            self._counts[turn] += 1

    def remove(self, turn: str) -> None:
        """Undo one `add`."""
        with self._lock:
            self._counts[turn] -= 1
            if self._counts[turn] <= 0:
                del self._counts[turn]

    @contextmanager
    def hold(self, turns: list[str]) -> Iterator[None]:
        """Pin several turns for the length of a block."""
        for turn in turns:
            self.add(turn)
        try:
            yield
        finally:
            for turn in turns:
                self.remove(turn)

    def __contains__(self, turn: str) -> bool:
        return self._counts[turn] > 0 if turn in self._counts else False

    def __len__(self) -> int:
        return len(self._counts)


def use_key(state: State) -> bytes:
    """The key in `lru`: microseconds of last use, then the turn."""
    return int(state.used * 1e6).to_bytes(8, "big") + state.turn.encode()


def place_key(state: State) -> bytes:
    """The key in `snap`, by which a prompt's beginning is found."""
    tokens = state.tokens.to_bytes(8, "big")
    return state.tag + state.anchor + tokens + state.chain + state.turn.encode()


class States:
    """State records and their order of use; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment, blocks: Blocks) -> None:
        self._environment = environment
        self._blocks = blocks

    def get(self, txn: Txn, turn: str) -> State | None:
        """The state of a turn, or None."""
        found = txn.get(check_id(turn, "turn"), db=self._environment.state)
        return None if found is None else State(**msgpack.unpackb(found))

    def publish(self, txn: Txn, state: State) -> None:
        """Make a state visible: reference its blocks, then release what the turn had before."""
        self._blocks.ref(txn, state.head)
        self._blocks.ref(txn, state.snap)
        self.drop(txn, state.turn)
        self._put(txn, state)

    def drop(self, txn: Txn, turn: str) -> int:
        """Remove a turn's state, if any; returns the bulk values freed."""
        old = self.get(txn, turn)
        if old is None:
            return 0
        txn.delete(use_key(old), db=self._environment.lru)
        txn.delete(place_key(old), db=self._environment.snap)
        txn.delete(turn.encode(), db=self._environment.state)
        return self._blocks.unref(txn, old.snap) + self._blocks.unref(txn, old.head)

    def note_continued(self, txn: Txn, turn: str) -> None:
        """Mark the state of `turn` as one that a stored later state continues."""
        old = self.get(txn, turn)
        if old is not None and not old.continued:
            self._put(txn, replace(old, continued=True))

    def share(self, txn: Txn, name: str) -> None:
        """A preamble belongs to no one conversation any more."""
        old = self.get(txn, name)
        if old is not None and old.conversation:
            self._put(txn, replace(old, conversation=""))

    def touch(self, txn: Txn, turn: str, used: float) -> None:
        """Set the time of last use, if the state exists and the time is later."""
        old = self.get(txn, turn)
        if old is not None and used > old.used:
            txn.delete(use_key(old), db=self._environment.lru)
            self._put(txn, replace(old, used=used))

    def oldest_first(self, txn: Txn) -> Iterator[str]:
        """Turns that have a state, the longest unused first."""
        for key in txn.cursor(db=self._environment.lru).iternext(keys=True, values=False):
            yield bytes(key[8:]).decode()

    def latest_first(self, txn: Txn) -> Iterator[str]:
        """Turns that have a state, the last used first."""
        cursor = txn.cursor(db=self._environment.lru)
        for key in cursor.iterprev(keys=True, values=False):
            yield bytes(key[8:]).decode()

    def of_owner(self, txn: Txn, tag: bytes) -> Iterator[State]:
        """All states of an owner."""
        cursor = txn.cursor(db=self._environment.snap)
        if not cursor.set_range(tag):
            return
        for key in cursor.iternext(keys=True, values=False):
            if bytes(key[: len(tag)]) != tag:
                return
            state = self.get(txn, bytes(key[len(tag) + 40 :]).decode())
            if state is not None:
                yield state

    def named(self, txn: Txn, prefix: str) -> Iterator[State]:
        """All states whose names begin with PREAMBLE, or with INSIDE."""
        cursor = txn.cursor(db=self._environment.state)
        if not cursor.set_range(prefix.encode()):
            return
        for key, value in cursor:
            if not bytes(key).startswith(prefix.encode()):
                return
            yield State(**msgpack.unpackb(value))

    def followers(self, txn: Txn, state: State) -> int:
        """How many blocks and other states go on from the end of this one's rows."""
        record = self._blocks.get(txn, state.head)
        return 0 if record is None else record.refs - 1

    def every(self, txn: Txn) -> Iterator[State]:
        """All states in the order of their turns' ids."""
        for value in txn.cursor(db=self._environment.state).iternext(keys=False, values=True):
            yield State(**msgpack.unpackb(value))

    def _put(self, txn: Txn, state: State) -> None:
        txn.put(state.turn.encode(), state.pack(), db=self._environment.state)
        txn.put(use_key(state), b"", db=self._environment.lru)
        txn.put(place_key(state), b"", db=self._environment.snap)
