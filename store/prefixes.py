"""The longest stored beginning of a prompt, found by its token ids.

Two things can be gone on from. A state stands at one position, and any prompt of its owner that
begins with its tokens may use it: the end of a shared preamble, a place inside a prompt at which
one was kept, the end of another conversation, of a branch. And where a model's state is rows
alone, so that it can be cut anywhere, any position at which one of the recorded forwards ended:
rows depend on the lengths of the forwards that made them, and only there do the same forwards give
the same bits again.

`snap` lists states by (owner's tag, chain at the start of their last block, tokens, chain, name),
`index` the blocks by (tag, chain). A lookup computes the chain of the prompt, longest first; what
it finds is compared with the prompt's token ids, block by block, when it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from store.blocks import Blocks
from store.codec.chain import Chain
from store.codec.header import parse, root
from store.environment import Environment, Txn
from store.objects import ROOT, Record
from store.states import INSIDE, PREAMBLE, State, States

LEAST_TOKENS = 16
"""A shorter beginning is computed sooner than it is read."""
_SAME = 4
"""States with the very same tokens that are looked at: repeated turns."""
_TOKENS = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored beginning of `tokens` positions: a state's (`name`), or rows up to `block`."""

    tokens: int
    name: str = ""
    block: bytes = b""


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served: its fingerprint, tokens of a block, whether rows are all."""

    fingerprint: bytes
    block_tokens: int = 0
    rows_alone: bool = False


def state_name(tag: bytes, chain: bytes, *, inside: bool = False) -> str:
    """The name of a state that belongs to no turn, from its owner and the chain at its end:
    `inside` a conversation's prompt, or at the end of a preamble."""
    return f"{INSIDE if inside else PREAMBLE}{tag.hex()}{chain.hex()}"


class Prefixes:
    """Lookups; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment, blocks: Blocks, states: States) -> None:
        self._environment = environment
        self._blocks = blocks
        self._states = states

    def find(
        self, txn: Txn, served: Served, tag: bytes, ids: Sequence[int], beyond: int = 0
    ) -> Prefix | None:
        """The longest of the owner `tag`, shorter than `ids`: a last token has to be computed.

        Only what holds more than `beyond` tokens counts. Raises StoreError for a damaged block.
        """
        if not served.block_tokens:
            return None
        limit = len(ids) - 1
        least = max(beyond + 1, LEAST_TOKENS)
        chain = Chain(root(served.fingerprint), ids, served.block_tokens)
        found = None
        for state in self._states_of(txn, tag, chain, served.block_tokens, limit, least):
            found = Prefix(state.tokens, state.turn)
            break
        if served.rows_alone:
            least = max(least, found.tokens + 1 if found else 0)
            cut = self._cut(txn, tag, chain, served.block_tokens, limit)
            if cut is not None and cut.tokens >= least:
                return cut
        return found

    def _states_of(
        self, txn: Txn, tag: bytes, chain: Chain, block: int, limit: int, least: int
    ) -> Iterator[State]:
        """The owner's states of least to limit tokens that begin the prompt, longest first."""
        cursor = txn.cursor(db=self._environment.snap)
        for number in range((limit - 1) // block, (least - 1) // block - 1, -1):
            start = number * block
            prefix = tag + (chain.at(start) if start else ROOT)
            at = min(limit, start + block) + 1
            while True:
                # The largest key below: one for each different position within the block.
                found = cursor.set_range(prefix + _TOKENS.pack(at))
                found = cursor.prev() if found else cursor.last()
                key = bytes(cursor.key()) if found else b""
                if not key.startswith(prefix):
                    break
                (at,) = _TOKENS.unpack_from(key, len(prefix))
                if at < least:
                    return
                yield from self._named(txn, prefix + _TOKENS.pack(at) + chain.at(at))

    def _named(self, txn: Txn, key: bytes) -> Iterator[State]:
        cursor = txn.cursor(db=self._environment.snap)
        if not cursor.set_range(key):
            return
        for entry in islice(cursor.iternext(keys=True, values=False), _SAME):
            if bytes(entry[: len(key)]) != key:
                return
            state = self._states.get(txn, bytes(entry[len(key) :]).decode())
            if state is not None:
                yield state

    def _cut(self, txn: Txn, tag: bytes, chain: Chain, block: int, limit: int) -> Prefix | None:
        """The last end of a forward within the rows that begin the prompt."""
        for number in range(limit // block, 0, -1):
            for ident in self._blocks.by_chain(txn, tag, chain.at(number * block)):
                record = self._blocks.get(txn, ident)
                if record is None or record.stop != number * block:
                    continue
                return self._last_end(txn, ident, record)
        return None

    def _last_end(self, txn: Txn, ident: bytes, record: Record) -> Prefix | None:
        while True:
            ends = ends_in(parse(self._blocks.header(txn, ident, record)[0]).extra)
            if ends:
                return Prefix(record.start + ends[-1], block=ident)
            ident = record.parent
            found = None if ident == ROOT else self._blocks.get(txn, ident)
            if found is None:
                return None
            record = found


def ends_in(extra: object) -> list[int]:
    """Where forwards ended in a block, in tokens after its start, from what travels with it.

    Empty where nothing is told. `store.codec.pack` writes [[step, count], ...].
    """
    told = extra.get("ends") if isinstance(extra, dict) else None
    ends: list[int] = []
    at = 0
    for entry in told if isinstance(told, list) else ():
        if not isinstance(entry, list) or len(entry) != 2:
            return []
        step, count = entry
        if type(step) is not int or type(count) is not int or not step > 0 or not 0 < count <= 4096:
            return []
        for _ in range(count):
            at += step
            ends.append(at)
    return ends
