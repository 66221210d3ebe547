"""The prefill worker's loop: one prompt computed at a time, hand-offs finishing behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from scheduler.execution import Execution
from scheduler.outbox import Outbox
from scheduler.queue import decode_queue, prefill_queue, wait_for_work
from scheduler.record import Job
from scheduler.redis_client import AWAY, connect
from scheduler.runs import Cancelled, Drain, Lost, Outcome, Preempted
from scheduler.staying import Choice, Staying
from scheduler.worker import LoopWorker
from store.meter import Meter, charge

log = logging.getLogger("tandem.prefill")

#: Called at every chunk boundary with the count of prompt tokens prefilled so far. True: a short
#: interactive job waits, and the next boundary should come soon.
Check = Callable[[int], bool]

#: Finishes a hand-off: returns its facts (bytes, seconds, path) once the decode node has it all.
Tail = Callable[[], Mapping[str, Any]]


class PrefillEngine(Protocol):
    """What the loop asks of the process that holds the model."""

    def prefill(self, execution: Execution, job: Job, check: Check) -> Tail:
        """Compute a prompt on this thread, sending what is finished.

        `check` raises Cancelled, Drain or Lost at a chunk boundary: free what is held and let it
        pass. Where it returns True, go on in smaller chunks until it returns False. It raises
        Preempted only where the engine has an attribute `parks` > 0, the number of unfinished
        prefills it can keep: keep this one's state, let the exception pass, and begin there when
        the job comes again. Such an engine may keep a cancelled one as well, for a later job with
        the same prompt. Any other exception fails the job. The returned tail runs on a background
        thread while the next prompt is computed; when it raises, the decode node prefills by
        itself.
        """
        ...


class DecodingEngine(PrefillEngine, Protocol):
    """One that can begin answers: a true attribute `decodes` says so."""

    decodes: bool

    def begin(self, execution: Execution, job: Job, check: Check, stay: Staying) -> Tail:
        """As `prefill`; then say the answer through `execution.emit` while `stay()` is true.

        The state is handed off at the token where it is not, or at the answer's end. `stay` raises
        as `check` does.
        """
        ...


class PrefillLoop(LoopWorker):
    """Takes prompts from the shared `prefill` queue.

    `tails`: how many finished prompts may be on their way to a decode node while the next one is
    computed. More would only pile up state in this machine's memory.
    """

    role = "prefill"

    def __init__(
        self,
        url: str,
        engine: PrefillEngine,
        *,
        tails: int = 2,
        route: Callable[[Job], str] | None = None,
        choice: Callable[[Job, int], Choice] | None = None,
        **options: Any,
    ) -> None:
        """`choice(job, waiting)` says at a prompt's end whether its answer is begun here, where
        the engine can; without it none is."""
        super().__init__(url, prefill_queue(), **options)
        self._engine = engine
        self._choice = choice
        # Only an engine that begins answers has anything to say here.
        able = choice is not None and getattr(engine, "decodes", False)
        self._outbox = Outbox(connect(url, patience=0)) if able else None
        self._route = route or (lambda job: decode_queue(job.node))
        self._parked: set[str] = set()
        self._room = threading.BoundedSemaphore(tails)
        # Blocking reads have a connection of their own.
        self._waiter = connect(url, patience=0)

    def _serve(self) -> None:
        if self._outbox is None:
            self._take_and_compute()
            return
        self._outbox.start()
        try:
            self._take_and_compute()
        finally:
            self._await_settling()  # hand-offs wait for what was said to be written
            self._outbox.close(max(2.0, self.settings.lease_seconds / 2))

    def _take_and_compute(self) -> None:
        pause = 0.05
        while not self.stopping:
            if not self._room.acquire(timeout=0.2):
                continue
            job, taking = None, Meter()
            try:
                with charge(taking):
                    job = self.runs.take(self.queue, self.name, self.holder)
                if job is None:
                    wait_for_work(self._waiter, self.queue)
                pause = 0.05
            except AWAY as error:
                log.warning("Redis is away (%s)", error)
                self._ended.wait(pause)
                pause = min(2 * pause, 1.0)
            if job is None:
                self._room.release()
                continue
            emit = None if self._outbox is None else self._outbox.put
            execution = Execution(job, _emit=emit, _progress=self._beat_now.set, first=job.events)
            execution.notes.meter.take(taking)
            self._one(execution)

    def _one(self, execution: Execution) -> None:
        job, notes = execution.job, execution.notes
        self.hold(execution)
        settled = True
        begun_at = -1

        def check(prefilled: int) -> bool:
            nonlocal begun_at
            self.check(execution, prefilled)
            if begun_at < 0:
                begun_at = prefilled
            if prefilled == begun_at or prefilled >= job.prompt_tokens - 1 or self.stopping:
                return False
            try:
                with charge(notes.meter):
                    ahead = self.runs.look_ahead(job, self.queue, self.holder, prefilled)
                if ahead.better and self._may_park():
                    raise Preempted
            except AWAY:
                return False
            return ahead.interactive

        def begin() -> None:
            # The prompt's end: the measured rate is that of the prefill alone.
            if self._announce(job, execution.prefilled, max(begun_at, 0)) == "lost":
                execution.mark_lost()

        stay = self._staying(execution, begin)
        self._parked.discard(job.id)
        try:
            self.check(execution, 0)
            job.check_whole()
            tail = (
                cast(DecodingEngine, self._engine).begin(execution, job, check, stay)
                if stay is not None
                else self._engine.prefill(execution, job, check)
            )
            settled = False
            computed = time.monotonic()
            began = stay is not None and stay.began
            begun_at = execution.prefilled if began else max(begun_at, 0)
            self._closers.submit(self._hand_off, execution, tail, begun_at, computed, began)
        except Lost:
            self.drop(execution)
        except Cancelled:
            keeps = getattr(self._engine, "parks", 0) and not (stay is not None and stay.began)
            parked = execution.prefilled if keeps else 0
            self.settle_soon(
                execution,
                lambda: self.runs.cancelled(
                    job,
                    holder=self.holder,
                    parked=parked,
                    ledger=self.noted(execution, "cancelled"),
                ),
            )
        except Preempted:
            self._parked.add(job.id)
            parked = execution.prefilled
            # Before the next take: this job competes with what is better.
            self.settle(
                execution,
                lambda: self.runs.hand_back(
                    job,
                    holder=self.holder,
                    parked=parked,
                    ledger=self.noted(execution, "parked: a better job waited"),
                ),
            )
        except Drain:
            self.settle_soon(
                execution,
                lambda: self.runs.hand_back(job, ledger=self.noted(execution, "handed back")),
            )
        except Exception as error:
            self.fail(execution, error)
        finally:
            if settled:
                self._room.release()

    def _staying(self, execution: Execution, begin: Callable[[], None]) -> Staying | None:
        """Until when the answer is said here; None where the decode node says all of it.

        That is so as well where an earlier run has begun the answer: it is told again there.
        """
        job, choice = execution.job, self._choice
        if choice is None or self._outbox is None or job.first_token_at is not None:
            return None

        def check() -> None:
            self.check(execution, execution.prefilled)
            if self.stopping:
                stay.leave("the worker is to stop")

        stay = Staying(
            check,
            lambda: self.runs.waiting(self.queue),
            lambda waiting: choice(job, waiting),
            begin,
        )
        return stay

    def _may_park(self) -> bool:
        """Whether there is room to park another prefill."""
        room = min(getattr(self._engine, "parks", 0), self.settings.max_parked)
        if len(self._parked) >= room > 0:
            self._parked = {resp for resp in self._parked if self.runs.is_parked(resp)}
        return len(self._parked) < room

    def _hand_off(
        self, execution: Execution, tail: Tail, begun_at: int, computed: float, began: bool
    ) -> None:
        """On a background thread: finish the transfer, then the stage.

        `began`: some of the answer may have been said here.
        """
        job, prefilled, notes = execution.job, execution.prefilled, execution.notes
        try:
            notes.add("settle", computed, time.monotonic())

            def announce() -> None:
                with notes.stage("announce"), charge(notes.meter):
                    if self._announce(job, prefilled, begun_at) == "lost":
                        execution.mark_lost()

            # Who reads the answer waits for its next token: only the display may be late.
            announced = self._closers.submit(announce) if began else None
            if announced is None:
                announce()
            try:
                with notes.stage("hand off"):
                    facts = dict(tail())
            except Exception as error:
                log.warning("hand-off of %s failed", job.id, exc_info=error)
                facts = {"path": "none", "error": f"{type(error).__name__}: {error}"[:500]}
                notes.fork("link", "none", facts["error"])
            with notes.stage("written"):
                if announced is not None:
                    self._wait_written(execution)
                    announced.result()
                queue = self._route(job)
            self.settle(
                execution,
                lambda: self.runs.finish_prefill(
                    job, facts, queue, prefilled, self.noted(execution, "handed off")
                ),
            )
        except Exception:
            log.exception("the hand-off of %s ended in an error of the loop", job.id)
        finally:
            self._room.release()

    def _wait_written(self, execution: Execution) -> None:
        """Wait until what was said here is in the log: the decode node goes on from the log."""
        assert self._outbox is not None, "an answer is begun only where there is an outbox"
        written = threading.Event()
        self._outbox.then(execution, written.set)
        while not written.wait(0.5) and not self.out_of_time:
            pass

    def _announce(self, job: Job, prefilled: int, begun_at: int) -> Outcome:
        try:
            return self.runs.handing_off(job, prefilled, begun_at)
        except AWAY:
            return "ok"  # only the state's display is late; the finishing step decides
