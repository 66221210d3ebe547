"""`tandem bench queue`: what the queue costs, beside a stock RQ worker in the same run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import redis

from scheduler.bench import waiting as bench_waiting
from scheduler.host.scratch_redis import scratch_redis
from scheduler.jobs import Jobs
from scheduler.queue import rq_queue
from scheduler.record import JobError, NewJob, response_id
from scheduler.redis_client import connect
from store.taken import taken

_PROMPT = bytes(4 * 1000)
_WAIT = 120.0


class BenchWorker:
    """A bench worker; `stop` gives what it counted."""

    def __init__(self, url: str, role: str, **spec: Any) -> None:
        text = json.dumps({"url": url, "role": role, **spec})
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "scheduler.bench.worker", text], stdout=subprocess.PIPE
        )

    def stop(self) -> dict[str, Any]:
        """SIGTERM, and what it counted. Raises JobError where it failed."""
        self._process.terminate()
        out, _ = self._process.communicate(timeout=_WAIT)
        if self._process.returncode:
            raise JobError(f"a bench worker ended with status {self._process.returncode}")
        counted: dict[str, Any] = json.loads(out.splitlines()[-1])
        return counted

    def kill(self) -> None:
        """End it in any case."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def run(jobs: int = 200, waiting: int = 10_000) -> dict[str, Any]:
    """Measure with `jobs` jobs of each kind, and with `waiting` ones in the queue. Times in ms.

    Raises JobError where a worker does not do what was to be measured.
    """
    with scratch_redis(durable=True) as url, connect(url) as client:
        submissions = _submissions(client, jobs)
        latency = _latency(url, client, jobs)
        trips = _round_trips(url, client, jobs)
        gap = _gap(url, client, min(jobs, 100))
        many = bench_waiting.run(client, waiting)
    return {
        "jobs": jobs,
        # Whatever worker ran a job counts its own: one that ran elsewhere is missing here.
        "path": taken("queue", {"waiting": waiting}, {"waiting": many["jobs"]}),
        "submissions_per_s": submissions,
        **latency,
        **trips,
        **gap,
        "waiting": many,
        "ratios": {
            "start_latency_vs_rq": round(
                latency["start_latency_ms_p50"] / latency["rq_start_latency_ms_p50"], 3
            ),
            "round_trips_vs_rq": round(
                max(trips["round_trips_prefill"], trips["round_trips_decode"])
                / trips["rq_round_trips"],
                3,
            ),
        },
    }


def _submissions(client: redis.Redis, count: int) -> float:
    jobs = Jobs(client)
    start = time.perf_counter()
    for _ in range(count):
        jobs.accept(_new())
    took = time.perf_counter() - start
    client.flushdb()
    return round(count / took, 1)


def _latency(url: str, client: redis.Redis, count: int) -> dict[str, float]:
    """One job at a time to an idle worker, ours and RQ's in turn."""
    ours, stock = BenchWorker(url, "prefill", chunks=[0], tail_s=0), BenchWorker(url, "rq")
    try:
        jobs, queue = Jobs(client), rq_queue("stock", client)
        for _ in range(count + 10):  # the first ten warm both up
            new = _new()
            jobs.accept(new)
            _until(client, f"tandem:job:{new.id}", "stage", b"decode")
            job = queue.enqueue("scheduler.bench.worker.nothing", time.time(), result_ttl=60)
            _until(client, job.key, "status", b"finished")
        mine, theirs = ours.stop()["delays"][10:], stock.stop()["delays"][10:]
    finally:
        ours.kill()
        stock.kill()
    if len(mine) != count or len(theirs) != count:
        raise JobError(f"{len(mine)} and {len(theirs)} of {count} jobs were measured")
    client.flushdb()
    return {
        "start_latency_ms_p50": _ms(median(mine)),
        "start_latency_ms_p95": _ms(_p95(mine)),
        "rq_start_latency_ms_p50": _ms(median(theirs)),
        "rq_start_latency_ms_p95": _ms(_p95(theirs)),
    }


def _round_trips(url: str, client: redis.Redis, count: int) -> dict[str, float]:
    """Round trips that a worker makes for a job of a backlog."""
    jobs, queue = Jobs(client), rq_queue("stock", client)
    trips = {}
    for role in ("prefill", "decode", "rq"):
        for _ in range(count):
            if role == "rq":
                queue.enqueue("scheduler.bench.worker.nothing", time.time(), result_ttl=60)
            elif role == "prefill":
                jobs.accept(_new())
        process = BenchWorker(url, role, chunks=[0.005], tail_s=0, slots=8, step_s=0.002, tokens=1)
        try:
            if role == "rq":
                _drained(lambda: queue.finished_job_registry.get_job_count(cleanup=False), count)
            elif role == "prefill":
                _drained(lambda: rq_queue("decode", client).count, count)
            else:
                _drained(lambda: jobs.counts()["completed"], count)
            trips[role] = process.stop()["sends"] / count
        finally:
            process.kill()
    client.flushdb()
    return {
        "round_trips_prefill": round(trips["prefill"], 2),
        "round_trips_decode": round(trips["decode"], 2),
        "rq_round_trips": round(trips["rq"], 2),
    }


def _gap(url: str, client: redis.Redis, count: int) -> dict[str, float]:
    """Idle time between two prefills of a backlog while hand-offs and decoding go on."""
    jobs = Jobs(client)
    for _ in range(count):
        jobs.accept(_new())
    prefill = BenchWorker(url, "prefill", chunks=[0.05], tail_s=0.04)
    decode = BenchWorker(url, "decode", slots=8, step_s=0.01, tokens=8)
    try:
        _drained(lambda: jobs.counts()["completed"], count)
        gaps = prefill.stop()["gaps"]
        decode.stop()
    finally:
        prefill.kill()
        decode.kill()
    if len(gaps) != count - 1:
        raise JobError(f"{len(gaps)} gaps were measured, {count - 1} were expected")
    return {"idle_gap_ms_p50": _ms(median(gaps)), "idle_gap_ms_p95": _ms(_p95(gaps))}


def _new() -> NewJob:
    return NewJob(response_id(), "bench", {"submitted": time.time()}, _PROMPT)


def _until(client: redis.Redis, key: str, field: str, value: bytes) -> None:
    deadline = time.monotonic() + _WAIT
    while client.hget(key, field) != value:
        if time.monotonic() > deadline:
            raise JobError(f"{key} did not become {value.decode()}: the worker does not serve")
        time.sleep(0.002)


def _drained(count: Any, wanted: int) -> None:
    deadline = time.monotonic() + _WAIT
    while count() < wanted:
        if time.monotonic() > deadline:
            raise JobError(f"only {count()} of {wanted} jobs were done in {_WAIT:g} s")
        time.sleep(0.05)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem bench queue`."""
    parser = subparsers.add_parser(
        "queue",
        help="latency, round trips and idle gap of the queue",
        description="Measure the queue with workers that compute nothing, beside stock RQ.",
    )
    parser.add_argument("--jobs", type=int, default=200, help="jobs of each kind")
    parser.add_argument("--waiting", type=int, default=10_000, help="jobs in the long queue")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run, quick=["--jobs", "60", "--waiting", "2000"])


def _run(args: argparse.Namespace) -> int:
    if args.jobs < 10 or args.waiting < 200:
        raise JobError("--jobs must be at least 10 and --waiting at least 200")
    report = run(args.jobs, args.waiting)
    if args.json:
        print(json.dumps(report))
        return 0
    flat = {k: v for k, v in report.items() if k not in ("ratios", "waiting")} | report["ratios"]
    flat |= {f"waiting.{name}": value for name, value in report["waiting"].items()}
    for name, value in flat.items():
        print(f"{name:28}{value:>12}")
    return 0
