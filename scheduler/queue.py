"""Names of the RQ queues, and waiting for work without polling hard."""

from __future__ import annotations

import redis
from rq import Queue

from scheduler.config import decode_queue
from scheduler.record import Stage
from scheduler.redis_client import MAX_BLOCK
from scheduler.serializer import Msgpack

__all__ = ["PREFILL", "decode_queue", "first_queue", "prefill_queue", "rq_queue", "wait_for_work"]

PREFILL = "prefill"


def prefill_queue() -> str:
    """The queue that all prefill workers share."""
    return PREFILL


def first_queue(stage: Stage, node: str) -> str:
    """Where a job starts: the shared prefill queue, or the queue of its decode node."""
    return PREFILL if stage == "prefill" else decode_queue(node)


def rq_queue(name: str, client: redis.Redis) -> Queue:
    """RQ's own view of a queue, with our serializer."""
    return Queue(name, connection=client, serializer=Msgpack)


def wait_for_work(client: redis.Redis, queue: str, seconds: float = MAX_BLOCK) -> None:
    """Return when something was enqueued or freed for `queue`, at the latest after `seconds`.

    Waking up promises nothing: the caller takes, and waits again when there was nothing.
    """
    client.blpop([f"tandem:wake:{queue}"], timeout=max(0.01, min(seconds, MAX_BLOCK)))
