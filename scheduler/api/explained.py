"""Routes of a response's ledger: where its time went, as data and as a picture."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.lookup import find_job
from scheduler.ledger.account import ledger_of
from scheduler.ledger.drawing import svg

ResponseId = Annotated[str, Path(max_length=256)]


def add(routes: APIRouter, backend: Backend) -> None:
    """Add the routes to those of /v1/responses. Whose response it is not sees a 404."""

    @routes.get("/{response_id}/ledger.svg")
    def draw_ledger(
        response_id: ResponseId, width: Annotated[int, Query(ge=200, le=4000)] = 960
    ) -> Response:
        """An extension: the timeline of a response."""
        return Response(svg(explained(backend, response_id), width), media_type="image/svg+xml")

    @routes.get("/{response_id}/ledger")
    def explain_response(response_id: ResponseId) -> dict[str, Any]:
        """An extension: where a response's time and bytes went, and which way it took."""
        return explained(backend, response_id)


def explained(backend: Backend, response: str) -> dict[str, Any]:
    """The ledger of a response that the caller may see, up to now where it is live. Fault 404."""
    job = find_job(backend, response)
    clock = backend.jobs.clock
    with contextlib.suppress(RedisError):
        clock.settle(backend.redis)
    return ledger_of(job, clock.redis(time.monotonic()))
