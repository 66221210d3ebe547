"""Limits beside the size of the store: bytes per owner, and bytes written per day.

What an owner uses is counted when it matters, from the states themselves, so it cannot drift:
every block and snapshot that a state of the owner refers to, once. Owners share no blocks.

Flash memory wears with every byte written. What is written each day is counted with the writes
themselves; over the day's budget no more snapshots are saved that are large. Rows without the
snapshot behind them resume nothing where a model has one, so then the token ids are all that is
kept, and what is in memory waits there for the next day as long as there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from store.blocks import Blocks
from store.environment import RESERVE_BYTES, VALUE_BYTES, Environment, Txn
from store.errors import OverBudget, StoreFull
from store.eviction import STATES_PER_COMMIT, Evictor
from store.objects import ROOT, Record, owner_tag
from store.states import States

DAYS_KEPT = 31
_DAY = b"day/"


@dataclass(frozen=True, slots=True)
class Limits:
    """`owner_bytes` that the states of one owner may take, `daily_bytes` that may be written per
    day (UTC) before large snapshots wait; 0 for no limit. Below `reserve_bytes` of free disk no
    state is saved: what is left is for records and logs."""

    owner_bytes: int = 0
    daily_bytes: int = 0
    reserve_bytes: int = RESERVE_BYTES


def stored_bytes(record: Record) -> int:
    """Bytes that an object takes: whole values, or a small payload."""
    return record.parts * VALUE_BYTES if record.parts else record.nbytes


class Quotas:
    """Keeps each owner's states within their share by evicting the least worth of them."""

    def __init__(
        self,
        environment: Environment,
        blocks: Blocks,
        states: States,
        evictor: Evictor,
        limit: int,
    ) -> None:
        self._environment = environment
        self._blocks = blocks
        self._states = states
        self._evictor = evictor
        self.limit_of: Callable[[str], int] = lambda owner: limit
        """Bytes that an owner's states may take, 0 for no limit; asked before each save."""
        self._at_most: dict[str, int] = {}

    def make_room(self, owner: str, need: int) -> int:
        """Evict until `need` more bytes fit the share of an owner; returns how many states went.
        Raises StoreFull when they cannot."""
        limit = self.limit_of(owner)
        if not limit:
            return 0
        if need > limit:
            raise StoreFull(f"a state of {need} bytes is over an owner's share of {limit}")
        total = 0
        known = self._at_most.get(owner, limit)
        if known + need > limit:
            known = self.used(owner)
        if known + need > limit:
            # Further than needed, so that not every save has to count again.
            target = max(0, limit - need - limit // 20)
            while known > target and (count := self._environment.write(partial(self._some, owner))):
                total += count
                known = self.used(owner)
            if known + need > limit:
                raise StoreFull(
                    f"states in use or pinned fill an owner's share of {limit} bytes: unpin or "
                    "delete conversations, or raise store.owner_gb or the owner's limit"
                )
        if total:
            self._environment.heartbeat()
            self._evictor.evicted += total
        self._at_most[owner] = known + need
        return total

    def used(self, owner: str) -> int:
        """Bytes of all objects that states of the owner refer to."""
        seen: set[bytes] = set()
        total = 0
        with self._environment.read() as txn:
            for state in self._states.of_owner(txn, owner_tag(owner)):
                for ident in (state.snap, state.head):
                    while ident != ROOT and ident not in seen:
                        seen.add(ident)
                        record = self._blocks.get(txn, ident)
                        if record is None:
                            break
                        total += stored_bytes(record)
                        ident = record.parent
        return total

    def _some(self, owner: str, txn: Txn) -> int:
        turns = [state.turn for state in self._states.of_owner(txn, owner_tag(owner))]
        ranked = sorted(self._evictor.ranked(txn, turns))
        # Few at a time: how much one frees depends on what the others share with it.
        chosen = ranked[: max(1, min(STATES_PER_COMMIT, len(ranked) // 20))]
        for _, _, _, turn in chosen:
            self._states.drop(txn, turn)
        return len(chosen)


class Wear:
    """Counts the bytes written each day and says when the day's budget is spent."""

    def __init__(self, environment: Environment, budget: int) -> None:
        self._environment = environment
        self._budget = budget
        self.refused = 0

    def note(self, txn: Txn, nbytes: int) -> None:
        """Count bytes of states and token ids, put by this transaction or just before it."""
        key = _today()
        meta = self._environment.meta
        txn.put(key, (_number(txn.get(key, db=meta)) + nbytes).to_bytes(8, "big"), db=meta)

    def days(self, txn: Txn) -> dict[str, int]:
        """Bytes written by day (UTC), of the days that are kept."""
        cursor = txn.cursor(db=self._environment.meta)
        found: dict[str, int] = {}
        if cursor.set_range(_DAY):
            for key, value in cursor:
                if not bytes(key).startswith(_DAY):
                    break
                found[bytes(key[len(_DAY) :]).decode()] = _number(value)
        return found

    def forget_old(self, txn: Txn) -> None:
        """Drop all days but the last DAYS_KEPT."""
        for day in sorted(self.days(txn))[:-DAYS_KEPT]:
            txn.delete(_DAY + day.encode(), db=self._environment.meta)

    def check(self, nbytes: int) -> None:
        """Raise OverBudget if `nbytes` of a large snapshot would exceed the day's budget."""
        if not self._budget:
            return
        with self._environment.read() as txn:
            today = _number(txn.get(_today(), db=self._environment.meta))
        if today + nbytes > self._budget:
            self.refused += 1
            raise OverBudget(
                f"{today} of {self._budget} bytes are written today: the state is not saved, its "
                "token ids are; raise store.daily_gb"
            )


def _today() -> bytes:
    return _DAY + time.strftime("%Y-%m-%d", time.gmtime()).encode()


def _number(value: bytes | memoryview | None) -> int:
    return 0 if value is None else int.from_bytes(value, "big")
