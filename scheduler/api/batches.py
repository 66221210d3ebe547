"""Routes of /v1/batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import Field, field_validator

from scheduler.api.backend import Backend
from scheduler.api.bodies import BodyRoute
from scheduler.api.caller import current
from scheduler.api.faults import Fault, bad, missing
from scheduler.api.files import check_seconds, find_file
from scheduler.api.schema import Metadata, Name, Shape, check_metadata
from scheduler.batches import ENDPOINTS, Batch
from scheduler.files import KEEP_SECONDS

BatchId = Annotated[str, Path(max_length=256)]
MAX_OPEN = 100
"""Batches of one owner that may be under way."""


class Expiry(Shape):
    """When output files go."""

    anchor: Literal["created_at"]
    seconds: int


class NewBatch(Shape):
    """Body of POST /v1/batches."""

    input_file_id: Name
    endpoint: Name
    completion_window: Name
    metadata: Metadata | None = None
    output_expires_after: Expiry | None = Field(None)

    _check_metadata = field_validator("metadata")(check_metadata)


def router(backend: Backend, kick: Callable[[], None]) -> APIRouter:
    """The routes, working with `backend`. `kick` tells the driver that there is work."""
    routes = APIRouter(prefix="/v1/batches", route_class=BodyRoute, tags=["batches"])

    @routes.post("")
    def create_batch(body: NewBatch) -> dict[str, Any]:
        endpoint = next((known for known in ENDPOINTS if known == body.endpoint), None)
        if endpoint is None:
            raise bad(
                f"batches are served for {' and '.join(ENDPOINTS)}, not for '{body.endpoint[:80]}'",
                "endpoint",
            )
        if body.completion_window != "24h":
            raise bad("completion_window must be '24h'", "completion_window")
        file = find_file(backend, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise bad("the input file must have the purpose 'batch'", "input_file_id")
        caller = current()
        under_way = 0
        for batch in backend.batches.unfinished(backend.config.node):
            under_way += batch.owner == caller.owner
        if under_way >= MAX_OPEN:
            raise Fault(
                429,
                f"{MAX_OPEN} of your batches are under way: send it again when one has ended",
                code="too_many_batches",
                after=60,
            )
        expiry = body.output_expires_after
        made = backend.batches.create(
            owner=caller.owner,
            endpoint=endpoint,
            input_file=file.id,
            home=backend.config.node,
            keep=check_seconds(expiry.seconds) if expiry else KEEP_SECONDS,
            metadata=dict(body.metadata or {}),
        )
        backend.note("batch", made.id, input_file=file.id, endpoint=endpoint)
        kick()
        return batch_object(made)

    @routes.get("")
    def list_batches(
        limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        caller = current()
        if after is not None:
            find_batch(backend, after, "after")
        data: list[dict[str, Any]] = []
        skipping = after is not None
        for batch in backend.batches.newest(caller.owner if caller.scoped else None):
            if not skipping:
                data.append(batch_object(batch))
            skipping = skipping and batch.id != after
            if len(data) > limit:
                break
        shown = data[:limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(data) > limit,
        }

    @routes.get("/{batch_id}")
    def retrieve_batch(batch_id: BatchId) -> dict[str, Any]:
        return batch_object(find_batch(backend, batch_id))

    @routes.post("/{batch_id}/cancel")
    def cancel_batch(batch_id: BatchId) -> dict[str, Any]:
        batch = find_batch(backend, batch_id)
        if batch.ended:
            raise bad(f"{batch.id} is {batch.status}: only one under way is cancelled", "batch_id")
        backend.batches.cancel(batch)
        backend.note("cancel", batch.id)
        kick()
        return batch_object(find_batch(backend, batch_id))

    return routes


def find_batch(backend: Backend, ident: str, param: str = "batch_id") -> Batch:
    """A batch that the caller may see. Fault 404."""
    batch = backend.batches.get(ident)
    if batch is None or not current().may_see(batch.owner):
        raise missing("Batch", ident[:80], param)
    return batch


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's clients know it."""

    def at(status: str) -> int | None:
        return int(batch.at[status]) if status in batch.at else None

    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": "24h",
        "status": batch.shown,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created),
        "in_progress_at": at("in_progress"),
        "expires_at": int(batch.expires),
        "finalizing_at": at("finalizing"),
        "completed_at": at("completed"),
        "failed_at": at("failed"),
        "expired_at": at("expired"),
        "cancelling_at": int(batch.cancelling) if batch.cancelling is not None else None,
        "cancelled_at": at("cancelled"),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": _usage(batch.usage),
        "metadata": batch.metadata or None,
    }


def _usage(told: dict[str, int] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    return {
        "input_tokens": told["input"],
        "input_tokens_details": {"cached_tokens": told["cached"]},
        "output_tokens": told["output"],
        "output_tokens_details": {"reasoning_tokens": told["reasoning"]},
        "total_tokens": told["input"] + told["output"],
    }
