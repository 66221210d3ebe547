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
from dataclasses import replace
from typing import Any

from scheduler.bench.queue import BenchWorker
from scheduler.host.scratch_redis import scratch_redis
from scheduler.jobs import Jobs
from scheduler.record import JobError, NewJob, response_id
from scheduler.redis_client import connect
from scheduler.simulation.cluster import Cluster, Link
from scheduler.simulation.profile import Profile
from scheduler.simulation.scenario import back_to_back
from store.taken import taken

#: Published for these machines and this model: tokens per second, seconds, tokens.
PREFILL_RATE = 1188.0
DECODE_RATE = 36.8
HANDOFF_S = 0.038
PROMPT = 17_500
#: The M5's own decode rate, and what it takes alone for the same request.
M5_DECODE_RATE = 47.0
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
    chunks = _chunks(scale)
    rows: dict[int, dict[str, float]] = {}
    path: dict[str, Any] = {}
    for flight in (1, *flights):
        seconds, busy = _measure(jobs, flight, scale)
        busy = busy[len(chunks) :]
        path = taken("pipeline", {"chunks": jobs * len(chunks)}, {"chunks": len(busy)})
        span = busy[-1][1] - busy[0][0]
        rows[flight] = {"seconds": seconds, "busy": sum(b - a for a, b in busy) / span}
    alone = rows[1]["seconds"]
    # One after another against: all prefills in a row, and what follows the last of them.
    compute, rest_s = sum(chunks), (HANDOFF_S + OUTPUT / DECODE_RATE) / scale
    ideal = jobs * (compute + rest_s) / (jobs * compute + rest_s)
    return {
        "jobs": jobs,
        "scale": scale,
        "path": path,
        "ratios": {
            f"throughput_{k}_vs_ideal": round(alone / rows[k]["seconds"] / ideal, 3)
            for k in flights
        },
        "prefill_busy": round(rows[max(flights)]["busy"], 4),
        "throughput": {str(k): round(alone / rows[k]["seconds"], 3) for k in flights},
        "rival": {str(k): RIVAL[k] for k in flights if k in RIVAL},
        "ideal": round(ideal, 3),
        "seconds": {str(k): round(row["seconds"], 3) for k, row in rows.items()},
        "late": _late(jobs, scale, max(flights), rows[max(flights)]["seconds"] / jobs),
    }


def _late(jobs: int, scale: float, flight: int, interval: float) -> dict[str, Any]:
    """Answers begun on the prefill node: against the M5 alone, the split, and the simulator."""
    lone = _measure(jobs, 1, scale, late=True)[0] / jobs
    queued = _measure(jobs, flight, scale, late=True)[0] / jobs
    m5 = sum(_chunks(scale)) + OUTPUT / M5_DECODE_RATE / scale
    cluster = _simulated()
    alone = back_to_back(cluster, 1, PROMPT, OUTPUT)[0].ended / scale
    together = max(t.ended for t in back_to_back(cluster, jobs, PROMPT, OUTPUT)) / jobs / scale
    return {
        "lone_total_vs_m5": round(lone / m5, 4),
        "interval_vs_split": round(queued / interval, 4),
        "lone_vs_simulated": round(lone / alone, 4),
        "interval_vs_simulated": round(queued / together, 4),
    }


def _simulated() -> Cluster:
    """What is paced here, for the simulator: a row's rate does not depend on its neighbours."""
    prefill = ((CHUNK, PROMPT, PREFILL_RATE),)
    size = 358e6
    m5 = Profile("m5", prefill, ((1, PROMPT, M5_DECODE_RATE),), (size, 0.0))
    rates = tuple((width, PROMPT, width * DECODE_RATE) for width in (1, 8))
    m3 = Profile("m3", prefill, rates, (size, 0.0))
    link = Link(rate=size / HANDOFF_S, latency=0.0, overlap=False)
    return replace(Cluster.of([m5], [m3]), link=link, handoff="late")


def _chunks(scale: float) -> list[float]:
    """Seconds of each prefill chunk."""
    whole, rest = divmod(PROMPT - 1, CHUNK)
    return [n / PREFILL_RATE / scale for n in [CHUNK] * whole + [rest]]


def _measure(
    jobs: int, flight: int, scale: float, late: bool = False
) -> tuple[float, list[tuple[float, float]]]:
    """Seconds for `jobs` jobs, `flight` at a time, and when each chunk was computed."""
    with scratch_redis(durable=True) as url:
        begins = {"tokens": OUTPUT, "step_s": 1 / M5_DECODE_RATE / scale} if late else {}
        prefill = BenchWorker(
            url, "prefill", chunks=_chunks(scale), tail_s=HANDOFF_S / scale, parks=4, **begins
        )
        decode = BenchWorker(url, "decode", slots=8, step_s=1 / DECODE_RATE / scale, tokens=OUTPUT)
        try:
            seconds = _serve(url, jobs, flight)
            busy = prefill.stop()["busy"]
            decode.stop()
        finally:
            prefill.kill()
            decode.kill()
    return seconds, busy


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
    parser.set_defaults(run=_run, quick=["--jobs", "4", "--scale", "20"])


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
    late = report["late"]
    print("answers begun where the prompt was computed, while nothing waits:")
    print(f"  a lone request takes {late['lone_total_vs_m5']:.3f} of what the M5 takes alone")
    print(f"  a full queue's interval is {late['interval_vs_split']:.3f} of the split's")
    print(
        f"  of what the simulator says: {late['lone_vs_simulated']:.3f} and "
        f"{late['interval_vs_simulated']:.3f}"
    )
    return 0
