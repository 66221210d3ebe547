"""Readers of what is stored: a turn's state, or the longest beginning of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from store.blocks import Blocks
from store.environment import Environment, Txn
from store.errors import StoreError
from store.loading import Buffers, StateReader
from store.objects import owner_tag
from store.places import Places
from store.prefixes import Prefix, Prefixes, Served
from store.states import INSIDE, Pins, State, StateRef, States
from store.turns import Turns, pack_ids


class Reading:
    """Finds and opens states; `touch(name)` is told which are used."""

    def __init__(
        self,
        environment: Environment,
        blocks: Blocks,
        turns: Turns,
        states: States,
        pins: Pins,
        damaged: set[bytes],
        touch: Callable[[str], None],
    ) -> None:
        self._environment = environment
        self._blocks = blocks
        self._places = Places(blocks)
        self._turns = turns
        self._states = states
        self._pins = pins
        self._damaged = damaged
        self._touch = touch
        self._prefixes = Prefixes(environment, blocks, states)
        self.served = Served(b"")
        self.prefix_hits = 0
        self.inside_hits = 0

    def state(self, turn_id: str, fingerprint: bytes, buffers: Buffers) -> StateReader | None:
        """See `store.store.Store.load_state`."""
        with self._environment.read() as txn:
            state = self._states.get(txn, turn_id)
            if state is None or state.fingerprint != fingerprint:
                return None
            ids = self._turns.ids(txn, turn_id)[: 4 * state.tokens]
            reader = self._of_state(txn, state, ids, buffers)
        self._touch(turn_id)
        return reader

    def longest(self, ids: Sequence[int], owner: str, beyond: int) -> Prefix | None:
        """See `store.store.Store.longest_prefix`."""
        with self._environment.read() as txn:
            return self._prefixes.find(txn, self.served, owner_tag(owner), ids, beyond)

    def prefix(self, prefix: Prefix, ids: Sequence[int], buffers: Buffers) -> StateReader | None:
        """See `store.store.Store.load_prefix`."""
        with self._environment.read() as txn:
            if prefix.name:
                state = self._states.get(txn, prefix.name)
                if state is None or state.fingerprint != self.served.fingerprint:
                    return None
                told = pack_ids(ids[: state.tokens])
                reader = self._of_state(txn, state, told, buffers)
            elif self._blocks.get(txn, prefix.block) is None:
                return None
            else:
                reader = self._of_rows(txn, prefix.block, ids, buffers)
        self.prefix_hits += 1
        if prefix.name:
            self._touch(prefix.name)
            self.inside_hits += prefix.name.startswith(INSIDE)
        return reader

    def _of_state(self, txn: Txn, state: State, ids: bytes, buffers: Buffers) -> StateReader:
        damage: list[str] = []
        try:
            objects = self._blocks.line(txn, state.head)
            snapshot = self._blocks.get(txn, state.snap)
            if snapshot is None:
                raise StoreError(f"snapshot {state.snap.hex()} is missing: run a repair")
            if not objects or objects[-1][1].stop != state.tokens:
                raise StoreError(f"the blocks of {state.turn} end elsewhere: run a repair")
            objects.append((state.snap, snapshot))
        except StoreError as error:
            objects, damage = [], [str(error)]
        reader = StateReader(
            self._environment, self._places, self._pins, state.ref(), objects, ids, buffers,
            self._damaged.add,
        )  # fmt: skip
        reader.report.damage.extend(damage)
        return reader

    def _of_rows(self, txn: Txn, block: bytes, ids: Sequence[int], buffers: Buffers) -> StateReader:
        objects = self._blocks.line(txn, block)
        stop = objects[-1][1].stop
        nbytes = sum(record.nbytes for _, record in objects)
        ref = StateRef("", "", self.served.fingerprint, stop, nbytes, 0.0, time.time())
        return StateReader(
            self._environment, self._places, self._pins, ref, objects,
            pack_ids(ids[:stop]), buffers, self._damaged.add,
        )  # fmt: skip
