"""`tandem bench simulation`: how long simulating many requests takes on one core."""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from scheduler.record import JobError
from scheduler.simulation.cluster import Cluster, Shelf, Turn
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import load
from scheduler.simulation.report import summarise

REQUESTS = 100_000
#: Mean seconds between two: keeps the prefill node busy for two thirds of the time.
EVERY = 5.4
STORE = 300e9


def requests(count: int, seed: int = 1) -> list[Turn]:
    """Prompts of 250 to 21,000 tokens; three in ten continue an earlier conversation."""
    chance = random.Random(seed)
    at, turns = 0.0, list[Turn]()
    for number in range(count):
        at += chance.expovariate(1 / EVERY)
        prompt = int(chance.choice([500, 2000, 4000, 17_500]) * chance.uniform(0.5, 1.2))
        turn = Turn(number, at, prompt, chance.randint(10, 250))
        if number > 100 and chance.random() < 0.3:
            before = turns[number - chance.randint(50, 100)]
            if before.prompt < 100_000:
                turn.previous = before.number
                turn.prompt = before.prompt + before.output + chance.randint(20, 600)
        turns.append(turn)
    return turns


def run(count: int = REQUESTS) -> dict[str, Any]:
    """Simulate `count` requests on one prefill and three decode nodes with an evicting store."""
    m5, m3 = load("m5-ultra"), load("m3-ultra")
    cluster = Cluster.of([m5], [m3] * 3)
    cluster = Cluster(cluster.prefill, cluster.decode, store=Shelf(STORE))
    sim = Pipeline(cluster, requests(count))
    wall, cpu = time.perf_counter(), time.process_time()
    sim.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    report = summarise(sim)
    return {
        "requests": count,
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "requests_per_cpu_s": round(count / cpu),
        "simulated_s": report["span_s"],
        "utilisation": report["utilisation"],
        "evictions": report["evictions"],
        "parked": report["parked"],
    }


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem bench simulation`."""
    parser = subparsers.add_parser(
        "simulation",
        help="how fast the simulator is",
        description="Simulate requests on one prefill node and three decode nodes, with a store "
        "that evicts, and print how long that took.",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.requests < 1:
        raise JobError("--requests must be above 0")
    report = run(args.requests)
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['requests']:,} requests ({report['simulated_s'] / 3600:.1f} h) in "
            f"{report['wall_s']:.1f} s, {report['cpu_s']:.1f} s of one core"
        )
    return 0
