"""What all links of one receiving node share: the sink, and which transfers it has taken."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from transport.errors import LinkError
from transport.frame import MAX_PART, MIN_PART
from transport.inbound import Inbound
from transport.protocol import Ack, Nack
from transport.sink import Sink

REMEMBERED = 4096
"""Finished transfers whose repetition is acknowledged without being taken again."""
PART = 1 << 20


class Desk:
    """Registers attempts, so that a transfer is delivered once over whichever link. Thread-safe.

    `deadline` (seconds) bounds the wait for an older attempt to be cleared away; `part` is the
    payload size of one frame.
    """

    def __init__(self, sink: Sink, deadline: float, part: int = PART) -> None:
        """Raises LinkError for a part size out of bounds."""
        if not MIN_PART <= part <= MAX_PART:
            raise LinkError(f"part size {part} is not in {MIN_PART}..{MAX_PART}", "protocol")
        self.sink = sink
        self.deadline = deadline
        self.part = part
        self._lock = threading.Lock()
        self._running: dict[str, Inbound] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def abort(self, transfer: str, reason: str) -> bool:
        """Give up a transfer from this side; False if there is none to give up."""
        with self._lock:
            inbound = self._running.get(transfer)
        return inbound is not None and inbound.abort("aborted", f"receiver: {reason}")

    def stats(self) -> dict[str, int]:
        """Transfers under way and finished, and threads at work."""
        with self._lock:
            return {
                "transfers": len(self._running),
                "finished": len(self._finished),
                "threads": len(self._threads),
            }

    def enter(self, inbound: Inbound) -> Ack | Nack | None:
        """Register an attempt; an Ack or Nack if there is nothing to admit.

        An older attempt of the same transfer is given up first, and its sink told.
        """
        offer = inbound.offer
        limit = time.monotonic() + self.deadline
        while True:
            with self._lock:
                if self._closing:
                    return Nack(offer.number, "aborted", "the receiver is closing")
                if offer.transfer in self._finished:
                    return Ack(offer.number, self._finished[offer.transfer], duplicate=True)
                older = self._running.get(offer.transfer)
                if older is None:
                    self._running[offer.transfer] = inbound
                    return None
            if older.offer.attempt >= offer.attempt:
                reason = f"attempt {older.offer.attempt} of this transfer is under way"
                return Nack(offer.number, "stale", reason)
            older.abort("aborted", "a newer attempt was offered")
            if not older.settled.wait(max(0.0, limit - time.monotonic())):
                return Nack(offer.number, "busy", "an older attempt is still being cleared away")

    def leave(self, inbound: Inbound, *, done: bool) -> None:
        """The attempt is over and the sink knows."""
        transfer = inbound.offer.transfer
        with self._lock:
            if self._running.get(transfer) is inbound:
                del self._running[transfer]
            if done:
                self._finished[transfer] = inbound.nbytes
                while len(self._finished) > REMEMBERED:
                    self._finished.popitem(last=False)

    def spawn(self, name: str, work: Callable[..., None], *args: object) -> None:
        """Run `work` in a thread that `join` waits for."""

        def run() -> None:
            try:
                work(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"link-{name}", daemon=True)
        with self._lock:  # `join` must not meet one that has not started: that raises
            thread.start()
            self._threads.add(thread)

    def close(self) -> None:
        """Admit nothing any more."""
        with self._lock:
            self._closing = True

    def join(self, seconds: float) -> None:
        """Wait for the threads that were spawned, at most so long."""
        limit = time.monotonic() + seconds
        while (thread := self._any_thread()) is not None and time.monotonic() < limit:
            thread.join(max(0.0, limit - time.monotonic()))

    def _any_thread(self) -> threading.Thread | None:
        with self._lock:
            return next(iter(self._threads - {threading.current_thread()}), None)
