"""The part of `tandem bench queue` about many waiting jobs: pick, list, cancel, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import redis

from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.queue import PREFILL
from scheduler.record import JobError, NewJob, response_id
from scheduler.runs import Runs

#: How many jobs a list shows, and how often each call is made.
SHOWN = 50
ROUNDS = 100
#: Tokens of the longest prompt, and owners that share the queue.
_LONGEST = 1000
_OWNERS = 7


def run(client: redis.Redis, count: int) -> dict[str, Any]:
    """Medians in ms with `count` jobs waiting, measured from this client, and bytes per job.

    `bytes_per_job` is what Redis needs for one of them in all; `prompt_bytes_per_job` of it are
    the token ids. Raises JobError where a call does not do what was to be measured.
    """
    settings = JobsConfig(max_waiting=max(count, 1))
    jobs, runs = Jobs(client, settings), Runs(client, settings)
    before = int(client.info("memory")["used_memory"])
    ids, tokens = [], 0
    for number in range(count):
        size = 1 + number * 7919 % _LONGEST
        owner = f"owner-{number % _OWNERS}"
        new = NewJob(response_id(), "bench", {"submitted": 0.0}, bytes(4 * size), owner=owner)
        jobs.accept(new)
        ids.append(new.id)
        tokens += size
    memory = int(client.info("memory")["used_memory"]) - before
    rounds = min(ROUNDS, count // 3)
    listed = _median(lambda _: _wanted(len(jobs.list(("queued",), SHOWN)), SHOWN), rounds)
    cancel = _median(lambda k: _wanted(jobs.cancel(ids[k * count // rounds]), "cancelled"), rounds)
    pick = _median(lambda k: _wanted(bool(runs.take(PREFILL, f"w{k}", "prefill:x")), True), rounds)
    forecast = _median(lambda _: jobs.forecast(), rounds)
    client.flushdb()
    return {
        "jobs": count,
        "pick_ms_p50": pick,
        "list_ms_p50": listed,
        "cancel_ms_p50": cancel,
        "forecast_ms_p50": forecast,
        "bytes_per_job": round(memory / count),
        "prompt_bytes_per_job": round(4 * tokens / count),
    }


def _median(call: Callable[[int], object], rounds: int) -> float:
    times = []
    for number in range(rounds):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return round(median(times) * 1000, 3)


def _wanted(got: object, wanted: object) -> None:
    if got != wanted:
        raise JobError(f"a call with many jobs waiting gave {got!r}, not {wanted!r}")
