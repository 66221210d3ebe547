"""The status page and what else is asked about the stack itself: /health, /ready, /metrics, /."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, PackageLoader
from starlette.responses import Response

from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.metrics import Metrics
from scheduler.api.situation import Looker, Situation, stage_of
from scheduler.nodes import Node
from scheduler.record import Job

REFRESH = 5
"""Seconds between two loads of the page."""
MAX_ROWS = 50


def router(backend: Backend, looker: Looker, metrics: Metrics) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(tags=["health"])
    page = _environment().get_template("status.html")

    @routes.get("/health")
    async def health() -> dict[str, bool]:
        """This process lives and answers; says nothing about the others."""
        return {"ok": True}

    @routes.get("/ready")
    def ready() -> JSONResponse:
        """200 when a request would be served now: Redis, the store and both workers are there.

        `missing` says what is not. Nodes and models are told to operators only.
        """
        facts = backend.health()
        if not current().operator:
            facts = {name: facts[name] for name in _TOLD}
        return JSONResponse(facts, 200 if facts["ready"] else 503)

    @routes.get("/metrics", response_class=Response)
    def read_metrics(request: Request) -> Response:
        """Prometheus' exposition; OpenMetrics where that is asked for."""
        text, kind = metrics.exposition(request.headers.get("accept", ""))
        return Response(text, media_type=None, headers={"content-type": kind})

    @routes.get("/", include_in_schema=False)
    def status() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        # An operator who is an owner sees others' ids here, and not their responses.
        facts = facts_of(looker.look(), backend) | {"explain": not current().scoped}
        text = page.render(nonce=nonce, refresh=REFRESH, **facts)
        return HTMLResponse(text, headers=_headers(nonce))

    return routes


_TOLD = ("ready", "redis", "store", "prefill", "decode", "missing")


def _headers(nonce: str) -> dict[str, str]:
    return {
        "content-security-policy": (
            f"default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        ),
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def facts_of(found: Situation, backend: Backend) -> dict[str, Any]:
    """What the page is rendered with."""
    shown = sorted(found.live, key=lambda job: _order(job, found))
    return {
        "s": found,
        "model": backend.config.model_name,
        "clock": time.strftime("%H:%M:%S", time.gmtime(found.at)),
        "machines": [_machine(node, found) for node in found.nodes],
        "requests": [_request(job, found) for job in shown[:MAX_ROWS]],
        "more": max(0, len(shown) - MAX_ROWS),
        "handoffs": [_handoff(job) for job in found.handoffs],
        "hot": sum(int(node.facts.get("hot") or 0) for node in found.nodes),
    }


def _order(job: Job, found: Situation) -> tuple[bool, float]:
    """What runs first, then what waits in the order in which it is expected to begin."""
    place = found.places.get(job.id)
    return (not job.run, place.start if place else job.created_at - found.at)


def _machine(node: Node, found: Situation) -> dict[str, Any]:
    facts = node.facts
    limit = int(facts.get("memory_limit") or 0)
    slots = facts.get("slots")
    return {
        "role": node.role,
        "name": node.name,
        "state": node.state,
        "host": node.host,
        "device": str(facts.get("device") or ""),
        "does": [_doing(job, found.at) for job in found.live if _runs_on(job, node)],
        "rows": f"{facts.get('rows', 0)} of {slots}" if slots else "",
        "hot": facts.get("hot", ""),
        "used": int(facts.get("memory_used") or 0),
        "limit": limit,
    }


def _runs_on(job: Job, node: Node) -> bool:
    return bool(job.run) and job.worker.startswith(f"{node.role}-{node.name}-")


def _doing(job: Job, now: float) -> str:
    if job.status == "prefilling":
        return f"prefills {job.id}: {job.prefilled_tokens} of {job.prompt_tokens} tokens"
    took = now - (job.first_token_at or job.times.get(job.status, now))
    return f"decodes {job.id}, for {_seconds(took)}"


def _request(job: Job, found: Situation) -> dict[str, Any]:
    place = found.places.get(job.id)
    part = None
    if job.status == "prefilling" and job.prompt_tokens:
        part = round(min(1.0, job.prefilled_tokens / job.prompt_tokens), 3)
    return {
        "id": job.id,
        "shadow": f"{job.id}-{'p' if job.stage == 'prefill' else 'd'}",
        "owner": job.owner,
        "priority": job.priority,
        "stage": stage_of(job),
        "prompt": job.prompt_tokens,
        "new": job.new_tokens,
        "part": part,
        "age": max(0.0, found.at - job.created_at),
        "start": place.start if place and not job.run else None,
    }


def _handoff(job: Job) -> dict[str, Any]:
    told = job.handoff or {}
    return {
        "id": job.id,
        "path": str(told.get("path", "")),
        "error": str(told.get("error", ""))[:120],
        "bytes": int(told.get("bytes") or 0),
        "seconds": told.get("seconds"),
        "exposed": told.get("exposed_seconds"),
    }


def _environment() -> Environment:
    made = Environment(loader=PackageLoader("scheduler.api", "templates"), autoescape=True)
    made.filters["seconds"] = _seconds
    made.filters["size"] = _size
    return made


def _seconds(value: float | None) -> str:
    """A length of time as people say it."""
    if value is None:
        return ""
    value = max(0.0, float(value))
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    if value < 6000:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def _size(value: float) -> str:
    """A number of bytes as people say it."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
