"""States on their way here, put into their arrays before their jobs come to take them.

Rows arrive while the prompt is computed, or while the answer is said, on another node. What is
unpacked meanwhile does not delay the first token that is said here: at the end only the last rows
and the snapshot are left. Nothing is believed sooner for it: digests, order and the chain of token
ids are checked as ever, and a state counts only once all of it stands against the job's own ids.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.model import Model
from store.codec.header import CodecError, Piece
from worker_decode.inbox import Arrival, Inbox
from worker_decode.memory import Memory
from worker_decode.states import Restored, Restoring, restore

log = logging.getLogger("tandem.decode")

#: Bytes that are unpacked at once: while rows are decoded, and while there are none.
_BETWEEN, _IDLE = 4 << 20, 16 << 20
#: Tokens for which there is room beyond those that are here or offered, at least.
_BEYOND = 256


@dataclass
class _Begun:
    arrival: Arrival
    restoring: Restoring | None
    """None once it has failed: nothing can be made of what is here."""
    nbytes: int
    seen: int = 0
    """How many of the arrival's pieces were looked at."""
    rows: int = 0
    """How many of these were rows, which are in the arrays now."""


class Early:
    """Unpacks what is in the inbox. Used by the engine's thread alone.

    Its arrays come out of the budget for state that waits, and give way to whoever waits for that.
    """

    def __init__(self, model: Model, inbox: Inbox, memory: Memory) -> None:
        self._model = model
        self._inbox = inbox
        self._memory = memory
        self._begun: dict[str, _Begun] = {}

    def look_after(self, room: int, *, busy: bool) -> bool:
        """Unpack a little of what has come; True when more could be done at once.

        `room`: how many more rows can be decoded: no more states than that are unpacked.
        """
        arrivals = self._inbox.arrivals()
        if not arrivals and not self._begun:
            return False
        for name, begun in list(self._begun.items()):
            if arrivals.get(name) is not begun.arrival:
                self._drop(name)
        if self._memory.wanted or self._memory.used > self._memory.limit:
            for name in list(self._begun):
                self._drop(name)
            return False
        for name, arrival in list(arrivals.items())[:room]:
            found = self._begun.get(name) or self._begin(name, arrival)
            if found is not None and self._go_on(name, found, _BETWEEN if busy else _IDLE):
                return True
        return False

    def restore(self, pieces: list[Piece], rows: Sequence[Piece], ids: Sequence[int]) -> Restored:
        """The state of an arrival that the inbox has given out as `pieces`, of which `rows` are
        the rows: only what has not been unpacked yet is. Raises CodecError as `restore` does."""
        begun = self._taken(pieces)
        restoring = None if begun is None else begun.restoring
        if begun is None or restoring is None or restoring.capacity < pieces[-1].header.stop:
            return restore(self._model, [*rows, pieces[-1]], ids)
        state = restoring.finish(rows[begun.rows :], pieces[-1], ids)
        return replace(state, early=rows[begun.rows - 1].header.stop if begun.rows else 0)

    def _taken(self, pieces: list[Piece]) -> _Begun | None:
        """What was begun with these pieces; it is the caller's now."""
        for name, begun in self._begun.items():
            if begun.arrival.pieces is pieces:
                self._drop(name)
                return begun
        return None

    def _begin(self, name: str, arrival: Arrival) -> _Begun | None:
        """Take memory for a state of which something is here; None where that may not be."""
        if not arrival.pieces or arrival.pieces[0].header.start:
            return None  # nothing yet, or what continues a state that is here
        here = arrival.pieces[-1].header.stop
        tokens = max(arrival.tokens, here + here // 8) + _BEYOND
        nbytes = self._model.layout.state_bytes(tokens)
        if not self._memory.spare(nbytes):
            return None
        begun = _Begun(arrival, Restoring(self._model, tokens), nbytes)
        self._begun[name] = begun
        return begun

    def _go_on(self, name: str, begun: _Begun, most: int) -> bool:
        """Unpack about `most` bytes; True where some are left."""
        restoring = begun.restoring
        if restoring is None:
            return False
        pieces, took, new = begun.arrival.pieces, 0, []
        while begun.seen < len(pieces) and took < most:
            piece = pieces[begun.seen]
            if piece.header.stop > restoring.capacity:
                self._drop(name)  # a long answer: begun anew, with more room
                return self._begin(name, begun.arrival) is not None
            begun.seen += 1
            if piece.header.kind == "rows":  # the last snapshot waits for the job's own ids
                new.append(piece)
                took += piece.payload.nbytes
        if not new:
            return False
        try:
            restoring.add(new)
        except CodecError as error:  # who takes it tries all of it again, and tells
            log.warning("the state of %s, as far as it is here: %s", begun.arrival.response, error)
            self._memory.release(begun.nbytes)
            begun.restoring, begun.nbytes = None, 0
            return False
        begun.rows += len(new)
        return begun.seen < len(pieces)

    def _drop(self, name: str) -> None:
        self._memory.release(self._begun.pop(name).nbytes)
