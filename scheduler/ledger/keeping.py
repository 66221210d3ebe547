"""A ledger beside its turn: what explains an answer when the job's own record has expired."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from scheduler.ledger.notes import Piece
from scheduler.record import Job, Result, Status
from scheduler.serializer import pack, unpack

_FIELDS = ("held_tokens", "node", "queue", "priority", "attempts", "prefill_attempts", "stage")


def freeze(
    job: Job, result: Result, run: bytes, ended: float, later: Mapping[str, bytes] | None = None
) -> bytes:
    """What the store keeps of a job that ended at `ended` (Redis TIME).

    `job` as its last run took it, `run` that run's packed notes, `later` those of what came after
    the end.
    """
    piece = Piece.read(job.run, run)
    first = job.first_token_at
    if first is None and piece is not None:
        spans = [span for span in piece.spans() if span.stage == "first decode"]
        first = spans[0].start + spans[0].seconds if spans else None
    return pack(
        {
            "pieces": {**job.ledger, job.run: run, **(later or {})},
            "times": {**job.times, "decoding": first or job.taken_at, result.status: ended},
            "created_at": job.created_at,
            "first_token_at": first,
            "enqueued_at": job.enqueued_at,
            "taken_at": job.taken_at,
            "handoff": job.handoff,
            "path": dict(result.path),
            "computed_tokens": result.computed_tokens,
            "fields": {name: getattr(job, name) for name in _FIELDS},
        }
    )


def thaw(job: Job, kept: bytes) -> Job:
    """A job made from its turn, with what was kept of its way; as it is where that is damaged."""
    try:
        found: dict[str, Any] = unpack(kept)
        fields = {name: found["fields"][name] for name in _FIELDS if name in found["fields"]}
        return replace(
            job,
            ledger={str(name): bytes(piece) for name, piece in found["pieces"].items()},
            times={cast(Status, str(k)): float(v) for k, v in found["times"].items()},
            created_at=float(found["created_at"]),
            first_token_at=found["first_token_at"],
            enqueued_at=float(found["enqueued_at"]),
            taken_at=float(found["taken_at"]),
            handoff=found["handoff"],
            path=dict(found["path"]),
            computed_tokens=int(found["computed_tokens"]),
            **fields,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return job
