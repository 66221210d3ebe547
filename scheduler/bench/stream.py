"""`tandem bench stream`: from a decode step to the client, beside a bare server in the same run.

The same number of clients get events of the same bytes at the same pace from the API, over the
outbox and the event logs, and from a server of ten lines over one multiplexed Redis stream.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgpack

from scheduler.api.frames import frame
from scheduler.api.view import EventView
from scheduler.bench.stream_parts import STEPS, stamp, write_model_dir
from scheduler.config import JobsConfig
from scheduler.execution import Execution, Pending
from scheduler.host.scratch_redis import scratch_redis
from scheduler.jobs import Jobs
from scheduler.outbox import Outbox
from scheduler.record import JobError, NewJob, Result, response_id
from scheduler.redis_client import connect
from scheduler.runs import Runs
from scheduler.serializer import pack
from store.taken import taken

DELTA = "response.output_text.delta"
_WAIT = 60.0


class _Process:
    """One of the processes in `bench_stream_parts`."""

    def __init__(self, role: str, **spec: Any) -> None:
        module = "scheduler.bench.stream_parts"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, role, json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.role = role

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise JobError(f"the bench's {self.role} process ended early")
        return line.strip()

    def cpu(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self.line())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def run(
    clients: int = 64, rate: float = 2000.0, seconds: float = 4.0, rounds: int = 7
) -> dict[str, Any]:
    """Measure with `clients` streams that get `rate` tokens a second in all, in turns.

    Raises JobError where events are missing.
    """
    settings = JobsConfig(lease_seconds=600)
    pace = clients / rate
    steps = max(20, int(seconds / pace))
    seen: dict[str, list[dict[str, float]]] = {"api": [], "bare": []}
    with scratch_redis(durable=True) as url, tempfile.TemporaryDirectory(prefix="tb-") as folder:
        write_model_dir(Path(folder) / "model")
        api = _Process(
            "api", data_dir=f"{folder}/data", model="bench", model_dir=f"{folder}/model",
            redis={"url": url},
        )  # fmt: skip
        bare = _Process("bare", url=url)
        try:
            ports = {"api": int(api.line()), "bare": int(bare.line())}
            sides = {
                "api": lambda: _api_round(url, api, ports["api"], clients, steps, pace, settings),
                "bare": lambda: _bare_round(url, bare, ports["bare"], clients, steps, pace),
            }
            for number in range(rounds):
                for name in sorted(sides, reverse=number % 2 == 1):  # in turns who is first
                    seen[name].append(sides[name]())
        finally:
            api.stop()
            bare.stop()
    came = {name: sum(int(one.pop("events")) for one in found) for name, found in seen.items()}
    path = taken("stream", dict.fromkeys(seen, steps * clients * rounds), came)
    report: dict[str, Any] = {"clients": clients, "tokens_per_s": rate, "steps": steps * rounds}
    for name, found in seen.items():
        for key in found[0]:
            report[f"{name}_{key}"] = round(median(one[key] for one in found), 4)
    report["path"] = path
    report["ratios"] = {
        "p99_vs_bare": _ratio(seen, "p99_ms"),
        "core_vs_bare": _ratio(seen, "core_share"),
    }
    return report


def _ratio(seen: dict[str, list[dict[str, float]]], key: str) -> float:
    """The median over rounds of the API's figure by the bare server's of the same round.

    What else the machine does changes from minute to minute, and both sides of a round alike.
    """
    pairs = zip(seen["api"], seen["bare"], strict=True)
    return round(median(ours[key] / theirs[key] for ours, theirs in pairs), 3)


def _api_round(
    url: str, api: _Process, port: int, clients: int, steps: int, pace: float, settings: JobsConfig
) -> dict[str, float]:
    with connect(url) as client:
        jobs, runs = Jobs(client, settings), Runs(client, settings)
        for _ in range(clients):
            jobs.accept(NewJob(response_id(), "bench", {}, [0], stage="decode", background=True))
        taken = [runs.take("decode", "bench", "decode:local") for _ in range(clients)]
        executions: list[Execution] = []
        for job in taken:
            if job is None:
                raise JobError("the bench's own jobs were taken by somebody else")
            executions.append(Execution(job, first=jobs.get(job.id).events))
        outbox = Outbox(connect(url, patience=0))
        outbox.start()

        def step(number: int) -> None:
            data = pack({"type": DELTA, "delta": stamp(), "ids": [number]})
            for execution in executions:
                outbox.put(execution, [Pending(data, True)])

        def end() -> None:
            outbox.close(_WAIT)
            for execution in executions:
                runs.finish(execution.job, Result())

        paths = [f"/v1/responses/{e.job.id}?stream=true" for e in executions]
        return _measure(api, port, paths, step, end, steps, pace)


def _bare_round(
    url: str, bare: _Process, port: int, clients: int, steps: int, pace: float
) -> dict[str, float]:
    with connect(url) as client:
        jobs = Jobs(client)
        name = response_id()
        jobs.accept(NewJob(name, "bench", {}, [0], stage="decode", background=True))
        view = EventView(jobs.get(name))
        jobs.cancel(name)
        tag = name[-8:]
        names = [f"{tag}-{i}" for i in range(clients)]

        def step(number: int) -> None:
            rendered = frame(view.render(number, {"type": DELTA, "delta": stamp()}))
            packed = msgpack.packb([(one, rendered) for one in names])
            client.xadd(STEPS, {"e": packed}, maxlen=1000)

        def end() -> None:
            client.xadd(STEPS, {"e": msgpack.packb([(one, b"") for one in names])})

        return _measure(bare, port, [f"/{one}" for one in names], step, end, steps, pace)


def _measure(
    server: _Process,
    port: int,
    paths: Sequence[str],
    step: Callable[[int], None],
    end: Callable[[], None],
    steps: int,
    pace: float,
) -> dict[str, float]:
    """Run `steps` steps, one each `pace` seconds, with all clients connected."""
    readers = _Process("clients", port=port, paths=list(paths))
    try:
        if readers.line() != "open":
            raise JobError("the bench's clients could not connect")
        used, begun = server.cpu(), time.monotonic()
        for number in range(steps):
            due = begun + number * pace
            time.sleep(max(0.0, due - time.monotonic()))
            step(number)
        took = time.monotonic() - begun
        share = (server.cpu() - used) / took
        end()
        delays = sorted(json.loads(readers.line())["delays"])
    finally:
        readers.stop()
    return {
        "p50_ms": 1000 * delays[len(delays) // 2],
        "p99_ms": 1000 * delays[int(0.99 * (len(delays) - 1))],
        "core_share": share,
        "pace_kept": steps * pace / took,
        "events": len(delays),
    }


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem bench stream`."""
    parser = subparsers.add_parser(
        "stream",
        help="delay from decode step to client, beside a bare server",
        description="Stream to many clients at once from the API and from a server of ten lines.",
    )
    parser.add_argument("--clients", type=int, default=64, help="streams at once (64)")
    parser.add_argument("--rate", type=float, default=2000.0, help="tokens a second in all (2000)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each round (4)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each server (7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run, quick=["--seconds", "2", "--rounds", "1"])


def _run(args: argparse.Namespace) -> int:
    if min(args.clients, args.rate, args.seconds, args.rounds) <= 0:
        raise JobError("--clients, --rate, --seconds and --rounds must be above 0")
    report = run(args.clients, args.rate, args.seconds, args.rounds)
    if args.json:
        print(json.dumps(report))
        return 0
    flat = {k: v for k, v in report.items() if k != "ratios"} | report["ratios"]
    for name, value in flat.items():
        print(f"{name:20}{value:>12}")
    return 0
