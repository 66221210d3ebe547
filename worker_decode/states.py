"""A conversation's state as pieces, and back; the token ids decide whether it may be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.model import Caches, Model
from engine.names import SEEN
from engine.prefill import append_schedule, ends_of
from store.codec.chain import Chain
from store.codec.header import CodecError, Header, Piece, root
from store.codec.pack import Exporter
from store.codec.stored import Stored
from store.codec.unpack import Importer
from store.loading import StateReader
from store.prefixes import ends_in
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
    early: int = 0
    """How many of the tokens were in the arrays before somebody asked for them."""


class Restoring:
    """A state that is being put into its arrays; used on the engine's thread."""

    def __init__(self, model: Model, tokens: int) -> None:
        """There is room for `tokens` tokens, and some of the next ones."""
        self._model = model
        self._importer = _importer(model, tokens)
        self.capacity = _capacity(tokens)

    def add(self, rows: Sequence[Piece]) -> None:
        """Put the next rows to their places, checked but for their token ids.

        Raises CodecError; nothing can be made of this any more then.
        """
        self._importer.add_all(rows)

    def finish(self, rows: Sequence[Piece], snapshot: Piece, ids: Sequence[int]) -> Restored:
        """The state, with the last rows and the snapshot, for the prompt `ids`. Raises CodecError
        as `restore` does."""
        if snapshot.header.kind != "snapshot":
            raise CodecError("the state has no snapshot: recompute it")
        _told(self._model, snapshot.header, ids)
        self._importer.add_all(rows)
        return _restored(self._model, self._importer, snapshot, ids)


def restore(model: Model, pieces: Sequence[Piece], ids: Sequence[int]) -> Restored:
    """The state that `pieces` (rows in order, then the snapshot) carry, for the prompt `ids`.

    Raises CodecError where a byte is damaged, the model is another, or the token ids of the state
    are not the first of `ids`, with at least one left to feed.
    """
    if not pieces:
        raise CodecError("the state has no snapshot: recompute it")
    return Restoring(model, len(ids)).finish(pieces[:-1], pieces[-1], ids)


def load(model: Model, reader: StateReader, ids: Sequence[int]) -> Restored | None:
    """As `restore`, for a stored state, whose bytes are copied once, from the map to their place.

    Returns None where a stored byte is damaged; the reader's report says which.
    """
    if reader.objects:  # before anything is read: the chain is checked again with the bytes
        _begins(model, reader.ref.tokens, reader.objects[-1][1].chain, ids)
    importer = _importer(model, len(ids))

    def take(rows: Iterator[Stored], snapshot: Stored | None) -> Restored:
        if snapshot is None:
            raise CodecError("the state has no snapshot: recompute it")
        schedule, delta = _told(model, snapshot.header, ids)
        stop = snapshot.header.stop
        return Restored(list(importer.restore(rows, snapshot)), list(ids[:stop]), schedule, delta)

    return reader.feed(take)


def load_rows(
    model: Model, reader: StateReader, ids: Sequence[int], tokens: int
) -> Restored | None:
    """As `load`, for rows without a snapshot, of which the first `tokens` are used: a forward
    ended there. Raises CodecError where the rows do not tell their forwards, or hold an image,
    after which positions stand otherwise than rows alone tell."""
    if max(ids[:tokens]) >= model.vocab_size:
        raise CodecError("there are images in what is stored: recompute it")
    if reader.objects:
        _begins(model, reader.ref.tokens, reader.objects[-1][1].chain, ids)
    if model.mrope and any(token >= SEEN for token in ids[:tokens]):
        raise CodecError("rows with images do not say where their positions stand: recompute them")
    importer = _importer(model, len(ids))
    ends: list[int] = []

    def noted(rows: Iterator[Stored]) -> Iterator[Stored]:
        for piece in rows:
            header = piece.header
            ends.extend(header.start + end for end in ends_in(header.extra))
            yield piece

    def take(rows: Iterator[Stored], _: object) -> Restored:
        importer.draw(noted(rows))
        used = [end for end in ends if end <= tokens]
        if not used or used[-1] != tokens:
            raise CodecError(f"no forward ended at token {tokens}: recompute it")
        schedule: list[list[int]] = []
        for start, end in pairwise([0, *used]):
            append_schedule(schedule, end - start)
        return Restored(list(importer.finish_rows(tokens)), list(ids[:tokens]), schedule, 0)

    return reader.feed(take)


def _importer(model: Model, tokens: int) -> Importer:
    return Importer(model.layout, model.fresh_cache(), model.fingerprint, _capacity(tokens))


def _capacity(tokens: int) -> int:
    return (tokens // _ROOM + 1) * _ROOM


def _restored(model: Model, importer: Importer, snapshot: Piece, ids: Sequence[int]) -> Restored:
    header = snapshot.header
    schedule, delta = _told(model, header, ids)
    return Restored(list(importer.finish(snapshot)), list(ids[: header.stop]), schedule, delta)


def _told(model: Model, header: Header, ids: Sequence[int]) -> tuple[list[list[int]], int]:
    """Schedule and rope delta of a snapshot that is one of the first of `ids`."""
    _begins(model, header.stop, header.chain, ids)
    schedule = header.extra.get("schedule")
    if not _covers(schedule, header.stop):
        raise CodecError("the state does not say how it was computed: recompute it")
    assert isinstance(schedule, list)
    delta = header.extra.get("rope_delta", 0)
    if type(delta) is not int:
        raise CodecError("the state does not say where its positions stand: recompute it")
    return schedule, delta


def _begins(model: Model, stop: int, chain: bytes, ids: Sequence[int]) -> None:
    """Raise CodecError unless a state of `stop` tokens with hash `chain` begins `ids`."""
    if stop >= len(ids):
        raise CodecError(f"the state holds {stop} tokens and the prompt has {len(ids)}")
    if Chain(root(model.fingerprint), ids, model.layout.block_tokens).at(stop) != chain:
        raise CodecError("the state is of other token ids than the prompt's")


def export(model: Model, held: Held) -> tuple[list[Piece], Piece]:
    """The rows that the store does not have yet, in whole blocks, and the snapshot.

    Copies everything out of the model's memory; runs on the engine's thread.
    """
    block = model.layout.block_tokens
    start = held.stored - held.stored % block
    exporter = Exporter(model.layout, held.ids, start)
    ends = ends_of(held.schedule)
    pieces = exporter.rows(held.caches, len(held.ids), last=True, ends=ends)
    extra = {
        "schedule": held.schedule,
        "rope_delta": held.rope_delta,
        "pending": held.pending,
    }
    return pieces, exporter.snapshot(held.caches, extra)


class Copy:
    """A whole state on its way out of the model's memory; used on the engine's thread."""

    def __init__(self, model: Model, held: Held) -> None:
        """`held` must stay as it is until the copy is complete."""
        self.held = held
        self.pieces: list[Piece] = []
        self._layout = model.layout
        self._exporter = Exporter(model.layout, held.ids)

    def more(self, nbytes: int) -> bool:
        """Copy rows of about so many bytes, and after the last ones the snapshot; True then."""
        layout, held, exporter = self._layout, self.held, self._exporter
        block = layout.block_tokens
        step = max(1, nbytes // max(1, layout.row_bytes * block)) * block
        stop = min(len(held.ids), exporter.position + step)
        last = stop == len(held.ids)
        ends = ends_of(held.schedule)
        self.pieces += exporter.rows(held.caches, stop, last=last, ends=ends)
        if last:
            extra = {"schedule": held.schedule, "rope_delta": held.rope_delta}
            self.pieces.append(exporter.snapshot(held.caches, extra))
        return last


def beginning(model: Model, held: Held, stop: int) -> list[Piece]:
    """The rows of the first `stop` tokens of a state, copied out on the engine's thread."""
    return Exporter(model.layout, held.ids).rows(held.caches, stop, last=True)


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
