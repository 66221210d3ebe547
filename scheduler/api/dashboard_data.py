"""What rq-dashboard shows, read from Redis in few round trips and without running anything.

Replaces four functions of rq-dashboard 0.9.0: its lists count pages wrongly and leave jobs out that
are held back, its poll asks for every job's result, its job page fails on dependencies, and its
workers page shows one job of each worker.
"""

from __future__ import annotations

from typing import Any, cast

import redis
import rq.job
from rq import Queue, Worker
from rq.defaults import RQ_KEY_PREFIX
from rq.exceptions import NoSuchJobError
from rq.rate_limit import RateLimitRegistry
from rq.registry import BaseRegistry, ReadyJobRegistry
from rq.results import Result
from rq_dashboard import web

from scheduler.jobs import Jobs
from scheduler.record import LIVE
from scheduler.serializer import Msgpack

MAX_PAGE = 200
REGISTRIES = ("failed", "deferred", "started", "finished", "scheduled", "canceled")


class _Decodable(str):
    """rq 3 gives dependency ids as text where the dashboard still decodes bytes."""

    def decode(self, *_: Any) -> str:
        return str(self)


class Job(rq.job.Job):
    """The job class of the dashboard's pages."""

    @property
    def dependency_ids(self) -> list[Any]:
        return [_Decodable(name) for name in super().dependency_ids]

    def latest_result(self, timeout: int = 0) -> Result | None:
        """The result that RQ keeps; ours keep the reason of a failure in the job alone."""
        found = super().latest_result(timeout)
        if found is None and self._exc_info:
            # One without an id counts as none.
            return Result(
                self.id,
                Result.Type.FAILED,
                connection=self.connection,
                id="0-0",
                exc_string=self._exc_info,
            )
        return found


def page(
    queue_name: str,
    registry_name: str,
    offset: int,
    per_page: int,
    order: str,
    connection: redis.Redis,
) -> tuple[int, list[dict[str, Any]]]:
    """(how many jobs a registry has, one page of them); order is asc or dsc.

    Raises NoSuchJobError for a registry that does not exist.
    """
    if registry_name not in ("queued", *REGISTRIES):
        raise NoSuchJobError(f"no registry {registry_name}")
    per_page = max(1, min(per_page, MAX_PAGE))
    offset = max(0, offset)
    queue = Queue(queue_name, connection=connection, serializer=Msgpack)
    parts = [queue.key] if registry_name == "queued" else [_registry(queue, registry_name).key]
    held = _held(queue, connection) if registry_name == "deferred" else []
    if registry_name == "deferred":
        parts.append(ReadyJobRegistry(queue_name, connection=connection).key)
    sizes = [_size(connection, key) for key in parts]
    total = sum(sizes) + len(held)
    start, stop = offset, min(offset + per_page, total)
    if order == "dsc":
        start, stop = max(0, total - offset - per_page), total - offset
    ids: list[str] = []
    at = 0
    for key, size in zip(parts, sizes, strict=True):
        low, high = max(start - at, 0), min(stop - at, size)
        if low < high:
            ids += _slice(connection, key, low, high - 1)
        at += size
    ids += held[max(start - at, 0) : max(stop - at, 0)]
    if order == "dsc":
        ids.reverse()
    return total, [_row(job) for job in _jobs(ids, connection)]


def queues(connection: redis.Redis, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The dashboard's queues, with what is held back counted among the deferred."""
    for row in shown:
        queue = Queue(row["name"], connection=connection, serializer=Msgpack)
        ready = ReadyJobRegistry(queue.name, connection=connection).key
        row["deferred_job_registry_count"] += _size(connection, ready)
        row["deferred_job_registry_count"] += len(_held(queue, connection))
    return shown


def workers(client: redis.Redis) -> list[dict[str, Any]]:
    """One row for each run of each worker, and one for each idle worker."""
    running: dict[str, list[str]] = {}
    for job in Jobs(client).list(LIVE, limit=1000):
        if job.run:
            running.setdefault(job.worker, []).append(job.id)
    rows: list[dict[str, Any]] = []
    found = Worker.all(connection=client, serializer=Msgpack)
    for worker in sorted(found, key=lambda w: w.name):
        row = {
            "pid": worker.pid,
            "queues": [queue.name for queue in worker.queues],
            "state": str(worker.get_state()),
            "last_heartbeat": worker.last_heartbeat,
            "birth_date": worker.birth_date,
            "successful_job_count": worker.successful_job_count,
            "failed_job_count": worker.failed_job_count,
            "total_working_time": worker.total_working_time,
            "version": getattr(worker, "version", ""),
            "python_version": getattr(worker, "python_version", ""),
        }
        held = running.get(worker.name, [])
        if not held:
            rows.append({**row, "name": worker.name, "current_job": "idle"})
        for number, name in enumerate(sorted(held), 1):
            title = f"{worker.name} [{number}/{len(held)}]" if len(held) > 1 else worker.name
            stage = "-p" if worker.name.startswith("prefill") else "-d"
            current = {
                "job_id": name + stage,
                "description": name,
                "call_string": name,
                "created_at": None,
            }
            rows.append({**row, "name": title, "current_job": current})
    return rows


def _row(job: rq.job.Job) -> dict[str, Any]:
    # The reason of a failure stands in our job's own hash: no result has to be fetched for it.
    return {
        "id": job.id,
        "created_at": web.serialize_date(job.created_at),
        "started_at": web.serialize_date(job.started_at),
        "ended_at": web.serialize_date(job.ended_at),
        "exc_info": job._exc_info,
        "description": job.description,
    }


def _registry(queue: Queue, name: str) -> BaseRegistry:
    registry: BaseRegistry = getattr(queue, f"{name}_job_registry")
    return registry


def _size(connection: redis.Redis, key: str) -> int:
    if key.startswith(f"{RQ_KEY_PREFIX}:queue:"):
        return connection.llen(key)
    return connection.zcard(key)


def _slice(connection: redis.Redis, key: str, start: int, stop: int) -> list[str]:
    """Job ids; members of the registry of what runs name the run, too."""
    queued = key.startswith(f"{RQ_KEY_PREFIX}:queue:")
    found = connection.lrange(key, start, stop) if queued else connection.zrange(key, start, stop)
    return [name.decode().partition(":")[0] for name in cast("list[bytes]", found)]


def _held(queue: Queue, connection: redis.Redis) -> list[str]:
    """Jobs of this queue that a rate limit of RQ holds back; in no registry of the queue."""
    ids = [
        name
        for limit in RateLimitRegistry.all(connection)
        for name in limit.get_rate_limited_job_ids()
    ]
    return [job.id for job in _jobs(ids, connection) if job.origin == queue.name]


def _jobs(ids: list[str], connection: redis.Redis) -> list[Job]:
    """Jobs that still exist, in one round trip and without a transaction, which is a write."""
    pipe = connection.pipeline(transaction=False)
    for name in ids:
        pipe.hgetall(Job.key_for(name))
    found = []
    for name, raw in zip(ids, pipe.execute() if ids else (), strict=True):
        if raw:
            job = Job(name, connection=connection, serializer=Msgpack)
            job.restore(raw)
            found.append(job)
    return found
