"""Finding what a client names: a response in Redis or in the store, a page of a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from scheduler import events
from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.faults import bad, missing
from scheduler.api.items import split
from scheduler.api.lineage import divided, is_id
from scheduler.images import is_bare
from scheduler.ledger.keeping import thaw
from scheduler.record import Job, JobNotFound, Status
from store.turns import Turn

Order = Literal["asc", "desc"]
_ENDED: dict[str, Status] = {"completed": "completed", "incomplete": "incomplete"}


def find_job(backend: Backend, response: str) -> Job:
    """The job of a response: live or recent from Redis, older from the store. Fault 404.

    One of another owner is looked for in both places, as one that does not exist is.
    """
    return recent_job(backend, response) or stored_job(backend, response)


def recent_job(backend: Backend, response: str) -> Job | None:
    """The job as Redis has it for the caller; None: the store may. Fault 404 where none can."""
    if not is_id(response) or backend.deleted(response):
        raise missing("Response", response[:80], "response_id")
    try:
        job = backend.jobs.get(response)
    except JobNotFound:
        return None
    return _with_what_it_said(backend, job) if current().may_see(job.owner) else None


def stored_job(backend: Backend, response: str) -> Job:
    """The job of a turn that the store has. Fault 404; Fault 503 where it cannot be asked."""
    with backend.store() as store:
        turn = store.get_turn(response)
    if turn is None or not current().may_see(turn.owner):
        raise missing("Response", response[:80], "response_id")
    return job_of(turn)


def _with_what_it_said(backend: Backend, job: Job) -> Job:
    """A job that was stopped in its answer, with what its events hold of it."""
    stopped = job.status in ("cancelled", "failed") and job.first_token_at is not None
    if not stopped or job.output:
        return job
    said = events.replay(backend.redis, job.id).text
    return replace(job, output={"text": said}) if said else job


def job_of(turn: Turn) -> Job:
    """A stored turn as the job that it was, where the job's own record has expired."""
    inputs, outputs = split(turn.id, turn.items)
    status = _ENDED.get(turn.status, "completed")
    told = turn.usage
    job = Job(
        id=turn.id,
        status=status,
        stage="decode",
        owner=turn.owner,
        model=turn.model,
        request={**turn.params, "input": inputs},
        conversation=turn.conversation,
        previous=turn.parent,
        node="",
        queue="",
        background=False,
        priority="normal",
        created_at=turn.created,
        times={status: turn.created},
        first_token_at=None,
        prompt_tokens=turn.total - len(turn.output_ids),
        held_tokens=0,
        prefilled_tokens=turn.total - len(turn.output_ids),
        computed_tokens=0,
        run="",
        worker="",
        attempts=1,
        cancel=False,
        events=0,
        handoff=None,
        output={"items": outputs},
        usage=told or None,
        error=None,
        reason=turn.finish if status == "incomplete" else "",
        path={},
    )
    return thaw(job, turn.ledger) if turn.ledger else job


def input_items(backend: Backend, job: Job) -> list[dict[str, Any]]:
    """What a request sent: its own items, after those that it repeated of earlier turns."""
    own = list(job.request.get("input") or [])
    if is_bare(own):
        with backend.store() as store:
            turn = store.get_turn(job.id)
        own = split(turn.id, turn.items)[0] if turn is not None else own
    about = (job.request.get("params") or {}).get("about") or {}
    if job.previous is None or not about.get("stateless"):
        return own
    with backend.store() as store:
        return [item for turn in store.path_of(job.previous) for item in turn.items] + own


def conversation_items(backend: Backend, conversation: str) -> list[dict[str, Any]]:
    """All items of a conversation up to its newest turn, oldest first. Fault 404."""
    record = find_conversation(backend, conversation)
    seed, added = divided(record)
    items = list(seed)
    if record["head"] is not None:
        with backend.store() as store:
            for turn in store.path_of(record["head"]):
                items += turn.items
    return [*items, *added]


def find_conversation(backend: Backend, conversation: str) -> dict[str, Any]:
    """A conversation's record. Fault 404."""
    record = None
    if is_id(conversation):
        with backend.store() as store:
            record = store.get_conversation(conversation)
    if record is None or not current().may_see(record["owner"]):
        raise missing("Conversation", conversation[:80], "conversation_id")
    return record


def page(
    items: Sequence[dict[str, Any]], limit: int, order: Order, after: str | None
) -> dict[str, Any]:
    """One page of items in OpenAI's list shape. Fault 400 where `after` names none of them."""
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        names = [item.get("id") for item in ordered]
        if after not in names:
            raise bad(f"there is no item '{after[:80]}' here to begin after", "after")
        ordered = ordered[names.index(after) + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }
