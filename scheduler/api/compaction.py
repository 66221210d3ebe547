"""POST /v1/responses/compact: a long conversation as its user's messages and one summary.

The summary is written by the model in a run that is not stored, and travels in a `compaction`
item, which clients send back as they got it (see `scheduler.api.summary`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler.api.backend import Backend
from scheduler.api.bodies import in_turn
from scheduler.api.clients import Client
from scheduler.api.faults import Fault, bad
from scheduler.api.intake import accept
from scheduler.api.items import new_id
from scheduler.api.lineage import find_lineage
from scheduler.api.lookup import find_job
from scheduler.api.prompt import is_empty
from scheduler.api.references import resolved
from scheduler.api.schema import Input, Name, ResponseRequest, Shape, Text, items_of
from scheduler.api.summary import seal
from scheduler.api.view import response_object
from scheduler.delivery import wait
from scheduler.record import Accepted

PROMPT = (
    "Summarise our conversation so far for yourself, so that you can go on with it when you see "
    "the summary and my messages only: what I want, what was done and found out, with names, "
    "numbers and decisions, and what is still to be done. Write the summary alone."
)
SUMMARY_TOKENS = 2048


class CompactRequest(Shape):
    """Body of POST /v1/responses/compact."""

    model: Name | None = None
    input: Input | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    prompt_cache_key: Name | None = None
    max_output_tokens: int | None = Field(
        None, ge=1, le=1 << 30, description="extension: length of the summary"
    )


def add_to(routes: APIRouter, backend: Backend) -> None:
    """Add the route."""

    @routes.post("/compact")
    async def compact_response(request: Request, body: CompactRequest) -> Response:
        """The conversation as a list of items to go on from: user messages and a summary."""
        question = {"type": "message", "role": "user", "content": PROMPT}

        def accepting() -> tuple[list[Mapping[str, Any]], Accepted]:
            given = body.model_dump(exclude_none=True, exclude={"input", "max_output_tokens"})
            past = items_of(resolved(backend, body.input or []))
            if is_empty(past) and body.previous_response_id is None:
                raise bad(
                    "there is nothing to compact: give input or previous_response_id", "input"
                )
            wanted = ResponseRequest.model_validate(
                {
                    **given,
                    "input": [*(_sent(item) for item in past), question],
                    "max_output_tokens": body.max_output_tokens or SUMMARY_TOKENS,
                    "store": False,
                }
            )
            return _user_messages(backend, wanted, past), accept(backend, wanted)

        users, accepted = await in_turn(request, accepting)
        await wait(backend, Client(accepted.id, accepted.client), request)
        made = response_object(await run_in_threadpool(find_job, backend, accepted.id))
        if made["status"] not in ("completed", "incomplete"):
            error = made["error"] or {"message": "the summary was cancelled", "code": "cancelled"}
            raise Fault(500, error["message"], code=error["code"], retry=False)
        said = [part["text"] for item in made["output"] for part in item.get("content") or ()
                if item["type"] == "message"]  # fmt: skip
        item = {
            "id": new_id("cmp"),
            "type": "compaction",
            "encrypted_content": seal("".join(said)),
        }
        return JSONResponse(
            {
                "id": accepted.id,
                "object": "response.compaction",
                "created_at": made["created_at"],
                "output": [*users, item],
                "usage": made["usage"],
                "tandem": made["tandem"],
            },
            headers={"x-request-id": accepted.id},
        )


def _sent(item: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k != "status"}


def _user_messages(
    backend: Backend, wanted: ResponseRequest, own: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    past = list(own)
    lineage = find_lineage(backend, wanted, items_of(wanted.input))
    if wanted.previous_response_id is not None and lineage.parent is not None:
        past = [*lineage.parent.items, *past]
    return [item for item in past if item.get("type") == "message" and item["role"] == "user"]
