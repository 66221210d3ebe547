"""`tandem bench pipeline`: what splitting prefill and decode over two machines gives the queue.

Real processes, real queue, engines that only keep time: the published rates of an M5 Ultra
(prefill) and an M3 Ultra (decode) on GLM-5.3-Flash, divided by a scale. What is measured is how
much of what those rates allow is left by the control plane; nothing here is measured on a Mac.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scheduler.bench.queue import BenchWorker
from scheduler.host.scratch_redis import scratch_redis
from scheduler.jobs import Jobs
from scheduler.record import JobError, NewJob, response_id
from scheduler.redis_client import connect

#: Published for these machines and this model: tokens per second, seconds, tokens.
PREFILL_RATE = 1188.0
DECODE_RATE = 36.8
HANDOFF_S = 0.038
PROMPT = 17_500
OUTPUT = 256
CHUNK = 8192
#: Published for the nearest rival on Macs: throughput by jobs in flight, against one at a time.
RIVAL = {2: 1.20, 4: 1.31, 8: 1.38}

_WAIT = 600.0


def run(
    jobs: int = 8, scale: float = 10.0, flights: Sequence[int] = tuple(RIVAL)
) -> dict[str, Any]:
    """Serve `jobs` equal jobs one after another, then with `flights` at a time.

    Times are divided by `scale`. `ideal` is what the rates allow for so many jobs.
    """
    whole, rest = divmod(PROMPT - 1, CHUNK)
    chunks = [n / PREFILL_RATE / scale for n in [CHUNK] * whole + [rest]]
    rows: dict[int, dict[str, float]] = {}
    for flight in (1, *flights):
        with scratch_redis(durable=True) as url:
            prefill = BenchWorker(url, "prefill", chunks=chunks, tail_s=HANDOFF_S / scale, parks=4)
            decode = BenchWorker(
                url, "decode", slots=8, step_s=1 / DECODE_RATE / scale, tokens=OUTPUT
            )
            try:
                seconds = _serve(url, jobs, flight)
                busy = prefill.stop()["busy"][len(chunks) :]
                decode.stop()
            finally:
                prefill.kill()
                decode.kill()
        if len(busy) != jobs * len(chunks):
            raise JobError(f"{len(busy)} chunks were computed, {jobs * len(chunks)} were expected")
        span = busy[-1][1] - busy[0][0]
        rows[flight] = {"seconds": seconds, "busy": sum(b - a for a, b in busy) / span}
    alone = rows[1]["seconds"]
    # One after another against: all prefills in a row, and what follows the last of them.
    compute, rest_s = sum(chunks), (HANDOFF_S + OUTPUT / DECODE_RATE) / scale
    ideal = jobs * (compute + rest_s) / (jobs * compute + rest_s)
    return {
        "jobs": jobs,
        "scale": scale,
        "prefill_busy": round(rows[max(flights)]["busy"], 4),
        "throughput": {str(k): round(alone / rows[k]["seconds"], 3) for k in flights},
        "rival": {str(k): RIVAL[k] for k in flights if k in RIVAL},
        "ideal": round(ideal, 3),
        "seconds": {str(k): round(row["seconds"], 3) for k, row in rows.items()},
    }


def _serve(url: str, count: int, flight: int) -> float:
    """Seconds from the first submission to the last end, with `flight` jobs at a time."""
    with connect(url) as client, ThreadPoolExecutor(flight) as pool:
        jobs = Jobs(client)

        def one(_: int) -> None:
            new = NewJob(response_id(), "bench", {"submitted": time.time()}, bytes(4 * PROMPT))
            jobs.accept(new)
            if jobs.wait(new.id, _WAIT).status != "completed":
                raise JobError(f"{new.id} did not complete")

        one(0)  # both workers are up and warm
        start = time.perf_counter()
        list(pool.map(one, range(count)))
        return time.perf_counter() - start


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem bench pipeline`."""
    parser = subparsers.add_parser(
        "pipeline",
        help="throughput of the split with engines paced to published rates",
        description="Run real workers around engines that only keep time, with 1, 2, 4 and 8 jobs "
        "in flight, and compare the throughput with one job at a time.",
    )
    parser.add_argument("--jobs", type=int, default=8, help="jobs for each number in flight")
    parser.add_argument("--scale", type=float, default=10.0, help="how much faster than life")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.jobs < 1 or args.scale <= 0:
        raise JobError("--jobs and --scale must be above 0")
    report = run(args.jobs, args.scale)
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"prefill busy {report['prefill_busy']:.1%} with 8 jobs in flight")
    print(f"{'in flight':>10}{'throughput':>12}{'rival':>8}   (the rates allow {report['ideal']}x)")
    for flight, gain in report["throughput"].items():
        print(f"{flight:>10}{gain:>11.2f}x{report['rival'][flight]:>7.2f}x")
    return 0
