"""Conversations between their turns: in memory, on their way to the store, given up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from engine.model import Caches, Model
from engine.rows import Event
from scheduler.config import Config
from scheduler.execution import Execution
from store.errors import StoreError, StoreGap
from store.store import Store
from worker_decode.behind import Behind
from worker_decode.hot import Held, Hot
from worker_decode.inbox import Inbox
from worker_decode.ledgers import Ledgers
from worker_decode.lending import Lending
from worker_decode.memory import Memory
from worker_decode.pressure import Hardship
from worker_decode.saver import Saved, Saver
from worker_decode.states import export

log = logging.getLogger("tandem.decode")

_HOUSEKEEPING = 0.25
_WORD = 2.0
_SWEEP = 10.0
_RETRY = 30.0


class Keeping:
    """What the engine holds of conversations that no row runs, and when it leaves memory.

    Used on the engine's thread, but for what says otherwise.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        store: Store,
        memory: Memory,
        inbox: Inbox,
        ledgers: Ledgers,
        lending: Lending | None,
        *,
        running: Callable[[str], Caches | None],
        ended: Callable[[str], bool],
        announce: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        """`running(turn)` gives the caches of an answer under way; `ended(response)` says whether a
        job is over; `announce()` is called now and then; `lost(turn)` when a finished turn's run
        was another's by then, so that it is not recorded."""
        self._config = config
        self._model = model
        self._store = store
        self._memory = memory
        self._inbox = inbox
        self._ledgers = ledgers
        self._lending = lending
        self._ended = ended
        self._announce = announce
        self._lost = lost
        self.hot = Hot(memory)
        self.behind = Behind(model, self.hot, memory, running)
        self.hardship = Hardship()
        self.saver = Saver(store, self._note_saved)
        self.saving: set[str] = set()
        self._saved: deque[Saved] = deque()
        self._committed: set[str] = set()
        self._uncommitted: dict[str, Execution] = {}
        self._unrecorded: deque[str] = deque()
        self._wished: set[str] = set()
        self._lock = threading.Lock()
        self.next_look = 0.0
        self.next_sweep = 0.0
        self.next_word = 0.0

    def put(self, held: Held, execution: Execution) -> None:
        """Hold a finished turn, which is not durable yet."""
        with self._lock:
            self._uncommitted[held.turn] = execution
        self.hot.put(held)

    def recorded(self, turn: str) -> None:
        """A turn is durable. Any thread."""
        with self._lock:
            if self._uncommitted.pop(turn, None) is not None:
                self._committed.add(turn)

    def forget(self, turns: Iterable[str]) -> None:
        """Drop the states of turns that are deleted, or could not be recorded, soon. Any thread."""
        self._unrecorded.extend(turns)

    def save_soon(self, turn: str, seconds: float) -> None:
        """Have a state that is idle in memory saved, and wait until it is. Any thread."""
        self._wished.add(turn)
        end = time.monotonic() + seconds
        while turn in self.hot and time.monotonic() < end:
            time.sleep(_HOUSEKEEPING / 5)
        self._wished.discard(turn)

    def taken(self, held: Held, heir: str) -> None:
        """A row goes on from `held`; its turn is `heir`."""
        self.behind.leave(held, heir)
        self._forget(held.turn)

    def give_up(self, turn: str, event: Event) -> None:
        """A turn is not kept: the one that it went on from is held again."""
        back = None
        if event.caches is not None:
            back = self.behind.come_back(turn, event.caches)
        self.behind.gone(turn)
        if back is not None and self._is_stored(back):
            with self._lock:
                self._committed.add(back)

    def drain(self) -> None:
        """Save every conversation that is still in memory, and wait until it is written."""
        self.collect()  # what has gone to another node is not saved here
        for turn in self.hot.turns():
            self._save(turn)
        if not self.saver.close(self._config.jobs.drain_seconds + 60):
            log.error("states were not written in time: those turns will be recomputed")
        self.collect()
        self._ledgers.write(self._ledgers.waiting())
        left = len(self.hot)
        log.info("drained; %d conversations could not be saved", left)

    def look_after(self) -> bool:
        """Save idle conversations and make room; True when more is to do at once."""
        self.collect()
        if self._lending is not None:
            self._lending.serve(self.hot, self.behind)
        now = time.monotonic()
        if now < self.next_look and not self._memory.wanted:
            return False
        self.next_look = now + _HOUSEKEEPING
        if now >= self.next_word:
            self.next_word = now + _WORD
            self.hardship.feel()
            self._announce()
            # A turn that has gone on with its next one is not saved by itself.
            gone = [turn for turn in self._ledgers.waiting() if self.hot.get(turn) is None]
            if gone and self.saver.room:
                self.saver.do(partial(self._ledgers.write, gone))
        if now >= self.next_sweep:
            self.next_sweep = now + _SWEEP
            waiting = self._inbox.waiting(_SWEEP)
            self._inbox.sweep(response for response in waiting if self._ended(response))
        if (needed := self._needed()) > 0:
            self.behind.shrink(needed)
        every_turn = self._config.store.save == "turn"
        idle = self.hot.idle(0.0 if every_turn else self._config.store.idle_seconds)
        idle += [turn for turn in list(self._wished) if turn in self.hot and turn not in idle]
        if not idle and (self.hardship.squeezed or self._short_of_memory()):
            idle = self.hot.turns()
        for turn in idle:
            if not self.saver.room:
                return False
            if turn not in self.saving and self._is_committed(turn):
                self._save(turn)
                return True  # one at a time: rows that are live come first
        return False

    def _needed(self) -> int:
        """Bytes that are wanted, or in use, beyond the limit."""
        return max(self._memory.wanted, self._memory.used - self._memory.limit)

    def _short_of_memory(self) -> bool:
        """Whether more must leave memory than is being saved already."""
        leaving = [held for turn in self.saving if (held := self.hot.get(turn)) is not None]
        return self._needed() > sum(held.nbytes for held in leaving)

    def _is_committed(self, turn: str) -> bool:
        with self._lock:
            return turn in self._committed

    def _save(self, turn: str) -> None:
        """Copy a state out of the model's memory and give it to the saver."""
        held = self.hot.get(turn)
        if held is None or turn in self.saving:
            return
        began = time.monotonic()
        pieces, snapshot = export(self._model, held)
        self._ledgers.copied(turn, began, time.monotonic())
        self.saving.add(turn)
        self.saver.put(turn, len(held.ids), pieces, snapshot, held.base)
        for older in self.behind.worth_storing(turn):
            if not self.saver.room or not self._is_stored(older.turn):
                break
            pieces, snapshot = export(self._model, older)
            self.saver.put(older.turn, len(older.ids), pieces, snapshot, older.base)

    def _note_saved(self, saved: Saved) -> None:
        self._saved.append(saved)
        self._ledgers.saved(saved)

    def collect(self) -> None:
        """What the saver has finished: those conversations leave the model's memory."""
        while self._saved:
            saved = self._saved.popleft()
            self.saving.discard(saved.turn)
            held = self.hot.get(saved.turn)
            if saved.report is None:
                log.warning("state of %s not saved: %s", saved.turn or "a preamble", saved.error)
                self.hardship.note(saved.error)
                if held is not None and self._may_wait(held, saved.error):
                    continue
            else:
                self.hardship.over()
                log.info(
                    "saved %s: %d bytes in %.3f s",
                    saved.turn or "a preamble", saved.report.bytes_written, saved.report.seconds,
                )  # fmt: skip
            if held is not None:  # else it was continued meanwhile
                self._forget(saved.turn)
        with self._lock:  # those of a lost run are never committed
            lost = [turn for turn, run in self._uncommitted.items() if run.lost]
        for turn in lost:
            self._lost(turn)
            self._forget(turn)
        while self._unrecorded:
            turn = self._unrecorded.popleft()
            self.behind.drop(turn)
            self._forget(turn)

    def _may_wait(self, held: Held, error: Exception | None) -> bool:
        """Whether a state that could not be written stays in memory for another attempt."""
        if isinstance(error, StoreGap):
            held.stored, held.base = 0, None  # what it built upon was evicted: write all of it
        elif not self._is_stored(held.turn):
            return False  # deleted meanwhile
        elif self._memory.wanted or self._memory.used > self._memory.limit:
            return False  # its token ids are durable: it will be computed again
        else:
            held.used = time.monotonic() + _RETRY
        return True

    def _is_stored(self, turn: str) -> bool:
        try:
            return self._store.get_turn(turn) is not None
        except StoreError:
            return False

    def _forget(self, turn: str) -> None:
        self.hot.take(turn)
        self.behind.gone(turn)
        with self._lock:
            self._committed.discard(turn)
            self._uncommitted.pop(turn, None)
