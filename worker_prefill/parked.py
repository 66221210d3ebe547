"""Prefills that may go on: unfinished ones, set aside for a better job or given up by their client,
and the ends of preambles, from which every prompt that begins alike may go on.

Beside them lie snapshots from inside such prompts that did not reach the decode node, since the
hand-off that was to bring them ended: the next prompt that goes on from there brings them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from engine.prefill import Prefill, expand_schedule
from store.codec.header import Piece


@dataclass(frozen=True)
class _Entry:
    run: Prefill
    nbytes: int
    since: float
    owner: str
    shared: bool = False


@dataclass(frozen=True)
class _Left:
    piece: Piece
    ids: list[int]
    """The token ids that it is the state of."""
    since: float
    owner: str


class Parked:
    """A few states of prompt beginnings, within bounds of number, bytes and seconds.

    A recurrent state cannot be cut back, so one serves only prompts that begin with exactly the
    tokens it holds, and only those of its owner. Used by the engine's thread alone.
    """

    def __init__(
        self,
        limit: int,
        nbytes: int,
        lifetime: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._bytes = nbytes
        self._lifetime = lifetime
        self._clock = clock
        self._entries: list[_Entry] = []
        self._left: list[_Left] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""
        left = sum(one.piece.payload.nbytes for one in self._left)
        return left + sum(entry.nbytes for entry in self._entries)

    def put(self, run: Prefill, nbytes: int, owner: str = "") -> bool:
        """Keep `run` as it stands, at the cost of the oldest; False where it is too large."""
        return self._put(_Entry(run, nbytes, self._clock(), owner))

    def share(self, run: Prefill, nbytes: int, owner: str = "") -> bool:
        """Keep what `run` is now, while it goes on itself, for all prompts that begin so."""
        if not self._fits(run, nbytes):
            return False
        return self._put(_Entry(run.twin(), nbytes, self._clock(), owner, shared=True))

    def _fits(self, run: Prefill, nbytes: int) -> bool:
        return bool(self.limit and run.position and nbytes <= self._bytes)

    def _put(self, entry: _Entry) -> bool:
        self._expire()
        if not self._fits(entry.run, entry.nbytes):
            return False
        while self._left and self.nbytes + entry.nbytes > self._bytes:
            del self._left[0]
        while len(self._entries) >= self.limit or self.nbytes + entry.nbytes > self._bytes:
            # An unfinished prefill is waited for; a preamble is stored elsewhere too.
            gone = next((other for other in self._entries if other.shared), self._entries[0])
            self._entries = [other for other in self._entries if other is not gone]
        self._entries.append(entry)
        return True

    def take(self, ids: Sequence[int], owner: str = "") -> Prefill | None:
        """The one that holds most of the beginning of `ids`, None without any.

        An unfinished prefill leaves; of a preamble that is shared it is a copy.
        """
        self._expire()
        fitting = [
            entry
            for entry in self._entries
            if entry.owner == owner
            and entry.run.position < len(ids)
            and entry.run.ids[: entry.run.position] == list(ids[: entry.run.position])
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda entry: entry.run.position)
        self._entries = [entry for entry in self._entries if entry is not best]
        if not best.shared:
            return best.run
        self._entries.append(replace(best, since=self._clock()))
        return best.run.twin()

    def leave(self, pieces: Sequence[Piece], ids: Sequence[int], owner: str = "") -> None:
        """Keep snapshots at beginnings of `ids` that have not reached the decode node.

        They take what room there is, and give way to everything else.
        """
        self._expire()
        for piece in pieces:
            if self.limit and self.nbytes + piece.payload.nbytes <= self._bytes:
                told = list(ids[: piece.header.stop])
                self._left.append(_Left(piece, told, self._clock(), owner))

    def claim(self, run: Prefill, owner: str, wanted: Collection[int]) -> list[Piece]:
        """The snapshots at positions `wanted` that were left where `run` has passed, in order.

        They are the caller's now, to be sent or left again. Only those of the same forwards as
        the state of `run`: its rows and they are stored together.
        """
        self._expire()
        mine = [one for one in self._left if _is_of(one, run, owner) and len(one.ids) in wanted]
        self._left = [one for one in self._left if not any(one is other for other in mine)]
        by_place = {len(one.ids): one.piece for one in mine}
        return [by_place[place] for place in sorted(by_place)]

    def _expire(self) -> None:
        oldest = self._clock() - self._lifetime
        self._left = [one for one in self._left if one.since >= oldest]
        self._entries = [entry for entry in self._entries if entry.since >= oldest]


def _is_of(left: _Left, run: Prefill, owner: str) -> bool:
    """Whether a snapshot is what the state of `run` was when it stood there."""
    stop = len(left.ids)
    if left.owner != owner or stop > run.position or run.ids[:stop] != left.ids:
        return False
    lengths = expand_schedule(left.piece.header.extra.get("schedule") or ())
    return sum(lengths) == stop and run.schedule[: len(lengths)] == lengths
