"""A conversation's state as pieces, and back; the token ids decide whether it may be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.model import Caches, Model
from store.codec.chain import Chain
from store.codec.header import CodecError, Piece, root
from store.codec.pack import Exporter
from store.codec.unpack import Importer
from worker_decode.hot import Held

#: KV caches grow in steps of this many tokens; a restored one has room for the next steps.
_ROOM = 256


@dataclass(frozen=True)
class Restored:
    """A verified state: `caches` hold exactly `ids`."""

    caches: Caches
    ids: list[int]
    schedule: list[list[int]]
    rope_delta: int


def restore(model: Model, pieces: Sequence[Piece], ids: Sequence[int]) -> Restored:
    """The state that `pieces` (rows in order, then the snapshot) carry, for the prompt `ids`.

    Raises CodecError where a byte is damaged, the model is another, or the token ids of the state
    are not the first of `ids`, with at least one left to feed.
    """
    if not pieces or pieces[-1].header.kind != "snapshot":
        raise CodecError("the state has no snapshot: recompute it")
    *rows, snapshot = pieces
    stop = snapshot.header.stop
    if stop >= len(ids):
        raise CodecError(f"the state holds {stop} tokens and the prompt has {len(ids)}")
    chain = Chain(root(model.fingerprint), ids, model.layout.block_tokens)
    if chain.at(stop) != snapshot.header.chain:
        raise CodecError("the state is of other token ids than the prompt's")
    capacity = (len(ids) // _ROOM + 1) * _ROOM
    importer = Importer(model.layout, model.fresh_cache(), model.fingerprint, capacity)
    for piece in rows:
        importer.add(piece)
    caches = list(importer.finish(snapshot))
    schedule = snapshot.header.extra.get("schedule")
    if not _covers(schedule, stop):
        raise CodecError("the state does not say how it was computed: recompute it")
    assert isinstance(schedule, list)
    delta = snapshot.header.extra.get("rope_delta", 0)
    if type(delta) is not int:
        raise CodecError("the state does not say where its positions stand: recompute it")
    return Restored(caches, list(ids[:stop]), schedule, delta)


def export(model: Model, held: Held) -> tuple[list[Piece], Piece]:
    """The rows that the store does not have yet, in whole blocks, and the snapshot.

    Copies everything out of the model's memory; runs on the engine's thread.
    """
    block = model.layout.block_tokens
    start = held.stored - held.stored % block
    exporter = Exporter(model.layout, held.ids, start)
    pieces = exporter.rows(held.caches, len(held.ids), last=True)
    extra = {
        "schedule": held.schedule,
        "rope_delta": held.rope_delta,
        "pending": held.pending,
    }
    return pieces, exporter.snapshot(held.caches, extra)


def nbytes_of(caches: Sequence[Any]) -> int:
    """Bytes that a cache list occupies, slack included."""
    return sum(int(cache.nbytes) for cache in caches)


def _covers(schedule: Any, tokens: int) -> bool:
    if not isinstance(schedule, list):
        return False
    total = 0
    for entry in schedule:
        if not isinstance(entry, list) or len(entry) != 2:
            return False
        if not all(type(value) is int and value > 0 for value in entry):
            return False
        total += entry[0] * entry[1]
    return total == tokens
