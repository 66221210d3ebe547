"""The decode worker's loop: many jobs at once in one batch; no Redis on the step's path."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import redis
from rq.defaults import RQ_KEY_PREFIX

from scheduler import events
from scheduler.config import decode_queue
from scheduler.execution import Execution, Finished
from scheduler.leaving import Leaver, Leaving, Mover, Tail, facts_of
from scheduler.nodes import Nodes
from scheduler.outbox import Outbox
from scheduler.queue import PREFILL, wait_for_work, wake
from scheduler.record import Job, Result
from scheduler.redis_client import AWAY, connect
from scheduler.runs import Outcome, Release, Runs, SendBack
from scheduler.worker import LoopWorker
from store.meter import Meter, charge

log = logging.getLogger("tandem.decode")

#: Seconds between two calls of an idle engine.
_IDLE_WAIT = 0.05


class DecodeEngine(Protocol):
    """What the loop asks of the batch engine. All calls come from the main thread."""

    def free(self) -> int:
        """How many jobs can be added now."""
        ...

    def add(self, execution: Execution, job: Job) -> None:
        """Start a job. Raising fails it; SendBack has it prefilled again.

        `execution.replay` holds what an earlier run emitted: it is fed, not emitted again.
        """
        ...

    def step(self) -> Sequence[Finished]:
        """One step of all rows; tokens go out through `execution.emit`."""
        ...

    def cancel(self, execution: Execution) -> None:
        """Drop a row (cancelled, lost or handed back). Unknown ones are ignored."""
        ...

    def idle(self) -> bool:
        """Called while no row is live; True asks to be called again at once."""
        ...

    def drain(self) -> None:
        """Last call: save what must not be lost."""
        ...


class Budgeted(Protocol):
    """An engine that says how much received state it keeps may have this as well."""

    def budget(self) -> tuple[int, int, float]:
        """Bytes it keeps in all, bytes of an empty state, bytes per token. Any thread."""
        ...


class Preparing(Protocol):
    """An engine with work to do for a job before it is added, off the thread that steps."""

    def prepare(self, execution: Execution, job: Job) -> None:
        """Called once a job, before `add`, from the thread that takes jobs. Raising fails it."""
        ...


class DecodeLoop(LoopWorker):
    """Takes jobs from the queue of this decode node, as many as the engine has room for."""

    role = "decode"

    def __init__(
        self, url: str, engine: DecodeEngine, *, mover: Mover | None = None, **options: Any
    ) -> None:
        """`mover` sends answers on to another decode node when this one is to stop; the engine is
        a Leaver then."""
        super().__init__(url, decode_queue(options.get("node", "local")), **options)
        self._engine = engine
        self._node = str(options.get("node", "local"))
        self._outbox = Outbox(connect(url, patience=0))
        self._rows: list[Execution] = []
        self._inbox: deque[Execution] = deque()
        self._wanted = 0
        self._alone_since: float | None = None
        self._told = False
        self._changed = threading.Condition()
        self._leaving = Leaving(mover)
        self._served = threading.Event()
        self._emptied = threading.Event()

    def _serve(self) -> None:
        self._outbox.start()
        taker = threading.Thread(target=self._take, name="take", daemon=True)
        taker.start()
        try:
            while not (self._done_taking and not self._rows and not self._inbox):
                self._admit()
                self._sweep()
                self._send_off()
                if self.out_of_time:
                    self._hand_back_all()
                elif self._rows:
                    for finished in self._engine.step():
                        self._close(finished)
                elif not self._engine.idle():
                    with self._changed:
                        if not self._inbox:
                            self._changed.wait(_IDLE_WAIT)
        except BaseException:
            # The engine is broken: its rows run elsewhere, counted as attempts.
            for execution in [*self._rows, *self._inbox]:
                self.settle(execution, partial(self.runs.reclaim, execution.job, dead=True))
            raise
        finally:
            self._served.set()
            taker.join(3.0)
            self._hand_back_all()
            self._outbox.close(max(2.0, self.settings.lease_seconds / 2))
        self._closers.shutdown(wait=True)
        self._engine.drain()

    def also_renew(self, runs: Runs) -> None:
        """Tell how much state may be on its way here: prefills are begun only for that."""
        if budget := getattr(self._engine, "budget", None):
            runs.publish_budget(self._node, *budget())

    def also_reclaim(self, client: redis.Redis) -> None:
        """Prefill here what waits for a prefill node while there is none, beyond a short absence.

        One that only loads its model is there. No more is taken over than has room at once: what
        waits on goes to the prefill node if it comes back.
        """
        if self._has_prefill(client):
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = time.monotonic()
        if self._alone:
            self._take_over(Runs(client, self.settings))

    @property
    def _alone(self) -> bool:
        """Whether no prefill node was there for longer than a short absence. Any thread."""
        since = self._alone_since
        absent = since is not None and time.monotonic() - since >= self.settings.lease_seconds
        return absent and not self.stopping

    def _take_over(self, runs: Runs) -> None:
        with self._changed:
            room = self._wanted
        if room > 0 and (moved := runs.take_over(self._node, room)):
            log.warning("no prefill node is there: %d jobs are prefilled here", moved)

    def _has_prefill(self, client: redis.Redis) -> bool:
        """Whether a prefill worker is there: it tells so itself, or RQ has heard of it lately.

        What RQ knows of a worker outlives it by more than a minute, so it counts only where none
        has told of itself.
        """
        if Nodes(client).list("prefill"):
            self._told = True
            return True
        if self._told:
            return False
        names = cast("set[bytes]", client.smembers(f"{RQ_KEY_PREFIX}:workers:{PREFILL}"))
        return bool(names) and bool(client.exists(*names))

    # --- rows --------------------------------------------------------------------------------

    def _admit(self) -> None:
        while True:
            with self._changed:
                execution = self._inbox.popleft() if self._inbox else None
            if execution is None:
                break
            if self.stopping and (self._leaving.searched and not self._leaving.heir):
                self._settle_after(execution, partial(self._give_back, execution))
                continue
            try:
                execution.job.check_whole()
                self._engine.add(execution, execution.job)
            except SendBack as error:
                log.info("%s goes back to prefill: %s", execution.job.id, error)
                execution.notes.fork("start", "sent back", str(error))
                self._settle_after(execution, partial(self._send_back, execution))
            except Exception as error:
                self._close(Finished(execution, error=error))
            else:
                self._rows.append(execution)
        with self._changed:
            self._wanted = self._engine.free() - len(self._inbox)
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Drop rows whose job was cancelled or given to somebody else."""
        for execution in [row for row in self._rows if row.cancelled or row.lost]:
            self._engine.cancel(execution)
            self._rows.remove(execution)
            if execution.lost:
                self.drop(execution)
            else:
                self._settle_after(execution, partial(self._cancelled, execution))

    # --- leaving -----------------------------------------------------------------------------

    @property
    def _done_taking(self) -> bool:
        """Whether a stop was asked for and nothing waits that another node could go on with."""
        if not self._leaving.possible:
            return self.stopping
        return self.stopping and (self.out_of_time or self._emptied.is_set())

    def _send_off(self) -> None:
        """Send an answer on to the node that takes over, while the others go on."""
        if not self.stopping or self.out_of_time:
            return
        execution = self._leaving.next(self._rows)
        if execution is None:
            return
        heir = self._leaving.heir
        try:
            tail = cast(Leaver, self._engine).leave(execution, heir)
        except Exception as error:
            log.error("%s cannot leave", execution.job.id, exc_info=error)
            self._engine.cancel(execution)
            self._rows.remove(execution)
            self._settle_after(execution, partial(self._give_back, execution))
            return
        if tail is None:
            return
        self._rows.remove(execution)
        self._leaving.under_way.add(execution.id)
        self._outbox.then(execution, lambda: self._submit(self._hand_over, execution, heir, tail))

    def _hand_over(self, execution: Execution, heir: str, tail: Tail) -> None:
        """On a background thread, after the events: the state goes, then the job."""
        job, notes = execution.job, execution.notes
        try:
            try:
                with notes.stage("hand over"):
                    sent = dict(tail())
            except Exception as error:
                if not self._leaving.reaches(execution, heir):
                    self.settle(execution, partial(self._give_back, execution))
                    return
                log.warning("%s goes on at %s without its state: %s", job.id, heir, error)
                sent = {"path": "none", "error": f"{type(error).__name__}: {error}"[:500]}
            notes.fork("node", heir, "this one is to stop")
            facts = facts_of(job, heir, sent)
            if self._rehomed(execution, heir, facts) == "kept":
                self.settle(execution, partial(self._give_back, execution))
        except Exception:
            log.exception("handing over %s ended in an error of the loop", job.id)
        finally:
            self._leaving.under_way.discard(execution.id)

    def _rehomed(self, execution: Execution, heir: str, facts: Mapping[str, Any]) -> str | None:
        """Give the job to `heir`, and let go of what is here; "kept" where it stays."""
        job = execution.job
        with ExitStack() as held:
            try:
                held.enter_context(self._leaving.still(job, heir))
            except Exception as error:
                log.warning("%s stays: its records are not at %s: %s", job.id, heir, error)
                return "kept"
            outcome = self.settle(
                execution,
                lambda: self.runs.rehome(job, heir, facts, self.noted(execution, "handed over")),
            )
            if outcome == "ok":
                log.info("%s goes on at %s", job.id, heir)
                self._leaving.left(job)
        return outcome

    def _pass_on(self) -> bool:
        """While stopping, on the taking thread: whether jobs are taken for the node that takes
        over. What runs is made ready to go."""
        if self.out_of_time or self._served.is_set() or not self._leaving.look():
            return False
        self._leaving.prepare(list(self._rows))
        return True

    def _cancelled(self, execution: Execution) -> Outcome:
        return self.runs.cancelled(execution.job, ledger=self.noted(execution, "cancelled"))

    def _give_back(self, execution: Execution) -> Release:
        return self.runs.hand_back(execution.job, ledger=self.noted(execution, "handed back"))

    def _send_back(self, execution: Execution) -> Release:
        return self.runs.send_back(execution.job, ledger=self.noted(execution, "sent back"))

    def _hand_back_all(self) -> None:
        for execution in self._rows:
            self._engine.cancel(execution)
        with self._changed:
            waiting = list(self._inbox)
            self._inbox.clear()
        for execution in [*self._rows, *waiting]:
            self._settle_after(execution, partial(self._give_back, execution))
        self._rows.clear()

    def _close(self, finished: Finished) -> None:
        """An execution has ended in the engine: settle it behind its events."""
        execution = finished.execution
        if execution in self._rows:
            self._rows.remove(execution)
        ended = time.monotonic()
        self._outbox.then(execution, lambda: self._submit(self._settle_finished, finished, ended))

    def _settle_after(self, execution: Execution, step: Any) -> None:
        self._outbox.then(execution, lambda: self._submit(self.settle, execution, step))

    def _submit(self, function: Any, *arguments: Any) -> None:
        try:
            self._closers.submit(function, *arguments)
        except RuntimeError:  # shut down: the process is about to end
            function(*arguments)

    def _settle_finished(self, finished: Finished, ended: float) -> None:
        """On a background thread, after the events: make the turn durable, then end the job."""
        execution, error = finished.execution, finished.error
        if execution.lost:
            self.drop(execution)
            return
        execution.notes.add("flush", ended, time.monotonic())
        told: Mapping[str, Any] | None = None
        if error is None and finished.commit is not None:
            try:
                with execution.notes.stage("record"):
                    told = finished.commit()
            except Exception as failure:
                error = failure
        if error is not None or finished.result is None:
            self.fail(execution, error or RuntimeError("the engine gave no result"))
            return
        result = finished.result
        if told:
            result = replace(result, path={**result.path, **told})
        ledger = b""

        def finish() -> Outcome:
            nonlocal ledger
            ledger = self.noted(execution, result.status)
            return self._finish(execution, result, ledger)

        if self.settle(execution, finish) == "ok" and finished.noted is not None and ledger:
            finished.noted(execution.job, result, ledger, self.clock.redis(time.monotonic()))

    def _finish(self, execution: Execution, result: Result, ledger: bytes) -> Outcome:
        first = execution.first + len(execution.log)
        outcome = self.runs.finish(execution.job, result, first, ledger)
        if outcome == "behind":
            # Redis came back without its last moments; it gets the whole run again.
            packed = [event.data for event in execution.log]
            tokens = any(event.tokens for event in execution.log)
            self.runs.append(execution.job, execution.first, packed, tokens)
            outcome = self.runs.finish(execution.job, result, first, ledger)
        return outcome

    # --- the taking thread -------------------------------------------------------------------

    def _take(self) -> None:
        client = connect(self.url, patience=0)
        runs = Runs(client, self.settings, self.clock)
        try:
            self._take_from(client, runs)
        finally:
            self._emptied.set()
            client.close()

    def _take_from(self, client: redis.Redis, runs: Runs) -> None:
        pause = 0.05
        execution: Execution | None = None
        while not self.stopping or self._pass_on():
            with self._changed:
                if self._wanted <= 0:
                    self._changed.wait(0.2)
                    continue
            try:
                if execution is None:
                    execution = self._taken(runs)
                if execution is None:
                    if not self.stopping:
                        self._await_work(client, runs)
                    elif not self._rows and not self._inbox:
                        break
                    else:
                        self._served.wait(0.05)
                    continue
                self._get_ready(client, execution)
                pause = 0.05
            except AWAY as error:  # what was taken is held: it goes on from here
                log.warning("Redis is away (%s)", error)
                self._ended.wait(pause)
                pause = min(2 * pause, 1.0)
                continue
            except Exception as error:  # this thread alone takes jobs: one must not end it
                log.exception("take")
                if execution is not None:
                    self.fail(execution, error)
                    execution = None
                self._ended.wait(pause)
                continue
            with self._changed:
                self._inbox.append(execution)
                self._wanted -= 1
                self._changed.notify_all()
            execution = None
        if execution is not None:  # it was not made ready: it is given back with the others
            with self._changed:
                self._inbox.append(execution)

    def _await_work(self, client: redis.Redis, runs: Runs) -> None:
        """Wait for a job of this node; while it is alone, for one to be taken over as well."""
        queues = (self.queue, PREFILL) if self._alone else (self.queue,)
        if wait_for_work(client, *queues) != PREFILL:
            return
        if self._has_prefill(client):  # since a moment ago
            self._alone_since = None
            wake(client, PREFILL)
        else:
            self._take_over(runs)

    def _taken(self, runs: Runs) -> Execution | None:
        """The next job of this node, whose lease is renewed from now on."""
        taking = Meter()
        with charge(taking):
            job = runs.take(self.queue, self.name, self.holder)
        if job is None:
            return None
        execution = Execution(
            job, _emit=self._outbox.put, _progress=self._beat_now.set, first=job.events
        )
        execution.notes.meter.take(taking)
        self.hold(execution)
        return execution

    def _get_ready(self, client: redis.Redis, execution: Execution) -> None:
        """Find what an earlier run has said, and whether it was cancelled meanwhile."""
        job = execution.job
        if job.first_token_at is not None:
            with execution.notes.stage("replay"), charge(execution.notes.meter):
                execution.replay = events.replay(client, job.id, job.events)
        if job.cancel:
            execution.mark_cancelled()
        elif prepare := getattr(self._engine, "prepare", None):
            prepare(execution, job)
