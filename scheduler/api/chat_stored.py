"""Stored chat completions: those that were made with `store: true`, as long as their jobs are kept.

All others are kept as well, so that they can be gone on from by their text, but are not shown here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request

from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.faults import Fault, missing
from scheduler.api.lookup import Order, find_job, input_items, page
from scheduler.api.prompt import messages_of
from scheduler.api.schema import Metadata, Shape, check_metadata
from scheduler.api.view import response_object
from scheduler.record import Job
from scheduler.serializer import pack

CompletionId = Annotated[str, Path(max_length=256)]
Limit = Annotated[int, Query(ge=1, le=100)]
Completion = Callable[[dict[str, Any]], dict[str, Any]]
LOOK_AT = 1000
"""Latest jobs that a list is made of."""


class CompletionUpdate(Shape):
    """Body of POST /v1/chat/completions/{id}."""

    metadata: Metadata | None


def add_to(routes: APIRouter, backend: Backend, completion: Completion) -> None:
    """Add the routes below /v1/chat; `completion` makes one of a response."""

    def find(ident: str) -> Job:
        response = "resp_" + ident.removeprefix("chatcmpl-")
        gone = missing("Completion", ident[:80], "completion_id")
        try:
            job = find_job(backend, response)
        except Fault as fault:
            raise (gone if fault.status == 404 else fault) from fault
        if not ident.startswith("chatcmpl-") or not _about(job).get("chat"):
            raise gone
        return job

    @routes.get("/completions")
    def list_completions(
        request: Request, after: str | None = None, limit: Limit = 20, order: Order = "asc",
        model: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Completions of the latest jobs that had `store: true`."""
        wanted = {
            key.removeprefix("metadata[").removesuffix("]"): value
            for key, value in request.query_params.items()
            if key.startswith("metadata[")
        }
        caller = current()
        owner = caller.owner if caller.scoped else None
        latest = backend.jobs.list(("completed", "incomplete"), LOOK_AT, owner=owner)
        found = [
            {"id": "chatcmpl-" + job.id.removeprefix("resp_")}
            for job in reversed(latest)
            if _about(job).get("chat") and model in (None, job.model) and _fits(job, wanted)
        ]
        some = page(found, limit, order, after)
        some["data"] = [_told(completion, find(one["id"])) for one in some["data"]]
        return some

    @routes.get("/completions/{completion_id}")
    def retrieve_completion(completion_id: CompletionId) -> dict[str, Any]:
        return _told(completion, find(completion_id))

    @routes.post("/completions/{completion_id}")
    def update_completion(completion_id: CompletionId, body: CompletionUpdate) -> dict[str, Any]:
        check_metadata(body.metadata)
        job = find(completion_id)
        about = {**_about(job), "metadata": body.metadata or {}}
        params = {**(job.request.get("params") or {}), "about": about}
        key = f"tandem:job:{job.id}"
        if not backend.redis.exists(key):
            raise Fault(
                409, f"{completion_id} is archived: what is said of it cannot be changed any more",
                code="archived", retry=False,
            )  # fmt: skip
        backend.redis.hset(key, "request", pack({**job.request, "params": params}))
        return _told(completion, find(completion_id))

    @routes.delete("/completions/{completion_id}")
    def delete_completion(completion_id: CompletionId) -> dict[str, Any]:
        backend.delete(find(completion_id))
        backend.note("delete", completion_id)
        return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}

    @routes.get("/completions/{completion_id}/messages")
    def list_messages(
        completion_id: CompletionId, after: str | None = None, limit: Limit = 20,
        order: Order = "asc",
    ) -> dict[str, Any]:  # fmt: skip
        """The messages that the completion was asked with."""
        job = find(completion_id)
        sent = messages_of(input_items(backend, job), job.request.get("instructions"))
        told = [_message(message, f"{completion_id}-{n}") for n, message in enumerate(sent)]
        return page(told, limit, order, after)


def _about(job: Job) -> dict[str, Any]:
    return dict((job.request.get("params") or {}).get("about") or {})


def _fits(job: Job, wanted: dict[str, str]) -> bool:
    has = _about(job).get("metadata") or {}
    return all(has.get(key) == value for key, value in wanted.items())


def _told(completion: Completion, job: Job) -> dict[str, Any]:
    return completion(response_object(job)) | {"metadata": _about(job).get("metadata") or {}}


def _message(message: dict[str, Any], ident: str) -> dict[str, Any]:
    """A message of a prompt as this API tells it."""
    told = {"id": ident, "refusal": None, "content_parts": None, **message}
    for call in told.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"] = {
                **call["function"],
                "arguments": json.dumps(arguments, ensure_ascii=False),
            }
    return told
