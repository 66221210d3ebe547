"""A worker process of the tests: the real loops around an engine that only counts.

Run with one argument, a JSON object, which may plan a fault as well (see `chaos_points`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from scheduler import events
from scheduler.config import JobsConfig
from scheduler.decode_loop import DecodeLoop
from scheduler.execution import Execution, Finished
from scheduler.host import lifeline
from scheduler.prefill_loop import PrefillLoop
from scheduler.record import Job, Result
from scheduler.runs import Cancelled, Preempted, Runs, SendBack
from scheduler.staying import Choice, Staying
from scheduler.worker import LoopWorker

sys.path.insert(0, str(Path(__file__).parent))
from chaos_points import Points
from jobs_kit import answer_token

SPEC: dict[str, Any] = json.loads(sys.argv[1])
execution_steps: dict[str, int] = {}
at = Points(SPEC).at


def around(name: str) -> None:
    """Put points before and after a step of Runs."""
    step = getattr(Runs, name)

    def wrapped(self: Runs, *args: Any, **kwargs: Any) -> Any:
        at(f"before_{name}")
        answer = step(self, *args, **kwargs)
        if answer is not None:
            at(f"after_{name}")
            at(f"after_{name}_{SPEC['role']}")
        return answer

    setattr(Runs, name, wrapped)


def away_once() -> None:
    """Have Redis go away once, just when what an earlier run has said is asked for."""
    told = events.replay
    left = ["not yet"]

    def replay(*args: Any) -> events.Replay:
        if left:
            raise RedisConnectionError(left.pop())
        return told(*args)

    events.replay = replay  # type: ignore[assignment]


def wanted(job: Job) -> int:
    """Length of the answer; a job that came over HTTP asks for it as OpenAI's clients do."""
    return int(job.request.get("n") or job.request["params"]["max_output_tokens"])


def limit() -> int:
    """Tokens that may be prefilled for the time being: as many as the file `limit` says."""
    return int(Path(SPEC["limit"]).read_text()) if SPEC.get("limit") else sys.maxsize


def say(execution: Execution, position: int) -> None:
    """Emit the answer's token at `position`."""
    token = answer_token(execution.job.prompt_ids, position)
    execution.emit({"type": "response.output_text.delta", "delta": f"{token} ", "ids": [token]})


class CountingPrefill:
    """Chunks of 10 tokens, each `chunk_s` long."""

    def __init__(self) -> None:
        self.parks = int(SPEC.get("parks", 0))
        self.parked: dict[str, int] = {}

    def prefill(
        self, execution: Execution, job: Job, check: Callable[[int], bool]
    ) -> Callable[[], Mapping[str, Any]]:
        begin = self.parked.pop(str(job.prompt_ids), 0)
        done, stop = begin, job.prompt_tokens - 1
        try:
            check(done)
            while done < stop:
                at("mid_prefill")
                time.sleep(SPEC.get("chunk_s", 0.0))
                while done >= limit():
                    time.sleep(0.01)
                    check(done)
                done = min(done + 10, stop)
                execution_steps[job.id] = execution_steps.get(job.id, 0) + 1
                check(done)
        except (Preempted, Cancelled):
            if self.parks:
                self.parked[str(job.prompt_ids)] = done
            raise
        if job.request.get("fail") == "prefill":
            raise ValueError("secret detail")
        at("prefilled")

        def tail() -> Mapping[str, Any]:
            at("mid_hand_off")
            time.sleep(SPEC.get("tail_s", 0.0))
            if job.request.get("fail") == "tail":
                raise OSError("link is down")
            chunks = execution_steps.pop(job.id, 0)
            return {
                "bytes": 4 * job.prompt_tokens, "seconds": 0.0, "path": "tcp", "chunks": chunks,
            }  # fmt: skip

        return tail

    @property
    def decodes(self) -> bool:
        return bool(SPEC.get("late"))

    def begin(
        self, execution: Execution, job: Job, check: Callable[[int], bool], stay: Staying
    ) -> Callable[[], Mapping[str, Any]]:
        tail = self.prefill(execution, job, check)
        said = 0
        while said < wanted(job) and stay():
            at("mid_late")
            time.sleep(SPEC.get("step_s", 0.0))
            say(execution, said)
            said += 1
        return lambda: {**tail(), "late": said}


class CountingDecode:
    """Rows that count; what they answer is `answer_token`."""

    def __init__(self) -> None:
        self.rows: dict[Execution, int] = {}
        self.returned: set[str] = set()

    def free(self) -> int:
        return int(SPEC.get("slots", 8)) - len(self.rows)

    def add(self, execution: Execution, job: Job) -> None:
        if job.request.get("fail") == "add":
            raise ValueError("secret detail")
        if job.request.get("send_back") and not job.path and job.id not in self.returned:
            self.returned.add(job.id)
            raise SendBack("its state is gone")
        self.rows[execution] = len(execution.replay.ids)

    def step(self) -> Sequence[Finished]:
        time.sleep(SPEC.get("step_s", 0.0))
        at("mid_decode")
        ended = []
        for execution, position in list(self.rows.items()):
            job = execution.job
            until = job.request.get("until")
            if until and position >= job.request.get("at", 1) and not Path(until).exists():
                continue  # this answer waits after its first token or `at`, others go on
            if position < wanted(job):
                say(execution, position)
                self.rows[execution] = position = position + 1
            if position >= wanted(job):
                del self.rows[execution]
                ended.append(self._end(execution))
        return ended

    def _end(self, execution: Execution) -> Finished:
        if execution.job.request.get("fail") == "decode":
            return Finished(execution, error=ValueError("secret detail"))
        result = Result(
            output={"pid": os.getpid(), "text": "", "finish": "stop"},
            usage={"output_tokens": wanted(execution.job)},
            events=[{"type": "response.output_text.done"}],
        )
        return Finished(execution, result=result, commit=lambda: at("before_commit"))

    def cancel(self, execution: Execution) -> None:
        self.rows.pop(execution, None)

    def leave(self, execution: Execution, heir: str) -> Callable[[], Mapping[str, Any]] | None:
        if self.rows.get(execution, 0) == 0:
            return None
        at("leaving")
        said = self.rows.pop(execution)

        def tail() -> Mapping[str, Any]:
            at("mid_hand_over")
            if execution.job.request.get("fail") in ("move", "gone"):
                raise OSError("link is down")
            return {"bytes": 100, "seconds": 0.0, "path": "tcp", "at_token": said}

        return tail

    def idle(self) -> bool:
        return False

    def drain(self) -> None:
        at("drain")


class FakeMover:
    """The node that is named takes over; nothing has to be copied."""

    def __init__(self) -> None:
        self.prepared: set[str] = set()

    def heir(self) -> str:
        return str(SPEC.get("heir", ""))

    def prepare(self, job: Job, heir: str) -> None:
        at("mid_prepare")
        if job.request.get("fail") == "prepare":
            raise OSError("the other store does not answer")
        if job.request.get("fail") == "gone" and job.id in self.prepared:
            raise OSError("the other store does not answer any more")
        self.prepared.add(job.id)

    def still(self, job: Job, heir: str) -> AbstractContextManager[None]:
        return nullcontext()

    def left(self, job: Job) -> None:
        at("mid_left")


def main() -> int:
    logging.basicConfig(level=SPEC.get("log", "ERROR"))
    lifeline.watch()
    for name in ("take", "finish_prefill", "finish", "handing_off", "rehome"):
        around(name)
    if SPEC.get("away_at_replay"):
        away_once()
    settings = JobsConfig(
        # Long enough for whoever is well on a busy machine: a test of their end gives another.
        lease_seconds=SPEC.get("lease", 20),
        max_attempts=SPEC.get("max_attempts", 3),
        drain_seconds=SPEC.get("drain", 60),
    )
    options: dict[str, Any] = {
        "node": SPEC.get("node", "local"),
        "settings": settings,
        "lock_dir": Path(SPEC["lock_dir"]) if SPEC.get("lock_dir") else None,
    }
    loop: LoopWorker
    if SPEC["role"] == "prefill":
        loop = PrefillLoop(
            SPEC["url"],
            CountingPrefill(),
            tails=SPEC.get("tails", 2),
            choice=lambda job, waiting: Choice(not waiting, ""),
            **options,
        )
    else:
        mover = FakeMover() if SPEC.get("heir") else None
        loop = DecodeLoop(SPEC["url"], CountingDecode(), mover=mover, **options)
    return loop.run()


if __name__ == "__main__":
    sys.exit(main())
