"""Counts requests by route and status; a route's pattern, never an id, so the names stay few."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.api.stream import DIRECT, WIRE
from scheduler.api.wire import Wire

if TYPE_CHECKING:
    from scheduler.api.metrics import Metrics


class Meter:
    """ASGI middleware around everything, refusals of the gate too."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope[DIRECT], scope[WIRE] = send, Wire.of(scope, receive)
        try:
            await self._app(scope, receive, watched)
        finally:
            route = _route(scope)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


def _route(scope: Scope) -> str:
    route = scope.get("route")
    path = getattr(route, "path", None)
    if path is not None:
        return str(path)
    return "/rq" if scope["path"].startswith("/rq") else "none"
