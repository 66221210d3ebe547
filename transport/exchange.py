"""Batches of parts between the two child processes of an rdma link, both ways, one at a time.

Parts are gathered into batches of one shared-memory slot, so that many small pieces cost few
operations. A child obeys its commands in order, one operation in flight, so the two children must
be told matching commands in the same order. The end that formed the link leads: it says that a
batch of its own is coming (Burst), or, where the other end has one (Want), that it has posted a
receive for it (Turn). The other end obeys in the order in which it hears. So data flows one way at
a time, no send meets a send, and a receive is posted only when its batch is there: a waiting
receive burns a core.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from transport.batch import BACK, FORTH, SLOT
from transport.errors import LinkError
from transport.frame import SIZE, Frame
from transport.incoming import Incoming
from transport.outgoing import Outgoing
from transport.protocol import Burst, Turn, Want
from transport.sidecar import Sidecar
from transport.wire import FLOOR

TICK = 0.2
MAX_DUE = 1 << 16

Filled = tuple[int, int, int]
"""Slot, bytes in it, sequence number."""


class Exchange:
    """One end's child, and what it is to send and receive. `run` in a thread; the rest from any."""

    def __init__(
        self,
        sidecar: Sidecar,
        deadline: float,
        *,
        leads: bool,
        over: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`leads` at the end that formed the link. `over` is told why the epoch has ended."""
        self.sidecar = sidecar
        self.incoming: Incoming | None = None
        self._leads = leads
        self._over = over
        self._patience = deadline + SLOT / FLOOR
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in FORTH if leads else BACK:
            self._free.put(slot)
        self._lock = threading.Lock()  # what the child is told keeps the order of the messages
        self._room = list(BACK if leads else FORTH)
        self._due = 0
        self._filled: deque[Filled] = deque()
        self._orders: deque[Filled | None] = deque()
        self._expected = 1
        self._flying = 0
        self._moved = time.monotonic()
        self._ended = threading.Event()

    def run(self, out: Outgoing) -> None:
        """Gather parts of `out` into slots until the link ends."""
        collector = threading.Thread(
            target=self._collect, args=(out,), name="link-collect", daemon=True
        )
        collector.start()
        try:
            self._fill(out)
        finally:
            self._ended.set()
            self.sidecar.kill()
            collector.join(10)

    def kill(self) -> None:
        """Wake `run`; the child is killed."""
        self._ended.set()
        self.sidecar.kill()

    def close(self) -> None:
        """Release the child's memory and pipes."""
        self.sidecar.close()

    # -- what the other end says ------------------------------------------------------------

    def wanted(self, count: int, out: Outgoing) -> None:
        """The other end has so many more batches for this one, which leads."""
        with self._lock:
            self._due += count
            if self._due > MAX_DUE or not self._leads:
                raise LinkError("more batches announced than can ever be due", "protocol")
            self._receive(out)

    def announced(self, count: int) -> None:
        """So many batches come from the end that leads."""
        with self._lock:
            self._orders.extend([None] * count)
            if len(self._orders) > MAX_DUE:
                raise LinkError("more batches announced than can ever be due", "protocol")
            self._obey()

    def turn(self) -> None:
        """The end that leads takes one batch from here."""
        with self._lock:
            if not self._filled:
                raise LinkError("a batch is asked for that was not announced", "protocol")
            self._orders.append(self._filled.popleft())
            self._obey()

    # -- the child, with the lock held ------------------------------------------------------

    def _receive(self, out: Outgoing) -> None:
        while self._due and self._room:
            self._due -= 1
            self._start()
            self.sidecar.receive(self._room.pop())
            out.tell(Turn(1))

    def _obey(self) -> None:
        while self._orders:
            order = self._orders[0]
            if order is None and not self._room:
                return
            self._orders.popleft()
            self._start()
            if order is None:
                self.sidecar.receive(self._room.pop())
            else:
                self.sidecar.send(*order)

    def _start(self) -> None:
        if self._flying == 0:
            self._moved = time.monotonic()
        self._flying += 1

    # -- sending ----------------------------------------------------------------------------

    def _fill(self, out: Outgoing) -> None:
        sequence = 1
        part = out.next_part()
        while part is not None:
            slot = self._take(out)
            if slot is None:
                return
            filled = 0
            with self.sidecar.slot(slot) as memory:
                while part is not None and filled + len(part.head) + len(part.payload) <= SLOT:
                    middle = filled + len(part.head)
                    memory[filled:middle] = part.head
                    filled = middle + len(part.payload)
                    memory[middle:filled] = part.payload
                    out.written(part)
                    part = out.next_part(wait=False)
            self._send((slot, filled, sequence), out)
            sequence += 1
            if part is None:
                part = out.next_part()

    def _send(self, batch: Filled, out: Outgoing) -> None:
        with self._lock:
            if self._leads:
                self._start()
                out.tell(Burst(1))
                self.sidecar.send(*batch)
                return
            self._filled.append(batch)
        out.tell(Want(1))

    def _take(self, out: Outgoing) -> int | None:
        while out.alive:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=TICK)
        return None

    # -- what the child says ----------------------------------------------------------------

    def _collect(self, out: Outgoing) -> None:
        """Take the child's events; notice its death, and a batch that does not move."""
        try:
            while not self._ended.is_set():
                event = self.sidecar.poll(TICK)
                if event is not None:
                    self._happened(event, out)
                    continue
                with self._lock:
                    still = time.monotonic() - self._moved
                    if self._flying > 0 and still > self._patience:
                        raise LinkError("rdma link: a batch does not move; peer frozen or cut off")
        except LinkError as error:
            if out.alive:
                out.fail(error)
                self._over(str(error))

    def _happened(self, event: dict[str, object], out: Outgoing) -> None:
        slot = int(str(event["slot"]))
        got = event["event"] == "got"
        if got:
            if self.incoming is None or event["sequence"] != self._expected:
                raise LinkError("rdma link: batches are out of order", "protocol")
            self._expected += 1
            with (
                self.sidecar.slot(slot) as memory,
                memory[: int(str(event["nbytes"]))] as body,
            ):
                _frames(body, self.incoming)
        with self._lock:
            self._flying -= 1
            self._moved = time.monotonic()
            if got:
                self._room.append(slot)
            if self._leads:
                self._receive(out)
            else:
                self._obey()
        if not got:
            self._free.put(slot)


def _frames(body: memoryview, incoming: Incoming) -> None:
    at = 0
    while at < len(body):
        frame = Frame.unpack(body[at : at + SIZE])
        middle = at + SIZE + frame.header
        end = middle + frame.length
        if end > len(body):
            raise LinkError("a frame reaches beyond its batch", "protocol")
        header = bytes(body[at + SIZE : middle])
        with body[middle:end] as payload:
            incoming.take(frame, header, payload)
        at = end
