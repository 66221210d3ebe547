"""Names of the RQ queues, and waiting for work without polling hard."""

from __future__ import annotations

from typing import cast

import redis
from rq import Queue

from scheduler.config import decode_queue
from scheduler.record import Stage
from scheduler.redis_client import MAX_BLOCK
from scheduler.serializer import Msgpack

__all__ = [
    "PREFILL",
    "decode_queue",
    "first_queue",
    "prefill_queue",
    "rq_queue",
    "wait_for_work",
    "wake",
]

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


def wait_for_work(client: redis.Redis, *queues: str) -> str:
    """Return when something was enqueued or freed for one of `queues`, at the latest after
    `MAX_BLOCK`; which one that was, "" for none.

    Waking up promises nothing: the caller takes, and waits again when there was nothing.
    """
    woken = client.blpop([_wakes(queue) for queue in queues], timeout=MAX_BLOCK)
    names = {_wakes(queue).encode(): queue for queue in queues}
    return names[cast("list[bytes]", woken)[0]] if woken else ""


def wake(client: redis.Redis, queue: str) -> None:
    """Wake who waits for work of `queue`: one was woken for it who has no business there."""
    client.lpush(_wakes(queue), "1")


def _wakes(queue: str) -> str:
    return f"tandem:wake:{queue}"
