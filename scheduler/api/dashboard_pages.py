"""rq-dashboard's own pages, made safe to show what clients wrote, without touching its files.

What rq-dashboard 0.9.0 does and this does not: it shows descriptions, metadata, results and errors
as HTML; puts names from the address into scripts; unpickles what lies in Redis; answers 500 for
jobs it does not know and for jobs with dependencies; and changes queues on plain GET requests.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import scheduler.serializer  # noqa: F401  # before rq_dashboard: takes pickle out of reach

# isort: split
from flask import Flask, current_app, g, jsonify, render_template, request, url_for
from jinja2 import BaseLoader, PackageLoader
from redis.exceptions import RedisError
from rq.exceptions import NoSuchJobError
from rq_dashboard import default_settings, web

from scheduler.api import dashboard_data
from scheduler.api.dashboard_user import ReadOnly
from scheduler.serializer import Msgpack

READS = frozenset(
    (
        "static", "rq_dashboard.static", "rq_dashboard.favicon", "rq_dashboard.queues_overview",
        "rq_dashboard.workers_overview", "rq_dashboard.jobs_overview", "rq_dashboard.job_view",
        "rq_dashboard.list_queues", "rq_dashboard.list_jobs", "rq_dashboard.job_info",
        "rq_dashboard.list_workers",
    )
)  # fmt: skip
"""All that may be asked for; what the dashboard has beside these changes something."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,300}")
_HIDE = (
    "<style>#requeue-job-btn,#compact-btn,#requeue-all-btn,#empty-btn,"
    "[data-role=requeue-job-btn]{display:none!important}</style></head>"
)
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    # underscore.js compiles its templates, so evaluation has to be allowed.
    "script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; connect-src 'self'; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'; object-src 'none'"
)


class _EscapingLoader(BaseLoader):
    """The dashboard's templates with every value escaped and no button that does nothing."""

    _inner = PackageLoader("rq_dashboard", "templates")

    def get_source(
        self, environment: Any, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        source, name, fresh = self._inner.get_source(environment, template)
        # "<%=" puts text in as HTML; "$(" marks the places that escape by themselves.
        source = re.sub(r"<%=(?!\s*\$\()", "<%-", source)
        source = source.replace("'{{ queue.name }}'", "{{ queue.name|tojson }}")
        source = source.replace(
            '<script type="text/javascript">',
            '<script nonce="{{ g.nonce }}" type="text/javascript">',
        )
        return source.replace("</head>", _HIDE), name, fresh


def pages(user: ReadOnly, workers: Callable[[], list[dict[str, Any]]], *, delete: bool) -> Flask:
    """The dashboard as a Flask application that only reads.

    `workers` gives the rows of its workers page. `delete`: show the button that cancels a job.
    """
    web.config.serializer = Msgpack
    web.Job = dashboard_data.Job
    web.get_queue_registry_jobs_count = dashboard_data.page
    app = Flask("rq_dashboard.cli")  # a module of the package, so that its static files are found
    app.jinja_loader = _EscapingLoader()
    app.jinja_env.autoescape = True
    app.config.from_object(default_settings)
    app.config.update(RQ_DASHBOARD_REDIS_URL=("redis",), RQ_DASHBOARD_DISABLE_DELETE=not delete)
    app.register_blueprint(web.blueprint)
    # Its own connects anew for every request, as whatever user its address names.
    app.before_request_funcs["rq_dashboard"] = [lambda: _prepare(user)]
    app.after_request(_guard)
    stock = app.view_functions["rq_dashboard.list_queues"]

    def list_queues(instance_number: int) -> Any:
        answer, headers = stock(instance_number)
        shown = dashboard_data.queues(current_app.redis_conn, answer.get_json()["queues"])
        return jsonify(queues=shown), headers

    def list_workers(instance_number: int) -> Any:
        return jsonify(workers=workers()), {"Cache-Control": "no-store"}

    app.view_functions["rq_dashboard.list_queues"] = list_queues
    app.view_functions["rq_dashboard.list_workers"] = list_workers
    app.view_functions["rq_dashboard.workers_overview"] = _workers_overview
    app.register_error_handler(NoSuchJobError, lambda _: ("no such job", 404))
    app.register_error_handler(LookupError, lambda _: ("no such page", 404))
    app.register_error_handler(ValueError, lambda _: ("no such page", 404))
    app.register_error_handler(RedisError, lambda _: ("Redis cannot be reached", 503))
    return app


def _prepare(user: ReadOnly) -> Any:
    """Before each request: refuse what changes anything, and odd names; connect."""
    g.nonce = secrets.token_urlsafe(16)
    if request.endpoint not in READS or request.method not in ("GET", "HEAD", "OPTIONS"):
        return "this dashboard is read-only: use `tandem cancel` or the API\n", 403
    given = request.view_args or {}
    for name in ("queue_name", "registry_name", "job_id", "order"):
        if given.get(name) is not None and not _NAME.fullmatch(str(given[name])):
            return "no such page", 404
    if given.get("instance_number", 0) != 0:
        return "no such page", 404
    if request.endpoint not in ("static", "rq_dashboard.static", "rq_dashboard.favicon"):
        current_app.redis_conn = user.client()
    return None


def _guard(answer: Any) -> Any:
    nonce = g.get("nonce", "")
    answer.headers["Content-Security-Policy"] = _POLICY.format(nonce=nonce)
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Referrer-Policy"] = "no-referrer"
    return answer


def _workers_overview(instance_number: int) -> Any:
    """The page without its list of workers: its script fetches that, and Redis may be written."""
    page = render_template(
        "rq_dashboard/workers.html",
        current_instance=instance_number,
        instance_list=["redis"],
        workers=[],
        rq_url_prefix=url_for("rq_dashboard.queues_overview"),
        rq_dashboard_version=web.rq_dashboard_version,
        rq_version=web.rq_version,
        active_tab="workers",
        deprecation_options_usage=False,
    )
    return page, {"Cache-Control": "no-store"}
