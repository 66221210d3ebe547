"""Events on their way to Redis, off the decode step's path.

The step thread appends to a queue in memory; one thread writes it, all executions of a moment in
one round trip. While Redis is away the queue grows to its bound, then the step thread waits:
tokens are late, none is lost. Events keep their number, so that sending twice changes nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import redis

from scheduler.execution import Execution, Pending
from scheduler.redis_client import AWAY
from scheduler.runs import Row, append_rows
from store.meter import Meter, charge

log = logging.getLogger("tandem.outbox")

_BATCH = 512
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


Numbered = tuple[Execution, int, list[Pending]]
"""Events of an execution, and the number of the first of them."""


def rows_of(numbered: Sequence[Numbered]) -> list[Row]:
    """What the script that appends takes."""
    rows: list[Row] = []
    for execution, first, events in numbered:
        tokens, data = False, []
        for event in events:
            tokens = tokens or event.tokens
            data.append(event.data)
        rows.append((execution.job.id, execution.job.run, first, data, tokens))
    return rows


class Outbox:
    """A bounded queue of events and a thread that writes it."""

    def __init__(self, client: redis.Redis, capacity: int = 10_000) -> None:
        self._client = client
        self._held: redis.Redis | None = None
        self._capacity = capacity
        self._items: deque[tuple[Execution, Pending | Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._sleeps = False  # the thread: it must be woken
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def put(self, execution: Execution, events: list[Pending]) -> None:
        """Queue events of one execution; waits while `capacity` events are queued already."""
        with self._lock:  # not through the condition, which takes longer than the rest
            while len(self._items) >= self._capacity and not self._closing:
                self._changed.wait(0.5)
            for event in events:
                self._items.append((execution, event))
            self._wake()

    def then(self, execution: Execution, action: Callable[[], None]) -> None:
        """Run `action` on the writing thread once everything queued for `execution` is written."""
        with self._changed:
            self._items.append((execution, action))
            self._wake()

    def _wake(self) -> None:
        # Once a step, not once a row: it costs more than all the rest of `put`.
        if self._sleeps:
            self._sleeps = False
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Write what is queued for at most `seconds`; True when nothing is left."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._items and time.monotonic() < deadline:
                self._changed.wait(0.05)
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        return not self._items

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                while not self._items:
                    if self._closing:
                        return
                    self._sleeps = True
                    self._changed.wait(1.0)
                self._sleeps = False
                batch = list(itertools.islice(self._items, _BATCH))
            try:
                done = self._write(batch)
                pause = _FIRST_PAUSE
            except AWAY as error:
                if self._closing:
                    return
                log.warning("Redis is away (%s); %d events wait", error, len(self._items))
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            with self._changed:
                for _ in range(done):
                    self._items.popleft()
                self._changed.notify_all()

    def _write(self, batch: list[tuple[Execution, Pending | Callable[[], None]]]) -> int:
        """Write the events up to the first action, or run that action; how many items it was."""
        head = batch[0]
        if not isinstance(head[1], Pending):
            head[1]()
            return 1
        count = 0
        fresh: dict[Execution, list[Pending]] = {}
        for execution, item in batch:
            if not isinstance(item, Pending):
                break
            if (events := fresh.get(execution)) is None:
                fresh[execution] = [item]
            else:
                events.append(item)
            count += 1
        numbered = [
            (execution, execution.first + len(execution.log), events)
            for execution, events in fresh.items()
            if not execution.lost
        ]
        self._send(numbered)
        for execution, _, events in numbered:
            execution.log.extend(events)
        return count

    def _connected(self) -> redis.Redis:
        # A connection of our own: to take one from the pool and look it over, once a step, costs
        # more than to pack what is sent. It connects again by itself.
        if self._held is None:
            pool = self._client.connection_pool
            self._held = redis.Redis(connection_pool=pool, single_connection_client=True)
        return self._held

    def _send(self, numbered: list[Numbered]) -> None:
        if not numbered:
            return
        rows = rows_of(numbered)
        sending = Meter()
        try:
            with charge(sending):
                answers = append_rows(self._connected(), rows)
        except AWAY:
            raise
        except redis.RedisError as error:
            if len(numbered) > 1:
                for one in numbered:  # one of them is refused: the others are told without it
                    self._send([one])
                return
            execution = numbered[0][0]
            log.error("events of %s are refused: %s", execution.job.id, error)
            execution.mark_lost()
            return
        part = sending.part(1 / len(rows))
        for (execution, _, events), (outcome, seq) in zip(numbered, answers, strict=True):
            execution.notes.meter.take(part)
            if outcome == "behind" and seq >= execution.first:
                # Redis came back without its last moments: it is told them again.
                missing = execution.log[seq - execution.first :]
                self._send([(execution, seq, [*missing, *events])])
            elif outcome != "ok":
                log.warning("run %s of %s is %s", execution.id, execution.job.id, outcome)
                execution.mark_lost()
