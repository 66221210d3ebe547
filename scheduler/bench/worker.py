"""Worker processes of `tandem bench queue`: our loops and stock RQ, counting their round trips.

`python -P -m scheduler.bench.worker SPEC`: serves until SIGTERM, then prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis.connection
from rq import SimpleWorker

from scheduler.config import JobsConfig
from scheduler.decode_loop import DecodeLoop
from scheduler.execution import Execution, Finished
from scheduler.prefill_loop import PrefillLoop
from scheduler.queue import rq_queue
from scheduler.record import Job, Result
from scheduler.redis_client import connect
from scheduler.serializer import Msgpack
from scheduler.staying import Choice, Staying

_sends = 0
_delays: list[float] = []


def count_round_trips() -> None:
    """Count what is sent to Redis from now on; a pipeline is sent at once."""
    send: Any = redis.connection.AbstractConnection.send_packed_command

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _sends
        _sends += 1
        return send(self, *args, **kwargs)

    redis.connection.AbstractConnection.send_packed_command = counted  # type: ignore[method-assign]  # counting is this process's only purpose


def nothing(submitted: float) -> None:
    """The job of the stock worker."""
    _delays.append(time.time() - submitted)


class PacedPrefill:
    """Computes chunks of fixed times; its hand-off takes a fixed time behind them.

    With `tokens` it begins answers of so many tokens, `step_s` each.
    """

    def __init__(
        self,
        chunks: Sequence[float],
        tail_s: float,
        parks: int = 0,
        tokens: int = 0,
        step_s: float = 0.0,
    ) -> None:
        self._chunks = chunks
        self._tail_s = tail_s
        self._tokens = tokens
        self._step_s = step_s
        self.decodes = bool(tokens)
        self._left = 0.0
        self.parks = parks
        self.gaps: list[float] = []
        self.busy: list[tuple[float, float]] = []

    def prefill(
        self, execution: Execution, job: Job, check: Callable[[int], bool]
    ) -> Callable[[], Mapping[str, Any]]:
        """All chunks. Notes how long ago the job before ended, and when each chunk was computed."""
        if self._left:
            self.gaps.append(time.perf_counter() - self._left)
        _delays.append(time.time() - float(job.request["submitted"]))
        for done, seconds in enumerate(self._chunks):
            check(done)
            start = time.perf_counter()
            if seconds:
                time.sleep(seconds)
            self.busy.append((start, time.perf_counter()))
        self._left = time.perf_counter()
        return self._tail

    def begin(
        self, execution: Execution, job: Job, check: Callable[[int], bool], stay: Staying
    ) -> Callable[[], Mapping[str, Any]]:
        """All chunks, then the answer's tokens while nothing waits."""
        tail = self.prefill(execution, job, check)
        check(job.prompt_tokens - 1)
        for token in range(self._tokens):
            if not stay():
                break
            time.sleep(self._step_s)
            execution.emit({"type": "response.output_text.delta", "delta": "x", "ids": [token]})
        self._left = time.perf_counter()
        return tail

    def _tail(self) -> Mapping[str, Any]:
        time.sleep(self._tail_s)
        return {"path": "none", "bytes": 0, "seconds": self._tail_s}


class PacedDecode:
    """Rows of a fixed number of tokens, one step at a time."""

    def __init__(self, slots: int, step_s: float, tokens: int) -> None:
        self._slots = slots
        self._step_s = step_s
        self._tokens = tokens
        self._rows: dict[Execution, int] = {}

    def free(self) -> int:
        """Free rows."""
        return self._slots - len(self._rows)

    def add(self, execution: Execution, job: Job) -> None:
        """Start a row."""
        self._rows[execution] = len(execution.replay.ids)

    def step(self) -> Sequence[Finished]:
        """One token for every row; a row that comes with all of its tokens ends at once."""
        if self._step_s and min(self._rows.values(), default=0) < self._tokens:
            time.sleep(self._step_s)
        ended = []
        for execution, done in list(self._rows.items()):
            if done < self._tokens:
                execution.emit({"type": "response.output_text.delta", "delta": "x", "ids": [done]})
            self._rows[execution] = done + 1
            if done + 1 >= self._tokens:
                del self._rows[execution]
                ended.append(Finished(execution, Result()))
        return ended

    def cancel(self, execution: Execution) -> None:
        """Drop a row."""
        self._rows.pop(execution, None)

    def idle(self) -> bool:
        """Nothing to do between jobs."""
        return False

    def drain(self) -> None:
        """Nothing to save."""


def main() -> int:
    """Serve one role until SIGTERM and print what was counted."""
    spec = json.loads(sys.argv[1])
    logging.basicConfig(level="ERROR")
    # None is taken from who is held up by the machine: it would be measured twice.
    settings = JobsConfig(lease_seconds=600)
    gaps: list[float] = []
    busy: list[tuple[float, float]] = []
    count_round_trips()
    match spec["role"]:
        case "rq":
            client = connect(spec["url"])
            worker = SimpleWorker(
                [rq_queue("stock", client)], connection=client, serializer=Msgpack
            )
            worker.work(logging_level="ERROR")
        case "prefill":
            engine = PacedPrefill(
                spec["chunks"],
                spec["tail_s"],
                spec.get("parks", 0),
                spec.get("tokens", 0),
                spec.get("step_s", 0.0),
            )
            PrefillLoop(
                spec["url"],
                engine,
                settings=settings,
                choice=lambda job, waiting: Choice(not waiting, "paced"),
            ).run()
            gaps, busy = engine.gaps, engine.busy
        case _:
            decode = PacedDecode(spec["slots"], spec["step_s"], spec["tokens"])
            DecodeLoop(spec["url"], decode, settings=settings).run()
    print(json.dumps({"sends": _sends, "delays": _delays, "gaps": gaps, "busy": busy}))
    return 0


if __name__ == "__main__":
    # As an importable module, so that the stock worker finds `nothing` with its list.
    from scheduler.bench import worker as bench_worker

    sys.exit(bench_worker.main())
