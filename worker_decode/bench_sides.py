"""The two decode nodes of `tandem bench ledger`: one that keeps the ledger, one that does not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from engine.errors import ModelError
from scheduler.config import Config
from scheduler.execution import Execution, Finished
from scheduler.host.scratch_redis import scratch_redis
from scheduler.jobs import Jobs
from scheduler.ledger.notes import Notes
from scheduler.outbox import Numbered, Outbox, rows_of
from scheduler.record import NewJob, response_id
from scheduler.redis_client import connect
from scheduler.runs import Runs, append_rows
from store.store import Store
from store.taken import taken
from worker_decode.engine import Engine
from worker_decode.inbox import Inbox
from worker_decode.memory import Memory

BLOCK, PROMPT = 5, 32
WIDTHS = (1, 8)
_ROOM = 1 << 30


def measure(
    model: Any, tokenizer: Any, work: Path, seconds: float, widths: tuple[int, ...] = WIDTHS
) -> dict[str, Any]:
    """The ratios by batch width. Raises WrongPath where a side did what the other should."""
    ratios: dict[str, float] = {}
    kept: dict[str, Any] = {}
    pairs: dict[str, int] = {}
    ends, model.eos_ids = model.eos_ids, frozenset()  # no row ends while it is measured
    try:
        for width in widths:
            with scratch_redis() as url:
                sides = [
                    _Side(kind, model, tokenizer, work / f"{kind.__name__}{width}", url, width)
                    for kind in (Engine, _Bare)
                ]
                try:
                    times = _alternate([side.block for side in sides], seconds)
                finally:
                    for side in sides:
                        side.close()
                name = f"width{width}"
                ours, bare = times
                ratios[f"{name}_vs_off"] = statistics.median(
                    b / a for a, b in zip(ours, bare, strict=True)
                )
                pairs[name] = len(ours)
                kept[f"on, {name}"] = sides[0].kept()
                kept[f"off, {name}"] = sides[1].kept()
    finally:
        model.eos_ids = ends
    expected = {name: "notes" if name.startswith("on") else "nothing" for name in kept}
    return {"ratios": ratios, "pairs": pairs, "path": taken("ledger", expected, kept)}


def _alternate(blocks: list[Callable[[], None]], seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each block of both sides, each first in every other pair."""
    for block in blocks:
        block()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < end:
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        for side in order:
            began = time.perf_counter()
            blocks[side]()
            times[side].append(time.perf_counter() - began)
    return times


class _Side:
    """A decode node with `width` rows that write their events to Redis."""

    def __init__(
        self, kind: type[Engine], model: Any, tokenizer: Any, path: Path, url: str, width: int
    ) -> None:
        self._store = Store.open(path / "store", _ROOM)
        memory = Memory(_ROOM)
        config = Config(data_dir=path)
        config = config.model_copy(
            update={"decode": config.decode.model_copy(update={"slots": width, "drafter": "off"})}
        )
        self._engine = kind(
            config, model, tokenizer, self._store, memory, Inbox(model.fingerprint, memory, 0.0),
            ended=lambda response: False,
        )  # fmt: skip
        on = kind is Engine
        self._client = connect(url) if on else redis.Redis.from_url(url)
        self._outbox = Outbox(self._client) if on else _BareOutbox(self._client)
        self._outbox.start()
        jobs, runs = Jobs(self._client), Runs(self._client)
        self._executions: list[Execution] = []
        for number in range(width):
            ids = [(number * 37 + i) % 256 + 100 for i in range(PROMPT)]
            request = {"params": {"max_output_tokens": 1 << 20}}
            queue = f"bench-{kind.__name__}"
            new = NewJob(
                response_id(), "bench", request, ids, stage="decode", node=queue,
                background=True,
            )  # fmt: skip
            jobs.accept(new)
            job = runs.take(f"decode-{queue}", queue, f"decode:{queue}")
            if job is None:
                raise ModelError("the bench's own job was taken by somebody else")
            execution = Execution(job, _emit=self._outbox.put, first=job.events, notes=Notes(on=on))
            self._engine.add(execution, job)
            self._executions.append(execution)
        for _ in range(2 * width):  # every prompt is read, every row has joined
            self._engine.step()

    def block(self) -> None:
        """Some steps; their events are written beside them."""
        for _ in range(BLOCK):
            self._engine.step()

    def kept(self) -> str:
        """What this side has written down of its rows."""
        told = [execution.notes for execution in self._executions]
        if all(notes.meter.trips > 0 and notes.on for notes in told):
            return "notes"
        return "nothing" if not any(notes.meter.trips or notes.on for notes in told) else "a part"

    def close(self) -> None:
        """End it; nothing is saved."""
        for execution in self._executions:
            self._engine.cancel(execution)
        self._outbox.close(5.0)
        self._store.close()
        self._client.close()


class _Bare(Engine):
    """The engine whose step reads no clock and writes nothing down."""

    def step(self) -> list[Finished]:
        """One step of all rows, none of which may end."""
        with self._working():
            events = self._batch.step()
        for event in events:
            self._answers[event.uid].say(event)
            if event.finish is not None:
                raise ModelError(f"a row of the benchmark has ended ({event.finish})")
        self.kept.look_after()
        return []


class _BareOutbox(Outbox):
    """An outbox that counts nothing."""

    def _send(self, numbered: list[Numbered]) -> None:
        if numbered:
            append_rows(self._client, rows_of(numbered))
