"""One transfer on its way in: geometry, the memory grant, verification, hand-over in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from store.codec.header import Piece, parse
from transport.errors import Code, LinkError
from transport.frame import SNAPSHOT, Frame, header_digest
from transport.protocol import Offer
from transport.sink import Grant, Refusal, Sink

State = Literal["admitting", "open", "committing", "done", "dead"]
MAX_HEADERS = 256 << 20
"""All piece headers of one transfer together: they are not part of the grant."""


@dataclass(slots=True)
class _Incoming:
    kind: int
    payload: int
    buffer: memoryview
    seen: set[int] = field(default_factory=set)
    header: bytes | None = None
    landed: set[int] = field(default_factory=set)
    hashing: bool = False
    hashed: int = 0
    hasher: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


class Inbound:
    """State of one attempt. Thread-safe; of the sink's methods only `buffer` runs under the lock.

    `on_end(inbound, code, reason)` is called exactly once, when the sink has refused or has been
    told done (code None) or abort: only then may the same transfer be admitted again.
    """

    def __init__(
        self,
        offer: Offer,
        sink: Sink,
        part: int,
        on_end: Callable[[Inbound, Code | None, str], None],
    ) -> None:
        self.offer = offer
        self.part = part
        self.settled = threading.Event()
        self.nbytes = 0
        self.expires = float("inf")
        self._sink = sink
        self._on_end = on_end
        self._lock = threading.Lock()
        self._state: State = "admitting"
        self._busy = 0
        self._grant = 0
        self._headers = 0
        self._pieces: dict[int, _Incoming] = {}
        self._started: set[int] = set()
        self._verified: dict[int, Piece] = {}
        self._next = 0
        self._last: int | None = None
        self._delivering = False
        self._told = False
        self._reason: tuple[Code, str] = ("failed", "")

    def admit(self) -> Grant | None:
        """Ask the sink; None if it refused or the transfer was given up meanwhile."""
        try:
            answer = self._sink.admit(self.offer)
        except Exception as error:  # the sink's own failure must not take the link down
            answer = Refusal(f"admission failed: {error}", "failed")
        if isinstance(answer, Refusal):
            with self._lock:
                self._state = "dead"
            self._end(answer.code, answer.reason)
            return None
        with self._lock:
            if self._state == "admitting":
                self._state = "open"
                self._grant = answer.nbytes
                self.expires = time.monotonic() + answer.seconds
                return answer
        self._settle()
        return None

    def abort(self, code: Code, reason: str) -> bool:
        """Give the transfer up; False if it is past that point (done, committing or dead)."""
        with self._lock:
            if self._state not in ("admitting", "open"):
                return False
            admitting = self._state == "admitting"
            self._state = "dead"
            self._reason = (code, reason)
            settle = self._busy == 0 and not admitting
        if settle:
            self._settle()
        return True

    def claim(self, frame: Frame) -> memoryview | None:
        """Where a part's payload goes; None if the transfer is dead and the part is dropped.

        Every successful claim must be followed by `landed` or `lost`. Raises LinkError if the
        frame does not fit what was agreed; nothing is allocated before it was found to fit.
        """
        with self._lock:
            if self._state == "admitting":
                raise LinkError("payload came before READY", "protocol")
            if self._state != "open":
                return None
            self._headers += frame.header
            if self._headers > MAX_HEADERS:
                raise LinkError("piece headers of this transfer exceed their bound", "protocol")
            incoming = self._pieces.get(frame.sequence)
            fresh = incoming is None
            if fresh:
                self._charge(frame)
            elif incoming is not None and (incoming.kind, incoming.payload) != (
                frame.kind,
                frame.payload,
            ):
                raise LinkError("two parts of one piece disagree about it", "protocol")
            self._check_part(frame, incoming)
            self._busy += 1
            if incoming is None:
                try:
                    incoming = self._allocate(frame)
                except BaseException:
                    self._busy -= 1
                    raise
            incoming.seen.add(frame.offset)
            return incoming.buffer[frame.offset : frame.offset + frame.length]

    def _charge(self, frame: Frame) -> None:
        if frame.sequence in self._started:
            raise LinkError(f"piece {frame.sequence} came twice", "protocol")
        if self._last is not None and frame.sequence > self._last:
            raise LinkError("a piece came after the snapshot", "protocol")
        if frame.kind == SNAPSHOT and (self._last is not None or self._started_beyond(frame)):
            raise LinkError("the snapshot is not the last piece", "protocol")
        if self.nbytes + frame.payload > self._grant:
            raise LinkError(
                f"{self.nbytes + frame.payload} payload bytes exceed the grant of {self._grant}",
                "memory",
            )

    def _started_beyond(self, frame: Frame) -> bool:
        return any(sequence > frame.sequence for sequence in self._started)

    def _check_part(self, frame: Frame, incoming: _Incoming | None) -> None:
        if frame.offset % self.part or frame.length != min(self.part, frame.payload - frame.offset):
            raise LinkError("part boundaries differ from the agreed part size", "protocol")
        if incoming is not None and frame.offset in incoming.seen:
            raise LinkError(f"part {frame.offset} of piece {frame.sequence} came twice", "protocol")

    def _allocate(self, frame: Frame) -> _Incoming:
        # Under the lock: buffers are asked for one at a time, so the sink sees one caller.
        size = frame.payload
        try:
            buffer = (
                self._sink.buffer(self.offer.transfer, size) if size else memoryview(bytearray())
            )
        except Exception as error:
            raise LinkError(f"no buffer: {error}", "failed") from None
        if buffer.readonly or buffer.nbytes != size or buffer.itemsize != 1:
            raise LinkError("the sink's buffer is not writable uint8 of the right size", "failed")
        incoming = _Incoming(frame.kind, size, buffer)
        self._pieces[frame.sequence] = incoming
        self._started.add(frame.sequence)
        self.nbytes += size
        if frame.kind == SNAPSHOT:
            self._last = frame.sequence
        return incoming

    def lost(self, code: Code, reason: str) -> None:
        """A claimed part will not come (its connection broke): the transfer is over."""
        self.abort(code, reason)
        self._leave()

    def landed(self, frame: Frame, header: bytes) -> None:
        """A claimed part is in its buffer. Verifies and hands over what this completes."""
        try:
            incoming = self._land(frame, header)
            if incoming is not None:
                piece = _verify(incoming)
                with self._lock:
                    self._verified[frame.sequence] = piece
                    del self._pieces[frame.sequence]
                self._deliver()
        except LinkError as error:
            self.abort(error.code, str(error))
        except Exception as error:  # CodecError, or whatever the sink raised
            self.abort("corrupt", f"{type(error).__name__}: {error}")
        finally:
            self._leave()

    def _land(self, frame: Frame, header: bytes) -> _Incoming | None:
        """Hash what has landed in order; the piece, to the one thread that completes it."""
        if frame.header and header_digest(header) != frame.digest:
            raise LinkError("a piece header is damaged: its digest does not match", "corrupt")
        with self._lock:
            incoming = self._pieces[frame.sequence]
            if frame.header:
                incoming.header = header
            incoming.landed.add(frame.offset)
        # A large piece is hashed while its later parts are still coming, and while what just came
        # is in the processor's cache; whichever stream finds the next part there does it.
        while True:
            with self._lock:
                at = incoming.hashed
                if incoming.hashing or at not in incoming.landed:
                    return None
                incoming.hashing = True
            size = min(self.part, incoming.payload - at)
            incoming.hasher.update(incoming.buffer[at : at + size])
            with self._lock:
                incoming.hashing = False
                incoming.landed.discard(at)
                incoming.hashed += size
                if incoming.hashed == incoming.payload:
                    return incoming

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if self._delivering or self._state != "open":
                    return
                piece = self._verified.pop(self._next, None)
                if piece is None:
                    return
                self._delivering = True
                self._next += 1
                last = self._last is not None and self._next > self._last
            try:
                self._sink.piece(self.offer.transfer, piece)
            except Exception as error:
                raise LinkError(f"the piece was not taken: {error}", "failed") from error
            finally:
                with self._lock:
                    self._delivering = False
            if last:
                self._commit()

    def _commit(self) -> None:
        with self._lock:
            if self._state != "open":
                return
            self._state = "committing"
        try:
            self._sink.done(self.offer.transfer)
        except Exception as error:
            with self._lock:
                self._state = "dead"
                self._reason = ("failed", f"the state was not taken over: {error}")
            return
        with self._lock:
            self._state = "done"
        self._end(None, "")

    def _end(self, code: Code | None, reason: str) -> None:
        try:
            self._on_end(self, code, reason)
        finally:
            self.settled.set()

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
            settle = self._busy == 0 and self._state == "dead"
        if settle:
            self._settle()

    def _settle(self) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
            self._pieces.clear()
            self._verified.clear()
            code, reason = self._reason
        try:
            self._sink.abort(self.offer.transfer, reason)
        finally:
            self._end(code, reason)


def _verify(incoming: _Incoming) -> Piece:
    if incoming.header is None:
        raise LinkError("a piece is complete but has no header", "protocol")
    header = parse(incoming.header)
    if header.nbytes != incoming.payload:
        raise LinkError("piece header and frame disagree about the payload's size", "protocol")
    # One among the rows is of a position that the sender passed; the last one ends the transfer.
    if incoming.kind == SNAPSHOT and header.kind != "snapshot":
        raise LinkError("piece header and frame disagree about the piece's kind", "protocol")
    if incoming.hasher.intdigest() != header.digest:
        raise LinkError(
            f"the payload of tokens [{header.start}, {header.stop}) was damaged on the way",
            "corrupt",
        )
    return Piece(header, incoming.buffer)
