"""rq-dashboard under /rq, read-only and safe to show what clients wrote.

rq-dashboard 0.9.0 as it comes fails on jobs with dependencies, shows descriptions, results and
errors as HTML, counts its pages wrongly, shows one job for each worker, unpickles, and changes
queues on plain GET requests. Each is put right here without touching its files. The queues are
shadows of Tandem's own records, so nothing may be changed through it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import scheduler.serializer  # noqa: F401  # before rq_dashboard: takes pickle out of reach

# isort: split
import redis
import rq.job
from a2wsgi import WSGIMiddleware
from flask import Flask, jsonify
from jinja2 import BaseLoader, PackageLoader
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import NoSuchJobError
from rq.registry import BaseRegistry
from rq_dashboard import default_settings, web

from scheduler.jobs import Jobs
from scheduler.record import LIVE

SAFE = frozenset(("GET", "HEAD"))
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    # underscore.js compiles its templates, so evaluation has to be allowed.
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'; object-src 'none'"
)
_HIDE = (
    "<style>#requeue-job-btn,#compact-btn,#requeue-all-btn,[data-role=requeue-job-btn]"
    "{display:none!important}</style></head>"
)


class _Decodable(str):
    """rq 3 gives dependency ids as text where the dashboard still decodes bytes."""

    def decode(self, *_: Any) -> str:
        return str(self)


class _Job(rq.job.Job):
    @property
    def dependency_ids(self) -> list[Any]:
        return [_Decodable(name) for name in super().dependency_ids]


class _EscapingLoader(BaseLoader):
    """The dashboard's templates with every value escaped and no button that changes anything."""

    _inner = PackageLoader("rq_dashboard", "templates")

    def get_source(
        self, environment: Any, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        source, name, fresh = self._inner.get_source(environment, template)
        # "<%=" puts text in as HTML; "$(" marks the places that escape by themselves.
        source = re.sub(r"<%=(?!\s*\$\()", "<%-", source)
        return source.replace("</head>", _HIDE), name, fresh


def _page(
    queue_name: str,
    registry_name: str,
    offset: int,
    per_page: int,
    order: str,
    connection: redis.Redis,
) -> tuple[int, list[dict[str, Any]]]:
    """(how many jobs a registry has, one page of them); order is asc or dsc."""
    queue = Queue(queue_name, connection=connection)
    where: Any = queue if registry_name == "queued" else _registry(queue, registry_name)
    ids: Iterable[str]
    if isinstance(where, BaseRegistry):
        total = where.get_job_count(cleanup=False)
        ids = where.get_job_ids(0, -1, cleanup=False)
    else:
        total = where.count
        ids = where.get_job_ids()
    ordered = list(ids)[::-1] if order == "dsc" else list(ids)
    jobs = [queue.fetch_job(name) for name in ordered[offset : offset + per_page]]
    return total, [web.serialize_job(job) for job in jobs if job]


def _registry(queue: Queue, name: str) -> BaseRegistry:
    kinds = ("failed", "deferred", "started", "finished", "scheduled", "canceled")
    if name not in kinds:
        raise NoSuchJobError(f"no registry {name}")
    registry: BaseRegistry = getattr(queue, f"{name}_job_registry")
    return registry


def _workers(client: redis.Redis) -> list[dict[str, Any]]:
    """One row for each run of each worker, and one for each idle worker."""
    running: dict[str, list[str]] = {}
    for job in Jobs(client).list(LIVE, limit=1000):
        if job.run:
            running.setdefault(job.worker, []).append(job.id)
    rows: list[dict[str, Any]] = []
    for worker in sorted(Worker.all(connection=client), key=lambda w: w.name):
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
        for number, name in enumerate(held, 1):
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


def _flask(redis_url: str, client: redis.Redis) -> Flask:
    web.Job = _Job
    web.get_queue_registry_jobs_count = _page
    app = Flask("rq_dashboard.cli")  # a module of the package, so that its static files are found
    app.jinja_loader = _EscapingLoader()
    app.config.from_object(default_settings)
    app.config.update(RQ_DASHBOARD_REDIS_URL=redis_url, RQ_DASHBOARD_DISABLE_DELETE=True)
    app.register_blueprint(web.blueprint)
    web.setup_rq_connection(app)

    def workers(instance_number: int) -> Any:
        answer = jsonify(workers=_workers(client))
        answer.headers["Cache-Control"] = "no-store"
        return answer

    app.view_functions["rq_dashboard.list_workers"] = workers
    app.register_error_handler(NoSuchJobError, lambda error: ("no such job", 404))
    app.register_error_handler(LookupError, lambda error: ("no such page", 404))
    app.register_error_handler(RedisError, lambda error: ("Redis cannot be reached", 503))
    return app


class Dashboard:
    """The ASGI application to mount; whether a client may see it is checked before it."""

    def __init__(self, redis_url: str, client: redis.Redis) -> None:
        self._inner = WSGIMiddleware(_flask(redis_url, client), workers=4)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http":
            return
        if scope["method"] not in SAFE or path.startswith("/requeue/"):
            body = b"this dashboard is read-only: use `tandem cancel` or the API\n"
            headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self._inner(scope, receive, guarded)
