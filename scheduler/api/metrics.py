"""/metrics in Prometheus' form: how things stand now, and what has happened since the start.

What stands now is looked at when it is asked for. What has happened is counted from the records of
jobs as they end, also when it is asked for, so that serving costs nothing. The counters begin with
this process, as counters may. `deploy/grafana.json` draws them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.situation import Looker, Situation
from scheduler.record import LISTED, TERMINAL, Job, parse

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_RATES = (1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200)
_CHUNK = 500
_ENDED = (*sorted(f"tandem:jobs:{status}" for status in TERMINAL), "tandem:brief")
"""Where ended jobs are listed by the time of their end; those not to be stored for an hour."""
_MAX_ENDED = 50_000
"""Ended jobs counted in one scrape; the rest is counted in the next."""


class Metrics:
    """The registry of one API process. Thread-safe."""

    def __init__(self, backend: Backend, looker: Looker) -> None:
        self.registry = CollectorRegistry()
        self._backend = backend
        self._lock = threading.Lock()
        at = time.time()
        self._seen: dict[str, tuple[float, set[bytes]]] = {name: (at, set()) for name in _ENDED}
        made = self.registry
        self.requests = Counter(
            "tandem_http_requests", "Requests by route and status", ("method", "route", "status"),
            registry=made,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "tandem_http_request_seconds", "Time to the last byte of the answer", ("route",),
            buckets=_SECONDS, registry=made,
        )  # fmt: skip
        self._ended = Counter(
            "tandem_jobs_ended", "Jobs that have ended", ("status", "priority"), registry=made
        )
        self._tokens = {
            name: Counter(f"tandem_{name}_tokens", text, registry=made)
            for name, text in (
                ("prompt", "Tokens of the prompts of ended jobs"),
                ("cached", "Prompt tokens that skipped the model"),
                ("computed", "Prompt tokens that went through the model"),
                ("output", "Tokens that were generated"),
            )
        }
        self._paths = Counter(
            "tandem_turns", "Ended turns by where their state came from", ("path",), registry=made
        )
        self._handoffs = Counter(
            "tandem_handoffs", "States handed to a decode node", ("path",), registry=made
        )
        self._handed = Counter(
            "tandem_handoff_bytes", "Bytes of these states", ("path",), registry=made
        )
        self._times = {
            name: Histogram(f"tandem_{name}_seconds", text, buckets=_SECONDS, registry=made)
            for name, text in (
                ("first_token", "Acceptance to the first token"),
                ("queue_wait", "Acceptance to the begin of the first stage"),
                ("prefill", "Begin of the prefill to the end of the hand-off"),
                ("decode", "First token to the end"),
                ("handoff", "Last chunk to the arrival of all state"),
            )
        }
        self._rate = Histogram(
            "tandem_output_tokens_per_second", "Tokens of an answer per second of its decoding",
            buckets=_RATES, registry=made,
        )  # fmt: skip
        made.register(_Standing(backend, looker))
        ProcessCollector(registry=made)
        PlatformCollector(registry=made)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """(text, content type) for a scraper that accepts these types.

        While Redis is away nothing is counted; it is when Redis is back.
        """
        with self._lock, contextlib.suppress(RedisError, OSError):
            self._backend.probe.ping()
            self._count()
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind

    def _count(self) -> None:
        """Count what has ended since the last time; nothing twice, nothing left out."""
        client = self._backend.redis
        for index in _ENDED:
            since, known = self._seen[index]
            # Jobs that end within one microsecond share a score: those at the edge are remembered.
            new = cast(
                "list[tuple[bytes, float]]",
                client.zrange(
                    index, since, "+inf",
                    byscore=True, offset=0, num=_MAX_ENDED, withscores=True,
                ),
            )  # fmt: skip
            fresh = [name for name, _ in new if name not in known]
            for start in range(0, len(fresh), _CHUNK):
                names = [name.decode() for name in fresh[start : start + _CHUNK]]
                pipe = client.pipeline(transaction=False)
                for name in names:
                    pipe.hmget(f"tandem:job:{name}", LISTED)
                for name, values in zip(names, pipe.execute(), strict=True):
                    fields = zip(LISTED, values, strict=True)
                    raw = {k.encode(): v for k, v in fields if v is not None}
                    if b"status" in raw:
                        self._add(parse(name, raw))
            if new:
                last = new[-1][1]
                edge = {name for name, at in new if at == last}
                self._seen[index] = (last, edge | known if last == since else edge)

    def _add(self, job: Job) -> None:
        self._ended.labels(job.status, job.priority).inc()
        usage = job.usage or {}
        written = int(usage.get("output_tokens", 0))
        cached = int(usage.get("cached_tokens", job.path.get("cached_tokens", 0)) or 0)
        for name, amount in (
            ("prompt", job.prompt_tokens),
            ("cached", cached),
            ("computed", job.computed_tokens),
            ("output", written),
        ):
            self._tokens[name].inc(max(0, amount))
        if way := job.path.get("path"):
            self._paths.labels(str(way)).inc()
        if job.handoff:
            way = str(job.handoff.get("path", "unknown"))
            self._handoffs.labels(way).inc()
            self._handed.labels(way).inc(int(job.handoff.get("bytes", 0) or 0))
            exposed = job.handoff.get("exposed_seconds", job.handoff.get("seconds"))
            self._observe("handoff", exposed)
        ended = job.times.get(job.status)
        began = job.times.get("prefilling", job.times.get("decoding"))
        if began is not None:
            self._observe("queue_wait", began - job.created_at)
        if "prefilling" in job.times and "decoding" in job.times:
            self._observe("prefill", job.times["decoding"] - job.times["prefilling"])
        if job.first_token_at is not None:
            self._observe("first_token", job.first_token_at - job.created_at)
            if ended is not None:
                took = ended - job.first_token_at
                self._observe("decode", took)
                if written > 1 and took > 0:
                    self._rate.observe((written - 1) / took)

    def _observe(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._times[name].observe(max(0.0, float(seconds)))


class _Standing(Collector):
    """How things stand now."""

    def __init__(self, backend: Backend, looker: Looker) -> None:
        self._backend = backend
        self._looker = looker

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not look yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every gauge, and what others count."""
        found = self._looker.look()
        health = self._backend.health()
        yield _gauge("tandem_ready", "Whether a request would be served now", health["ready"])
        yield _gauge("tandem_redis_up", "Whether Redis answers", health["redis"])
        yield _gauge("tandem_store_up", "Whether the store answers", health["store"])
        ready = GaugeMetricFamily(
            "tandem_node_ready", "Whether a worker is ready", labels=["role", "node"]
        )
        for node in found.nodes:
            ready.add_metric([node.role, node.name], float(node.state == "ready"))
        yield ready
        yield from _jobs(found)
        yield from _nodes(found)
        yield from _store(found)
        memory = float((found.redis or {}).get("used_memory", 0))
        yield _gauge("tandem_redis_memory_bytes", "Memory that Redis uses", memory)
        yield _gauge("tandem_files_bytes", "Bytes of all files", found.files_bytes)
        yield _gauge("tandem_batches", "Batches that have not ended", len(found.batches))
        lines = GaugeMetricFamily("tandem_batch_lines", "Lines of these batches", labels=["state"])
        total = sum(batch.total for batch in found.batches)
        done = sum(batch.completed for batch in found.batches)
        failed = sum(batch.failed for batch in found.batches)
        for state, count in (
            ("completed", done), ("failed", failed), ("left", total - done - failed),
        ):  # fmt: skip
            lines.add_metric([state], count)
        yield lines


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _jobs(found: Situation) -> Iterator[Metric]:
    stages = GaugeMetricFamily("tandem_requests", "Live requests by stage", labels=["stage"])
    oldest = GaugeMetricFamily(
        "tandem_requests_oldest_seconds", "How long the oldest is in its stage", labels=["stage"]
    )
    for name, (count, seconds) in found.stages.items():
        stages.add_metric([name], count)
        oldest.add_metric([name], max(0.0, seconds))
    yield stages
    yield oldest
    waits = GaugeMetricFamily(
        "tandem_predicted_wait_seconds", "Wait of a short normal job that comes now",
        labels=["queue"],
    )  # fmt: skip
    for queue, seconds in found.waits.items():
        waits.add_metric([queue], seconds)
    yield waits


_FACTS = {
    "rows": ("tandem_decode_rows", "Conversations that are decoded now"),
    "slots": ("tandem_decode_slots", "Conversations that can be decoded at once"),
    "hot": ("tandem_hot_conversations", "Conversations kept in memory between turns"),
    "memory_used": ("tandem_state_memory_bytes", "Memory for conversations in use"),
    "memory_limit": ("tandem_state_memory_limit_bytes", "Memory for conversations in all"),
}


def _nodes(found: Situation) -> Iterator[Metric]:
    for fact, (name, text) in _FACTS.items():
        family = GaugeMetricFamily(name, text, labels=["node"])
        for node in found.nodes:
            if isinstance(value := node.facts.get(fact), int | float):
                family.add_metric([node.name], value)
        yield family
    pulses = CounterMetricFamily(
        "tandem_keepalive_pulses", "Pulses that kept an idle GPU awake", labels=["role", "node"]
    )
    drafted = CounterMetricFamily(
        "tandem_drafted_tokens", "Tokens that a drafter has proposed", labels=["node"]
    )
    accepted = CounterMetricFamily(
        "tandem_accepted_tokens", "Proposed tokens that were the model's own", labels=["node"]
    )
    for node in found.nodes:
        if isinstance(value := node.facts.get("pulses"), int):
            pulses.add_metric([node.role, node.name], value)
        if told := (node.facts.get("decode") or {}).get("speculation"):
            drafted.add_metric([node.name], float(told["drafted"]))
            accepted.add_metric([node.name], float(told["accepted"]))
    yield pulses
    yield drafted
    yield accepted


_STORED = {
    "conversations": "Conversations in the store",
    "turns": "Turns in the store",
    "states": "States of conversations in the store",
    "payload_bytes": "Bytes of these states",
    "live_bytes": "Bytes of the store in use",
    "map_bytes": "Bytes that the store may take",
    "live_share": "Part of the store in use, 0 to 1",
    "written_today_bytes": "Bytes written to the store today",
    "damaged": "Values found damaged since the start",
}


def _store(found: Situation) -> Iterator[Metric]:
    facts = found.store or {}
    for name, text in _STORED.items():
        family = GaugeMetricFamily(f"tandem_store_{name}", text)
        if name in facts:
            family.add_metric([], float(facts[name]))
        yield family
    evicted = CounterMetricFamily("tandem_store_evicted", "States evicted since its start")
    if "evicted" in facts:
        evicted.add_metric([], float(facts["evicted"]))
    yield evicted
