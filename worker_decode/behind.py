"""States that a later turn has gone on from, kept for branches and for answers asked for again.

A turn that goes on takes its parent's caches over. Of the parent all that is overwritten is kept
here, by reference; its rows are the first of those of whatever turn went on, wherever that is. So
a parent costs what its snapshot takes, and nothing where the state is rows alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.model import Caches, Model
from store.codec.twin import Kept, keep, kept_bytes, restore_kept
from worker_decode.hot import Held, Hot
from worker_decode.marks import MOST_SNAPSHOT
from worker_decode.memory import Memory
from worker_decode.states import nbytes_of

MOST = 8
"""States kept behind one turn; of more the oldest go."""


@dataclass
class _Left:
    """`held` without its caches; its rows are the first of those of the turn `heir`."""

    held: Held
    kept: list[Kept]
    nbytes: int
    heir: str
    since: float = field(default_factory=time.monotonic)


class Behind:
    """Parents by turn. Used by the engine's thread alone."""

    def __init__(
        self, model: Model, hot: Hot, memory: Memory, running: Callable[[str], Caches | None]
    ) -> None:
        """`running(turn)` gives the caches of a turn whose answer is under way, or None."""
        self._model = model
        self._hot = hot
        self._memory = memory
        self._running = running
        self._left: dict[str, _Left] = {}

    def __len__(self) -> int:
        return len(self._left)

    def leave(self, held: Held, heir: str) -> None:
        """The turn `heir` goes on from `held`, whose caches have not changed yet."""
        self.drop(held.turn)
        for left in self._of(held.turn):
            left.heir = heir
        kept = keep(self._model.layout, held.caches)
        nbytes = kept_bytes(kept)
        self._memory.take(nbytes)
        self._left[held.turn] = _Left(replace(held, caches=[]), kept, nbytes, heir)
        for left in self._of(heir)[:-MOST]:
            self.drop(left.held.turn)

    def tokens(self, turn: str) -> int:
        """How many tokens the state after `turn` holds; 0 where it is not here."""
        left = self._left.get(turn)
        return 0 if left is None else len(left.held.ids)

    def find(self, turn: str) -> Held | None:
        """The state after `turn` in caches of its own, or None; it stays here."""
        left = self._left.get(turn)
        if left is None:
            return None
        heir = self._hot.get(left.heir)
        rows = heir.caches if heir is not None else self._running(left.heir)
        if rows is None:
            return None
        left.since = time.monotonic()
        return self._made(left, rows)

    def come_back(self, heir: str, caches: Caches) -> str | None:
        """The turn `heir` is given up: the last state before it is held in memory again.

        `caches` are those of `heir` as it was. Returns the turn that came back.
        """
        behind = self._of(heir)
        if not behind:
            return None
        last = behind[-1]
        held = self._made(last, caches)
        self.drop(last.held.turn)
        for left in behind[:-1]:
            left.heir = held.turn
        self._hot.put(held)
        return held.turn

    def worth_storing(self, heir: str) -> list[Held]:
        """Those behind a turn whose snapshot saves more work than its bytes are worth, oldest
        first, as they are to be saved once `heir` is: its rows are stored by then.

        The last one counts first, since the last message is the one that is edited or answered
        again. None where the state is rows alone: it is found within the rows of `heir`.
        """
        layout, held = self._model.layout, self._hot.get(heir)
        if held is None or layout.rows_alone:
            return []
        behind = self._of(heir)
        places = {len(left.held.ids) for left in behind if left.held.stored >= len(left.held.ids)}
        chosen: list[Held] = []
        for left in reversed(behind):
            tokens = len(left.held.ids)
            lower = max((place for place in places if place < tokens), default=0)
            upper = min((place for place in places if place > tokens), default=None)
            gain = layout.rows_bytes(lower, tokens)
            if upper is not None:
                gain = min(gain, layout.rows_bytes(tokens, upper))
            if tokens not in places and left.nbytes <= MOST_SNAPSHOT * gain:
                places.add(tokens)
                chosen.append(replace(self._made(left, held.caches), stored=tokens, base=heir))
        return chosen[::-1]

    def gone(self, heir: str) -> None:
        """A turn has left memory, and the rows of what is behind it with it."""
        for left in self._of(heir):
            self.drop(left.held.turn)

    def drop(self, turn: str) -> None:
        """Forget one; harmless where it is not here."""
        left = self._left.pop(turn, None)
        if left is not None:
            self._memory.release(left.nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give back at least `nbytes`, the longest unused first, as far as there is any."""
        for left in sorted(self._left.values(), key=lambda left: left.since):
            if nbytes <= 0:
                return
            if left.nbytes:
                self.drop(left.held.turn)
                nbytes -= left.nbytes

    def _of(self, heir: str) -> list[_Left]:
        found = [left for left in self._left.values() if left.heir == heir]
        return sorted(found, key=lambda left: len(left.held.ids))

    def _made(self, left: _Left, rows: Caches) -> Held:
        model, tokens = self._model, len(left.held.ids)
        caches = list(restore_kept(model.layout, rows, left.kept, model.fresh_cache(), tokens))
        held = left.held
        return replace(
            held, caches=caches, ids=list(held.ids), nbytes=nbytes_of(caches),
            used=time.monotonic(),
        )  # fmt: skip
