"""How the whole stack stands at one moment: for the status page and for the metrics.

One look costs a few round trips and is kept for a second, however many ask. A part that cannot be
reached is left out and named, so that the page that should explain a failure does not fail with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from redis.exceptions import RedisError

from scheduler.api.backend import Backend, missing_workers
from scheduler.api.faults import Fault
from scheduler.batches import Batch
from scheduler.nodes import Node
from scheduler.record import LIVE, Forecast, Job
from scheduler.redis_client import AWAY
from store.errors import StoreError

T = TypeVar("T")
KEPT_SECONDS = 1.0
MAX_JOBS = 1000
"""Live jobs that are looked at, newest first."""
RECENT = 200
"""Ended jobs among which the latest hand-offs are looked for."""

STAGES = {
    "prefill queue": "waits for the prefill worker",
    "prefill": "is being prefilled",
    "hand-over": "prefilled, waits for a decode slot",
    "decode queue": "waits for the decode worker",
    "decode": "is being answered",
}
"""Where a live request can be; those with "waits" are where capacity is missing."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that one look has found. Times in seconds of Redis TIME.

    `missing`: what does not answer, with why. `stages`: (jobs, seconds that the oldest is in it).
    """

    at: float
    missing: Sequence[str] = ()
    nodes: Sequence[Node] = ()
    live: Sequence[Job] = ()
    places: Mapping[str, Forecast] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    handoffs: Sequence[Job] = ()
    store: Mapping[str, Any] | None = None
    redis: Mapping[str, Any] | None = None
    batches: Sequence[Batch] = ()
    files_bytes: int = 0
    stages: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str | None:
        """The waiting stage whose requests have waited longest together, None where none waits."""
        waiting = {
            name: count * oldest
            for name, (count, oldest) in self.stages.items()
            if count and "waits" in STAGES[name]
        }
        return max(waiting, key=lambda name: waiting[name]) if waiting else None


class Looker:
    """Looks at most once a second. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._last: tuple[float, Situation] | None = None

    def look(self) -> Situation:
        """The situation, at most a second old. Never raises for what cannot be reached."""
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > KEPT_SECONDS:
                found = _look(self._backend)
                self._last = (time.monotonic(), found)
            return self._last[1]


def stage_of(job: Job) -> str:
    """Where a live job is: a key of STAGES."""
    if job.status == "prefilling":
        return "prefill"
    if job.status == "decoding":
        return "decode"
    if job.handoff is not None or job.status == "handing_off":
        return "hand-over"
    return "prefill queue" if job.stage == "prefill" else "decode queue"


def since(job: Job) -> float:
    """When a live job came to where it is."""
    return max(job.times.get(job.status, 0.0), job.created_at)


class _Asker:
    """Asks one part after the other, and notes which do not answer."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def ask(self, name: str, what: Callable[[], T], without: T) -> T:
        """What a part answers, or `without`."""
        try:
            return what()
        except (RedisError, *AWAY) as error:
            why = f"Redis does not answer ({type(error).__name__})"
        except (StoreError, Fault):
            why = f"{name} does not answer"
        if why not in self.missing:
            self.missing.append(why)
        return without


def _look(backend: Backend) -> Situation:
    asker, redis, jobs = _Asker(), backend.redis, backend.jobs
    clock = asker.ask("Redis", backend.probe.time, (int(time.time()), 0))
    now = clock[0] + clock[1] / 1e6
    if asker.missing:
        return Situation(at=now, missing=asker.missing)
    no_nodes: list[Node] = []
    no_jobs: list[Job] = []
    nodes = asker.ask("nodes", backend.nodes.list, no_nodes)
    live = asker.ask("jobs", lambda: jobs.list(LIVE, MAX_JOBS), no_jobs)
    places: dict[str, Forecast] = {}
    unknown: dict[str, Forecast] = {}
    for queue in sorted({job.queue for job in live if not job.run and job.queue}):
        places |= asker.ask("jobs", partial(jobs.forecast, queue), unknown)
    waits = {
        queue: asker.ask("jobs", partial(jobs.predicted_wait, 1, queue=queue), 0.0)
        for queue in sorted({"prefill"} | {node.queue for node in nodes if node.queue})
    }
    handed = asker.ask(
        "jobs", lambda: jobs.list(("decoding", "completed", "incomplete"), RECENT), no_jobs
    )
    stats = asker.ask("the store", lambda: _stats(backend), None)
    memory = asker.ask("Redis", partial(redis.info, "memory"), None)
    asker.missing += missing_workers(nodes)
    return Situation(
        at=now,
        missing=asker.missing,
        nodes=nodes,
        live=live,
        places=places,
        waits=waits,
        handoffs=[job for job in handed if job.handoff][:10],
        store=stats,
        redis=cast("Mapping[str, Any] | None", memory),
        batches=asker.ask("jobs", lambda: backend.batches.unfinished(backend.config.node), []),
        files_bytes=asker.ask("files", backend.files.used_by_all, 0),
        stages=_stages(live, now),
    )


def _stats(backend: Backend) -> Mapping[str, Any] | None:
    with backend.store() as client:
        return client.stats()


def _stages(live: Sequence[Job], now: float) -> dict[str, tuple[int, float]]:
    stages = dict.fromkeys(STAGES, (0, 0.0))
    for job in live:
        count, oldest = stages[stage_of(job)]
        stages[stage_of(job)] = (count + 1, max(oldest, now - since(job)))
    return stages
