"""What both worker loops share: RQ registration, heartbeats, commands, signals, settling.

An RQ worker of our own that never forks and imports nothing named in Redis. RQ's BaseWorker gives
it its identity (`rq:worker:<name>`); the steps of jobs are our scripts. Threads, none of which
touches MLX: the heartbeat renews all leases, the listener hears cancels and RQ's stop commands,
the reclaimer takes back jobs of dead workers.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import redis
from rq.defaults import RQ_KEY_PREFIX
from rq.worker import BaseWorker, WorkerStatus

from scheduler import scripts
from scheduler.config import JobsConfig
from scheduler.execution import Execution
from scheduler.jobs import Jobs
from scheduler.ledger.clock import Clock
from scheduler.queue import rq_queue
from scheduler.reclaim import NodeLock, Reclaimer
from scheduler.record import JobError
from scheduler.redis_client import AWAY, connect
from scheduler.runs import Cancelled, Drain, Lost, Outcome, Release, Runs
from scheduler.serializer import Msgpack

log = logging.getLogger("tandem.worker")

T = TypeVar("T")

#: A second signal within this time is the same one, delivered by terminal and supervisor alike.
_SAME_SIGNAL = 0.5
_RECONCILE_EVERY = 60.0


def _load_scripts(client: redis.Redis) -> None:
    try:
        scripts.load(client)
    except redis.exceptions.ResponseError as error:  # not for this user: they are sent when called
        log.info("the scripts are not loaded: %s", error)


class LoopWorker(BaseWorker):
    """A worker of one queue in this process. Subclasses implement `_serve`.

    `url`: Redis. `lock_dir`: where the lock of this node and role lies; with it, jobs of a dead
    predecessor are taken back at boot. `on_drain` is called once when a stop is asked for.
    """

    role = "worker"

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        node: str = "local",
        settings: JobsConfig | None = None,
        lock_dir: Path | None = None,
        on_drain: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        connection = connect(url)
        self.settings = settings or JobsConfig()
        super().__init__(
            [rq_queue(queue, connection)],
            name=f"{self.role}-{node}-{os.getpid()}-{secrets.token_hex(3)}",
            connection=connection,
            serializer=Msgpack,
            worker_ttl=self.settings.lease_seconds * 2,
        )
        self.url = url
        self.queue = queue
        self.holder = f"{self.role}:{node}"
        self.clock = clock or Clock()
        # The taking thread must notice a stop soon, so it never waits for Redis inside a call.
        self.runs = Runs(connect(url, patience=0), self.settings, self.clock)
        self._lock = NodeLock(lock_dir / f"{self.role}-{node}.lock") if lock_dir else None
        self._on_drain = on_drain
        self._held: dict[str, Execution] = {}
        self._held_lock = threading.Lock()
        self._beat_now = threading.Event()
        self._ended = threading.Event()
        self._abandoned = threading.Event()
        self._drain_from: float | None = None
        self._closers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="settle")

    # --- the life of the process -------------------------------------------------------------

    def run(self) -> int:
        """Serve the queue until SIGTERM or SIGINT; 0 when everything was finished or handed back.

        Must be called on the main thread. Raises JobError when the node's lock is taken.
        """
        if self._lock is not None:
            self._lock.acquire()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.register_birth()  # type: ignore[no-untyped-call]  # RQ has no annotations here
        if self._lock is not None:
            report = Reclaimer(self.connection, self.settings).at_boot(self.holder)
            if report:
                log.info("taken back from a dead predecessor: %s", dict(report))
        threads = [
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True)
            for target in (self._heartbeat, self._listen, self._reclaim)
        ]
        for thread in threads:
            thread.start()
        try:
            self._serve()
        finally:
            self._await_settling()
            left = len(self._held)
            self._ended.set()
            self._beat_now.set()
            for thread in threads:
                thread.join(3.0)
            try:
                self.register_death()  # type: ignore[no-untyped-call]  # as above
            except AWAY:
                log.warning("Redis is away: %s is not signed off", self.name)
            if self._lock is not None:
                self._lock.release()
        return 0 if not left else 1

    def _serve(self) -> None:
        raise NotImplementedError

    def _await_settling(self) -> None:
        """Wait for what is being finished in the background; past the grace, hand it back."""
        while self.held() and not self.out_of_time:
            self._ended.wait(0.02)
        if late := self.held():
            self._give_up(self.runs, late)
            for execution in late:
                self.drop(execution)
        self._closers.shutdown(wait=not late)

    def stop(self) -> None:
        """Ask for a drain, as the first SIGTERM does."""
        self._on_signal(signal.SIGTERM, None)

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for: nothing new is taken."""
        return self._drain_from is not None

    @property
    def out_of_time(self) -> bool:
        """True when what runs is to be handed back rather than finished."""
        if self._drain_from is None:
            return False
        grace = self.settings.drain_seconds
        return self._abandoned.is_set() or time.monotonic() - self._drain_from >= grace

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        moment = time.monotonic()
        if self._drain_from is None:
            self._drain_from = moment
            if self._on_drain is not None:
                threading.Thread(target=self._on_drain, name="on_drain", daemon=True).start()
        elif moment - self._drain_from > _SAME_SIGNAL:
            self._abandoned.set()
        # Not here: the thread that this interrupts may be setting the same event and hold its lock.
        threading.Thread(target=self._beat_now.set, name="signal", daemon=True).start()

    # --- executions --------------------------------------------------------------------------

    def hold(self, execution: Execution) -> None:
        """Renew the lease of `execution` from now on."""
        with self._held_lock:
            self._held[execution.id] = execution
        self._beat_now.set()

    def drop(self, execution: Execution) -> None:
        """The execution has ended: its lease needs nobody any more."""
        with self._held_lock:
            self._held.pop(execution.id, None)
        self._beat_now.set()

    def held(self) -> list[Execution]:
        """Executions whose leases this process renews."""
        with self._held_lock:
            return list(self._held.values())

    def check(self, execution: Execution, prefilled: int) -> None:
        """At a chunk boundary: note the progress; raise Lost, Cancelled or Drain."""
        execution.progress(prefilled)
        if execution.lost:
            raise Lost
        if execution.cancelled:
            raise Cancelled
        if self.out_of_time:
            raise Drain

    def settle(self, execution: Execution, step: Callable[[], T]) -> T | None:
        """Run a finishing step until Redis has answered, then drop the execution.

        Gives up (None) when the process is to end and Redis stays away: the lease runs out then.
        """
        pause = 0.05
        try:
            while True:
                try:
                    return step()
                except AWAY as error:
                    if self.out_of_time:
                        log.error("%s is left to its lease: %s", execution.job.id, error)
                        return None
                    time.sleep(pause)
                    pause = min(2 * pause, 1.0)
        finally:
            self.drop(execution)

    def settle_soon(self, execution: Execution, step: Callable[[], Outcome | Release]) -> None:
        """`settle` on a background thread."""
        self._closers.submit(self.settle, execution, step)

    def fail(self, execution: Execution, error: Exception) -> Outcome | None:
        """End the job with what its client may know of `error`."""
        job = execution.job
        if isinstance(error, JobError) or getattr(error, "public", False):
            code, message = getattr(error, "code", "server_error"), str(error)
        else:
            log.error("job %s failed", job.id, exc_info=error)
            code, message = "server_error", f"internal error ({type(error).__name__}); see the log"
        execution.notes.fork("end", "failed", code)
        return self.settle(
            execution,
            lambda: self.runs.fail(job, code, message, self.noted(execution, "failed")),
        )

    def noted(self, execution: Execution, outcome: str) -> bytes:
        """The notes of a run that ends now, packed for the step that ends it."""
        job = execution.job
        return execution.notes.packed(
            self.clock,
            lane=self.role,
            node=self.holder.partition(":")[2],
            worker=self.name,
            queue=self.queue,
            enqueued=job.enqueued_at,
            taken=job.taken_at,
            outcome=outcome,
        )

    # --- threads -----------------------------------------------------------------------------

    def _heartbeat(self) -> None:
        client = connect(self.url, timeout=2.0, patience=0)
        runs = Runs(client, self.settings, self.clock)
        every = self.settings.lease_seconds / 4
        away = loaded = False
        while not self._ended.is_set():
            self._beat_now.wait(every)
            self._beat_now.clear()
            held = self.held()
            if self._abandoned.is_set():
                self._give_up(runs, held)
            try:
                self._renew(runs, held)
                self.clock.settle(client)
                if not loaded:  # a server that was away may have started anew, and have none
                    _load_scripts(client)
                away, loaded = False, True
            except AWAY as error:
                if not away:  # once: an outage may last for days
                    log.warning("heartbeat: Redis cannot be written (%s)", error)
                away, loaded = True, False
                self._ended.wait(0.2)
                self._beat_now.set()
            except Exception:
                # Whatever it was: leases that are not renewed would be the greater harm.
                log.exception("heartbeat")
                self._ended.wait(0.5)
                self._beat_now.set()
        client.close()

    def _renew(self, runs: Runs, held: list[Execution]) -> None:
        self._state = WorkerStatus.BUSY if held else WorkerStatus.IDLE
        fields = {k: v for k, v in self.serialize().items() if v is not None}
        entries = [(e.job.id, e.id, e.prefilled) for e in held]
        self.also_renew(runs)
        answers = runs.renew(self.queue, self.name, {**fields, "state": self._state}, entries)
        for execution, answer in zip(held, answers, strict=True):
            if answer == "lost" and execution.id in self._held:
                execution.mark_lost()
            elif answer == "cancel":
                execution.mark_cancelled()

    def _give_up(self, runs: Runs, held: list[Execution]) -> None:
        """Second signal: hand back at once; what the engine still yields is foreign then."""
        for execution in held:
            try:
                runs.hand_back(execution.job, ledger=self.noted(execution, "handed back"))
            except AWAY:
                log.error("%s is left to its lease: Redis is away", execution.job.id)
            execution.mark_lost()

    def _listen(self) -> None:
        channel = f"{RQ_KEY_PREFIX}:pubsub:{self.name}"
        client = connect(self.url, timeout=5.0, patience=0)
        while not self._ended.is_set():
            try:
                with client.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe("tandem:cancel", channel)
                    self._beat_now.set()  # the heartbeat tells of cancels that were not heard
                    while not self._ended.is_set():
                        if message := pubsub.get_message(timeout=1.0):
                            self._hear(message["channel"].decode(), message["data"])
            except AWAY:
                self._ended.wait(0.3)
            except Exception:
                log.exception("listen")
                self._ended.wait(1.0)
        client.close()

    def _hear(self, channel: str, data: bytes) -> None:
        if channel == "tandem:cancel":
            self._mark_cancelled(data.decode(errors="replace"))
            return
        try:
            command: Any = json.loads(data)
            name = command.get("command")
            job_id = str(command.get("job_id", ""))
        except (ValueError, AttributeError):
            log.warning("a malformed command was ignored")
            return
        if name == "shutdown":
            os.kill(os.getpid(), signal.SIGTERM)
        elif name in ("stop-job", "stop-execution"):
            resp = job_id.rpartition("-")[0]
            if any(e.job.id == resp for e in self.held()):
                self._closers.submit(self._cancel_from_rq, resp)

    def _cancel_from_rq(self, resp: str) -> None:
        Jobs(self.runs.client, self.settings).cancel(resp)

    def _mark_cancelled(self, resp: str) -> None:
        for execution in self.held():
            if execution.job.id == resp:
                execution.mark_cancelled()
                self.cancel_arrived()

    def also_renew(self, runs: Runs) -> None:
        """What else a subclass has to say with every heartbeat; may raise what Redis raises."""

    def also_reclaim(self, client: redis.Redis) -> None:
        """What else a subclass looks after now and then; may raise what Redis raises."""

    def cancel_arrived(self) -> None:
        """A held job was cancelled; subclasses wake what waits."""

    def _reclaim(self) -> None:
        client = connect(self.url, patience=0)
        reclaimer = Reclaimer(client, self.settings)
        reconciled = float("-inf")
        while not self._ended.wait(self.settings.lease_seconds / 4):
            try:
                reclaimer.expired()
                self.also_reclaim(client)
                if time.monotonic() - reconciled > _RECONCILE_EVERY:
                    reclaimer.reconcile()
                    reclaimer.release_promises()
                    reconciled = time.monotonic()
            except AWAY:
                reclaimer.outage()
            except Exception:
                log.exception("reclaim")
        client.close()
