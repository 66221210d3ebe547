"""Loading a state: pieces brought from the data file and verified, in order of their tokens.

No transaction lasts longer than one look at a value and nothing of the map outlives it, so a slow
reader neither keeps freed pages from being reused nor sees them reused under it. The copy is what
is verified. Damage ends the reader early: what it gave before is the longest verified prefix.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import numpy as np

from store.codec.header import CodecError, Piece
from store.codec.stored import Stored
from store.environment import Environment
from store.errors import StoreError
from store.objects import KINDS, ROWS, Record
from store.places import Places
from store.states import Pins, StateRef

log = logging.getLogger(__name__)
T = TypeVar("T")

Buffers = Callable[[int], memoryview]
"""Gives writable memory of exactly the asked number of bytes."""


def plain_buffer(nbytes: int) -> memoryview:
    """Fresh memory from the heap."""
    return np.empty(nbytes, np.uint8).data


@dataclass(slots=True)
class LoadReport:
    """What a reader has given so far. `tokens` positions of rows are verified."""

    turn: str
    wanted: int
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    snapshot: bool = False
    damage: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All rows and then the snapshot were given and verified."""
        return self.snapshot and not self.damage


class StateReader:
    """An iterator over the pieces of one stored state: rows in order, then the snapshot.

    The state is pinned against eviction until the reader is exhausted, closed or collected. Use it
    as a context manager. `report` tells how far it came.
    """

    def __init__(
        self,
        environment: Environment,
        places: Places,
        pins: Pins,
        ref: StateRef,
        objects: list[tuple[bytes, Record]],
        ids: bytes,
        buffers: Buffers,
        note_damage: Callable[[bytes], None],
    ) -> None:
        self.ref = ref
        self.report = LoadReport(turn=ref.turn, wanted=ref.tokens)
        self._environment = environment
        self._places = places
        self.objects = objects
        self._ids = ids
        self._buffers = buffers
        self._note_damage = note_damage
        self._at = 0
        pins.add(ref.turn)
        self._release = weakref.finalize(self, pins.remove, ref.turn)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._at >= len(self.objects) or self.report.damage:
            self.close()
            raise StopIteration
        ident, record = self.objects[self._at]
        began = time.perf_counter()
        try:
            piece = self._stored(ident, record).piece(self._buffers(record.nbytes))
        except (StoreError, CodecError) as error:
            if self._damage(ident, error):
                self._at += 1
                self._survey()
            self.close()
            raise StopIteration from None
        self._at += 1
        self.report.seconds += time.perf_counter() - began
        self.report.nbytes += record.nbytes
        if piece.header.kind == "snapshot":
            self.report.snapshot = True
            self.close()
        else:
            self.report.tokens = record.stop
        return piece

    def feed(self, take: Callable[[Iterator[Stored], Stored | None], T]) -> T | None:
        """Give all rows in order, and the snapshot if there is one, to be brought to their place
        without a copy in between.

        `take` must bring every part of all of them (as the codec's importer does), in any threads;
        each of the rows is looked up when it is drawn. Returns what `take` returns, or None if
        something is damaged (see `report`): then what was made is unfit for use, and a new reader,
        iterated, gives the longest verified prefix. Raises CodecError where the bytes are as they
        were saved and are refused.
        """
        began = time.perf_counter()
        if self.report.damage or not self.objects:
            self.close()
            return None
        count = sum(record.kind == ROWS for _, record in self.objects)
        try:
            last = self.objects[count:]
            rows = (self._stored(ident, record) for ident, record in self.objects[:count])
            result = take(rows, self._stored(*last[0]) if last else None)
        except (StoreError, CodecError) as error:
            if self._survey():
                return None
            if isinstance(error, CodecError):
                raise  # every byte is as it was saved: refused for other reasons
            self.report.damage.append(str(error))
            return None
        finally:
            self.close()
            self.report.seconds += time.perf_counter() - began
        self.report.tokens = self.ref.tokens
        self.report.nbytes = sum(record.nbytes for _, record in self.objects)
        self.report.snapshot = bool(last)
        return result

    def _survey(self) -> bool:
        """Verify all that is left: where one object is damaged others may be, and what is noted now
        is written anew with the next save of these tokens. Whether anything is wrong."""
        before = len(self.report.damage)
        for ident, record in self.objects[self._at :]:
            try:
                self._stored(ident, record).verify()
            except (StoreError, CodecError) as error:
                if not self._damage(ident, error):
                    break
        return len(self.report.damage) > before

    def _damage(self, ident: bytes, error: Exception) -> bool:
        """Note that an object cannot be read; False where it is not there any more."""
        with self._environment.read() as txn:
            if txn.get(ident, db=self._environment.blk) is None:
                # Rows without a state's pin on them may be evicted while they are read.
                self.report.damage.append(f"block {ident.hex()} was evicted meanwhile")
                return False
        self.report.damage.append(str(error))
        self._note_damage(ident)
        log.error("state of %s: %s; the rest is a miss", self.ref.turn, error)
        return True

    def _stored(self, ident: bytes, record: Record) -> Stored:
        """An object to be brought, its header checked against its record and the token ids."""
        stored, ids = self._places.stored(ident, record)
        header = stored.header
        if ids != self._ids[4 * record.start : 4 * record.stop]:
            raise StoreError(f"block {ident.hex()} was saved for other token ids")
        if (
            KINDS[header.kind], header.start, header.stop, header.nbytes, header.chain,
            header.fingerprint,
        ) != (
            record.kind, record.start, record.stop, record.nbytes, record.chain,
            self.ref.fingerprint,
        ):  # fmt: skip
            raise StoreError(f"the header of block {ident.hex()} contradicts its record")
        return stored

    def skip(self, known: set[bytes]) -> None:
        """Leave out objects that the caller has read before (call before the first piece)."""
        self.objects = [entry for entry in self.objects if entry[0] not in known]

    def close(self) -> None:
        """Release the pin; more pieces are not given. Calling it twice is harmless."""
        self._at = len(self.objects)
        self._release()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
