"""The durable record of a finished turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.record import Job, JobError
from store.errors import StoreError, StoreFull
from store.store import Store
from store.turns import Turn


def conversation_of(job: Job, store: Store) -> str:
    """The conversation that a job's turn belongs to: a named one, its parent's, or its own."""
    if job.conversation:
        return job.conversation
    parent = store.get_turn(job.previous) if job.previous else None
    return parent.conversation if parent else "conv_" + job.id.removeprefix("resp_")


def compose(
    job: Job,
    store: Store,
    *,
    fingerprint: bytes,
    output: Sequence[Mapping[str, Any]],
    output_ids: Sequence[int],
    schedule: list[list[int]],
    usage: Mapping[str, Any],
    status: str,
    finish: str,
) -> Turn:
    """The turn of a finished job; its own token ids are those that its parent does not hold.

    Raises JobError where the parent was deleted while the job ran.
    """
    ids = job.prompt_ids
    try:
        past: list[int] = store.turn_ids(job.previous) if job.previous else []
    except StoreError:
        if store.get_turn(job.previous or "") is not None:
            raise
        raise JobError(
            f"{job.previous} was deleted while this turn, which continues it, ran: start a new "
            "conversation"
        ) from None
    rebased = ids[: len(past)] != past
    request = job.request
    params = {key: request.get(key) for key in ("instructions", "tools", "options", "params")}
    return Turn(
        id=job.id,
        conversation=conversation_of(job, store),
        parent=job.previous,
        owner=job.owner,
        created=job.created_at,
        model=job.model,
        fingerprint=fingerprint,
        items=[dict(item) for item in (*request.get("input", ()), *output)],
        params={key: value for key, value in params.items() if value is not None},
        prompt_ids=ids if rebased else ids[len(past) :],
        output_ids=list(output_ids),
        rebased=rebased,
        schedule=schedule,
        usage=dict(usage),
        status=status,
        finish=finish,
    )


def record(store: Store, job: Job, turn: Turn) -> None:
    """Make a turn durable. Raises JobError where its conversation was deleted while it ran."""
    about = (job.request.get("params") or {}).get("about") or {}
    try:
        store.put_turn(turn, create=bool(about.get("new_conversation", True)))
    except StoreFull:
        raise
    except StoreError:
        if store.get_conversation(turn.conversation) is not None:
            raise
        raise JobError(
            f"conversation {turn.conversation} was deleted while this turn ran: start a new one"
        ) from None
