"""rq-dashboard under /rq: read-only, or able to cancel, and nothing else.

The queues are shadows of Tandem's own records, so what the dashboard itself would do to them is
never let through: emptying a queue would lose jobs that our records go on waiting for. With
`api.dashboard = "cancel"` its Delete button cancels the job, as the API does.
"""

from __future__ import annotations

import re
from typing import Any

import redis
from a2wsgi import WSGIMiddleware
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, Response

from scheduler.api import dashboard_data
from scheduler.api.caller import current
from scheduler.api.dashboard_pages import pages
from scheduler.api.dashboard_user import ReadOnly
from scheduler.api.gate import is_foreign
from scheduler.audit import Audit
from scheduler.jobs import Jobs
from scheduler.record import JobNotFound

SAFE = frozenset(("GET", "HEAD"))
_DELETE = re.compile(r"/job/(resp_[0-9a-f]{32})-[pd]/delete")
_REFUSAL = "this dashboard is read-only: use `tandem cancel` or the API\n"


class Dashboard:
    """The ASGI application to mount; whether a client may see it is checked before it."""

    def __init__(
        self, url: str, client: redis.Redis, audit: Audit, jobs: Jobs, *, cancel: bool = False
    ) -> None:
        """`url`: what the dashboard connects to where it gets no user of its own; `client`: ours.

        `cancel`: whether its Delete button cancels a job.
        """
        self.user = ReadOnly(url, client)
        self._audit = audit
        self._jobs = jobs
        self._cancel = cancel
        flask = pages(self.user, lambda: dashboard_data.workers(client), delete=cancel)
        self._inner = WSGIMiddleware(flask, workers=4)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] not in SAFE:
            answer = await self._act(scope)
            await answer(scope, receive, send)
            return

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 403:
                self._note(scope, "refused")
            await send(message)

        await self._inner(scope, receive, watched)

    async def _act(self, scope: Any) -> Response:
        """Anything that would change something: a cancel that is allowed, or a refusal."""
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        match = _DELETE.fullmatch(_path(scope))
        # A page of another site can send a form here, but not this header.
        asked = headers.get("x-requested-with") == "XMLHttpRequest" and not is_foreign(headers)
        if not (self._cancel and match and asked and scope["method"] == "POST"):
            self._note(scope, "refused")
            return PlainTextResponse(_REFUSAL, 403)
        response = match[1]
        try:
            status = await run_in_threadpool(self._jobs.cancel, response)
        except JobNotFound:
            return JSONResponse({"status": "ERROR"}, 404)
        self._note(scope, "cancelled", response)
        return JSONResponse({"status": "OK", "job": status})

    def _note(self, scope: Any, how: str, ident: str | None = None) -> None:
        caller = current()
        self._audit.note(
            "dashboard",
            ident or _path(scope),
            owner=caller.owner,
            address=caller.address,
            method=scope["method"],
            how=how,
        )


def _path(scope: Any) -> str:
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
