"""How much fits: conversations and tokens by length, from the sizes of a state that is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from store.environment import LIVE_CEILING
from store.quotas import stored_bytes
from store.store import Store

LENGTHS = (1_000, 2_000, 4_000, 8_000, 17_500, 32_000, 64_000, 128_000)


@dataclass(frozen=True)
class Sizes:
    """Bytes on disk, padding included: of the snapshot, and of a block of `block_tokens`."""

    snapshot: int
    block: int
    block_tokens: int

    def of(self, tokens: int) -> int:
        """Bytes of a state of `tokens` tokens and of its token ids and messages (8 a token)."""
        return self.snapshot + -(-tokens // self.block_tokens) * self.block + 8 * tokens


def sizes(store: Store) -> Sizes | None:
    """The sizes of the latest state, or None while nothing longer than a block is stored."""
    with store.environment.read() as txn:
        for turn in store.states.latest_first(txn):
            state = store.states.get(txn, turn)
            if state is None:
                continue
            line = store.blocks.line(txn, state.head)
            snapshot = store.blocks.get(txn, state.snap)
            if len(line) < 2 or snapshot is None:
                continue
            first = line[0][1]
            return Sizes(stored_bytes(snapshot), stored_bytes(first), first.stop - first.start)
    return None


def capacity(store: Store, size_bytes: int = 0) -> list[dict[str, Any]]:
    """For each length: tokens, bytes of one conversation, conversations and tokens that fit.

    `size_bytes` is the size of a store (0: of this one), of which LIVE_CEILING may be in use.
    Every conversation is counted with one snapshot and no block shared. Empty while there is no
    state to take the sizes from.
    """
    known = sizes(store)
    environment = store.environment
    room = int((size_bytes or environment.map_pages * environment.page_size) * LIVE_CEILING)
    if known is None:
        return []
    table = []
    for tokens in LENGTHS:
        each = known.of(tokens)
        count = room // each
        table.append(
            {
                "tokens": tokens,
                "bytes": each,
                "conversations": count,
                "total_tokens": count * tokens,
            }
        )
    return table
