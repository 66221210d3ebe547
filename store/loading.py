"""Loading a state: pieces copied out of the map and verified, in order of their tokens.

Every part is read in a short transaction of its own and nothing of the map outlives it, so a slow
reader neither keeps freed pages from being reused nor sees them reused under it. The copy is what
is verified. Damage ends the reader early: what it gave before is the longest verified prefix.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np

from store import cold
from store.blocks import Blocks
from store.codec.header import CodecError, Header, Piece
from store.codec.parted import CAN_SCATTER, Parted, Placed, Seal
from store.environment import Environment, Txn
from store.errors import StoreError
from store.heads import Heads
from store.objects import KINDS, ROWS, Record
from store.parts import PART_BYTES, part_seed, seal
from store.states import Pins, StateRef

log = logging.getLogger(__name__)
T = TypeVar("T")
_DAMAGED = object()
BATCH_BYTES = 256 << 20
"""Rows given at once, in one transaction: enough for all threads that copy to be busy, and little
enough that pages freed meanwhile are soon used again."""
_LOOK = 8
"""Of so many values one is looked at to find out whether a state is in memory."""

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
    cold: bool = False
    """Whether the disk had to be asked."""

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
        blocks: Blocks,
        heads: Heads,
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
        self._blocks = blocks
        self._heads = heads
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
            piece = self._read(ident, record)
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

    def feed(
        self,
        consume: Callable[[Sequence[Piece]], None],
        finish: Callable[[Piece | Parted | None], T],
        batch: int = 256,
    ) -> T | None:
        """Give all rows to `consume` and the snapshot to `finish` without a copy in between;
        `finish` gets None where only rows are read.

        `consume` gets up to `batch` pieces of at most BATCH_BYTES in order. Both must verify and
        copy them (as the codec's importer does) and keep no view of them: most are views of the
        map that end with the call. Returns what `finish` gives, or None if something is damaged
        (see `report`): then what was made is unfit for use, and a new reader, iterated, gives the
        longest verified prefix. Raises CodecError where the bytes are as they were saved and are
        refused.
        """
        began = time.perf_counter()
        result: T | None = None
        try:
            self._bring()
            count = sum(record.kind == ROWS for _, record in self.objects)
            while self._at < count and not self.report.damage:
                rows = self._batch(count, batch)
                if self._lend(rows, consume) is not _DAMAGED:
                    self.report.tokens = rows[-1][1].stop
                self._at += len(rows)
            if self.report.damage:
                return None
            last = self.objects[count:]
            if not last:
                return finish(None) if count else None
            given = self._lend(last, lambda pieces: finish(pieces[0]))
            if given is not _DAMAGED:
                result = cast(T, given)
                self.report.snapshot = True
        finally:
            self.close()
            self.report.seconds += time.perf_counter() - began
        return result

    def _batch(self, stop: int, most: int) -> list[tuple[bytes, Record]]:
        """The next objects before `stop`, at least one, in all at most BATCH_BYTES."""
        end, nbytes = self._at, 0
        while end < min(stop, self._at + most):
            nbytes += self.objects[end][1].nbytes
            if nbytes > BATCH_BYTES and end > self._at:
                break
            end += 1
        return self.objects[self._at : end]

    def _lend(
        self, objects: list[tuple[bytes, Record]], consume: Callable[[Any], object]
    ) -> object:
        """What `consume` makes of views of some objects, or _DAMAGED."""
        ident, pieces = b"", []
        with self._environment.read() as txn:
            try:
                for ident, record in objects:
                    pieces.append(self._viewed(txn, ident, record))
                result = consume(pieces)
            except (StoreError, CodecError) as error:
                if self._survey():
                    return _DAMAGED
                if isinstance(error, CodecError) and len(pieces) == len(objects):
                    raise  # every byte is as it was saved: refused for other reasons
                self._damage(ident, error)
                return _DAMAGED
            finally:
                for piece in pieces:
                    (piece if isinstance(piece, Parted) else piece.payload).release()
        self.report.nbytes += sum(record.nbytes for _, record in objects)
        return result

    def _viewed(self, txn: Txn, ident: bytes, record: Record) -> Piece | Parted:
        """An object whose payload lies in the map where it is large, for others to verify."""
        header = self._header(txn, ident, record)
        if record.small:
            return Piece(header, memoryview(self._blocks.small_payload(txn, ident, record)))
        if record.parts > 1 and header.kind == "rows":
            return Piece(header, self._payload(ident, record))  # of a model with very wide rows
        parts = self._blocks.values.view(txn, ident, record)
        places = self._blocks.values.places(parts) if CAN_SCATTER else []
        if len(parts) == 1:
            view = parts[0].view
            return Placed(header, view, places[0]) if places else Piece(header, view)
        seals = tuple(Seal(part_seed(part.head), part.digest) for part in parts)
        return Parted(header, tuple(part.view for part in parts), tuple(places), seals)

    def _bring(self) -> None:
        """Where a few values looked at are not in memory, have the disk read all of them."""
        if not cold.READ_AHEAD:
            return
        large = [ident for ident, record in self.objects if record.parts]
        fd = self._environment.data_fd
        try:
            with self._environment.read() as txn:
                some = [
                    span
                    for ident in {*large[::_LOOK], *large[-1:]}
                    for span in self._blocks.spans(txn, ident)[::_LOOK]
                ]
                if cold.resident_of(fd, some) >= sum(length for _, length in some):
                    return
                spans = [span for ident in large for span in self._blocks.spans(txn, ident)]
        except StoreError as error:
            log.info("cold values are not looked for: %s", error)
            return
        log.info("state of %s is cold: %d values are read", self.ref.turn, len(spans))
        self.report.cold = True
        cold.bring(fd, spans)

    def _survey(self) -> bool:
        """Verify all that is left: where one object is damaged others may be, and what is noted now
        is written anew with the next save of these tokens. Whether anything is wrong."""
        before = len(self.report.damage)
        for ident, record in self.objects[self._at :]:
            try:
                with self._environment.read() as txn:
                    piece = self._viewed(txn, ident, record)
                    try:
                        piece.verify()
                    finally:
                        (piece if isinstance(piece, Parted) else piece.payload).release()
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

    def _header(self, txn: Txn, ident: bytes, record: Record) -> Header:
        """The header of an object, checked against its record and the turn's token ids."""
        header, ids = self._heads.get(txn, ident, record)
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
        return header

    def _read(self, ident: bytes, record: Record) -> Piece:
        with self._environment.read() as txn:
            header = self._header(txn, ident, record)
        return Piece(header, self._payload(ident, record))

    def _payload(self, ident: bytes, record: Record) -> memoryview:
        """The payload of an object in memory of its own, verified."""
        payload = self._buffers(record.nbytes)
        if record.small:
            with self._environment.read() as txn:
                payload[:] = self._blocks.small_payload(txn, ident, record)
            return payload
        # Several threads were measured here and gain nothing over one.
        digests = []
        for number in range(record.parts):
            into = payload[number * PART_BYTES : (number + 1) * PART_BYTES]
            with self._environment.read() as txn:
                digests.append(self._blocks.values.copy(txn, ident, record, number, into))
        if seal(digests) != record.seal:
            raise StoreError(f"the parts of block {ident.hex()} are not those that were saved")
        return payload

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
