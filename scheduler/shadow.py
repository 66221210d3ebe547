"""The RQ job of a stage: what rq-dashboard and RQ's own tools see of our job.

It carries an id, a label and a description, never the prompt. The label names no function that
could be imported: our workers know what to do from the queue they serve.
"""

from __future__ import annotations

import zlib
from datetime import UTC, datetime
from typing import Any

from rq.defaults import RQ_KEY_PREFIX
from rq.job import JobStatus
from rq.utils import utcformat

from scheduler.record import Stage
from scheduler.serializer import pack

PREFIX = RQ_KEY_PREFIX

LABELS: dict[Stage, str] = {"prefill": "tandem.prefill", "decode": "tandem.decode"}

#: Seconds for which RQ keeps a finished, failed or cancelled stage visible.
SHADOW_TTL = 86_400


def ttl(result_days: float) -> int:
    """Seconds that the shadow of an ended job is shown: a day, or as long as its record if less."""
    return min(SHADOW_TTL, max(1, int(result_days * 86_400)))


def shadow_id(resp: str, stage: Stage) -> str:
    """RQ job id of a stage."""
    return f"{resp}-{stage[0]}"


def iso_now() -> str:
    """Local time in RQ's format; shown to people, compared with nothing."""
    return str(utcformat(datetime.now(UTC)))


def fields(resp: str, stage: Stage, queue: str, tokens: int) -> list[Any]:
    """The RQ job hash of a waiting stage as a flat list of names and values."""
    stamp = iso_now()
    mapping: dict[str, Any] = {
        "created_at": stamp,
        "data": zlib.compress(pack([LABELS[stage], None, [resp], {}]), 1),
        "success_callback_name": "",
        "failure_callback_name": "",
        "stopped_callback_name": "",
        "started_at": "",
        "ended_at": "",
        "last_heartbeat": "",
        "worker_name": "",
        "group_id": "",
        "origin": queue,
        "description": f"{resp} {tokens} tokens",
        "enqueued_at": stamp,
        "timeout": -1,
        "result_ttl": SHADOW_TTL,
        "failure_ttl": SHADOW_TTL,
        "status": JobStatus.QUEUED.value,
    }
    return [item for pair in mapping.items() for item in pair]


def exception_text(message: str) -> bytes:
    """A failure's reason as RQ stores it beside the job."""
    return zlib.compress(message.encode())
