"""One prefill queue: what the pick does to a trace of real arrivals, on measured rates.

One prefill node, chunk by chunk. The decisions are made by the very scripts that serve (see
`lua/policy.lua`, `lua/better.lua`), run in a private Redis against the simulated clock, so that
what is measured is the rule in use and not a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from scheduler import policy, scripts
from scheduler.config import JobsConfig
from scheduler.host.scratch_redis import scratch_redis
from scheduler.record import JobError
from scheduler.redis_client import connect
from scheduler.simulation import agents
from scheduler.simulation.trace import Arrival, arrivals, fraction, read, thin

#: Prefill rate and chunk of an M5 Ultra on GLM-5.3-Flash, as published for 8,192-token chunks.
RATE = 1188.0
CHUNK = 8192

_QUEUE = "simulated"
_HOLDER = "prefill:simulated"


@dataclass(frozen=True, slots=True)
class Served:
    """Time to first token of one request and the length of its own prefill, in seconds."""

    ttft: float
    own: float


@dataclass(slots=True)
class _Running:
    number: int
    tokens: int
    done: int = 0
    name: str = ""


class Node:
    """One prefill node under the rule in use. Chunks of `chunk` tokens at `rate` tokens/s."""

    def __init__(
        self, client: redis.Redis, settings: JobsConfig, rate: float = RATE, chunk: int = CHUNK
    ) -> None:
        self._client = client
        self._settings = settings
        self._rate = rate
        self._chunk = chunk

    def run(self, jobs: Sequence[Arrival]) -> list[Served]:
        """Serve all arrivals (sorted by time); one entry for each, in order of completion."""
        self._client.flushdb()
        served: list[Served] = []
        now, arrived, waiting, parked = 0.0, 0, 0, 0
        begun: dict[int, int] = {}
        running: _Running | None = None
        while arrived < len(jobs) or waiting or running:
            if not waiting and not running:
                now = max(now, jobs[arrived].at)
            fresh = arrived
            while arrived < len(jobs) and jobs[arrived].at <= now:
                arrived += 1
            self._arrive(jobs, fresh, arrived)
            waiting += arrived - fresh
            room = parked < self._settings.max_parked
            if running and waiting and room and self._better(running, now):
                begun[running.number] = running.done
                self._step(now, park=[running.name, running.done])
                waiting, parked, running = waiting + 1, parked + 1, None
            if running is None:
                running = self._take(now, jobs, begun)
                waiting -= 1
                parked -= running.done > 0
            length = min(self._chunk, running.tokens - running.done)
            now += length / self._rate
            running.done += length
            if running.done >= running.tokens:
                job = jobs[running.number]
                served.append(Served(now - job.at, job.new / self._rate))
                running = None
        return served

    def _arrive(self, jobs: Sequence[Arrival], first: int, last: int) -> None:
        if last > first:
            rows = [[_name(k), jobs[k].at, jobs[k].new, "", "normal"] for k in range(first, last)]
            self._step(jobs[last - 1].at, arrivals=rows)

    def _take(self, now: float, jobs: Sequence[Arrival], begun: dict[int, int]) -> _Running:
        name, _ = self._step(now, take=True)
        number = int(name.decode().rpartition("_")[2], 16)
        return _Running(number, jobs[number].new, begun.pop(number, 0), _name(number))

    def _better(self, running: _Running, now: float) -> bool:
        args = {
            "id": running.name,
            "queue": _QUEUE,
            "holder": _HOLDER,
            "prefilled": running.done,
            "gain": self._settings.preempt_gain,
            "now": now,
            "policy": policy.arguments(self._settings, self._rate),
        }
        return bool(scripts.call(self._client, "better", args)[0])

    def _step(self, now: float, **more: Any) -> Any:
        args = {
            "queue": _QUEUE,
            "holder": _HOLDER,
            "now": now,
            "arrivals": [],
            "policy": policy.arguments(self._settings, self._rate),
            **more,
        }
        return scripts.call(self._client, "simulate", args)


def first_come(jobs: Sequence[Arrival], rate: float = RATE) -> list[Served]:
    """The same arrivals, first come first served: what there is to gain."""
    now, served = 0.0, []
    for job in jobs:
        now = max(now, job.at) + job.new / rate
        served.append(Served(now - job.at, job.new / rate))
    return served


def tiny_waits(served: Sequence[Served], rate: float) -> list[float]:
    """How long tiny prompts waited before their own prefill, in seconds, sorted."""
    return sorted(s.ttft - s.own for s in served if s.own <= agents.TINY / rate)


def simulate_agents(
    folder: Path,
    *,
    load: float,
    seeds: Sequence[int],
    settings: JobsConfig,
    rate: float = RATE,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda seed: None,
) -> dict[str, Any]:
    """Serve an hour of mixed coding agents for each seed; `tiny_*` is about prompts of at most
    256 tokens, whose waits are given in seconds and in chunks."""
    recorded = agents.sessions(folder)
    ours: list[Served] = []
    plain: list[Served] = []
    with scratch_redis() as url, connect(url) as client:
        node = Node(client, settings, rate, chunk)
        for seed in seeds:
            jobs = agents.arrivals(recorded, load=load, rate=rate, seconds=3600.0, seed=seed)
            ours += node.run(jobs)
            plain += first_come(jobs, rate)
            progress(seed)
    report: dict[str, Any] = {}
    for name, served in (("", ours), ("first_come_first_served", plain)):
        waits = tiny_waits(served, rate)
        p95 = waits[int(0.95 * (len(waits) - 1))]
        row = {
            **summary(served),
            "tiny": len(waits),
            "tiny_wait_p95_s": round(p95, 2),
            "tiny_wait_p95_chunks": round(p95 * rate / chunk, 3),
        }
        report = {**row, **report} if name == "" else {**report, name: row}
    return {**report, "load": load, "seeds": [seeds[0], seeds[-1]], "rate": rate, "chunk": chunk}


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """The figures that are reported. `within_slo`: TTFT at most 10 s + 2 x the own prefill."""
    return {
        "requests": len(served),
        "mean_ttft_s": round(sum(s.ttft for s in served) / len(served), 2),
        "within_slo": round(sum(s.ttft <= 10 + 2 * s.own for s in served) / len(served), 4),
        "longest_wait_s": round(max(s.ttft for s in served), 1),
    }


def simulate(
    path: Path,
    *,
    load: float,
    seeds: Sequence[int],
    settings: JobsConfig,
    rate: float = RATE,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda seed: None,
) -> dict[str, Any]:
    """Thin the trace to `load` once for each seed, serve it, and pool the results."""
    requests = read(path)
    part = fraction(requests, load, rate)
    if not 0 < part <= 1:
        raise JobError(f"load {load:g} needs {part:.2f} times the trace: choose a lower one")
    ours: list[Served] = []
    plain: list[Served] = []
    with scratch_redis() as url, connect(url) as client:
        node = Node(client, settings, rate, chunk)
        for seed in seeds:
            jobs = arrivals(thin(requests, part, seed))
            ours += node.run(jobs)
            plain += first_come(jobs, rate)
            progress(seed)
    return {
        **summary(ours),
        "first_come_first_served": summary(plain),
        "load": load,
        "kept": round(part, 4),
        "seeds": [seeds[0], seeds[-1]],
        "rate": rate,
        "chunk": chunk,
        "policy": {
            name: getattr(settings, name)
            for name in ("horizon_seconds", "owner_share", "preempt_gain", "max_parked")
        },
    }


def _name(number: int) -> str:
    return f"resp_{number:032x}"


def say(report: Mapping[str, Any]) -> None:
    """Print the figures of a report as a table."""
    print(f"{'':26}{'mean TTFT':>12}{'within SLO':>12}{'longest':>10}")
    for name, row in (
        ("this scheduler", report),
        ("first come first served", report["first_come_first_served"]),
    ):
        print(
            f"{name:26}{row['mean_ttft_s']:>10.1f} s{row['within_slo']:>12.1%}"
            f"{row['longest_wait_s']:>8.0f} s"
        )
    print(f"{report['requests']} requests, load {report['load']:g}, {report['rate']:g} tok/s")
    if "tiny" in report:
        print(
            f"tiny prompts wait {report['tiny_wait_p95_s']:.1f} s at p95, "
            f"{report['tiny_wait_p95_chunks']:.2f} chunks"
        )
