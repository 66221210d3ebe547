"""Records a run of the real queue and the real workers' loops around engines that only keep time.

    python -P tests/scheduler/record_paced.py OUTPUT_DIR

For `test_replay.py`: it holds the simulator to what the loops do (picks, parking, hand-offs, rows
that join and leave a batch) without what a model's speed on a busy machine adds. Not run by the
tests.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.config import JobsConfig
from scheduler.decode_loop import DecodeLoop
from scheduler.execution import Execution, Finished
from scheduler.host.scratch_redis import scratch_redis
from scheduler.jobs import Jobs
from scheduler.prefill_loop import PrefillLoop
from scheduler.record import Job, NewJob, Result, response_id
from scheduler.redis_client import connect
from scheduler.runs import Preempted
from scheduler.simulation import history
from scheduler.simulation.profile import Profile, next_chunk

REQUESTS, EVERY, SLOTS = 90, 1.9, 4
LINK = 2e6
RATES: dict[str, Any] = {
    "version": 1,
    "source": "paced: the engines of the recorded run slept for these times",
    "prefill": [
        {"chunk": 128, "context": 512, "rate": 200.0},
        {"chunk": 256, "context": 512, "rate": 256.0},
    ],
    "decode": [
        {"width": 1, "context": 100, "rate": 10.0},
        {"width": 2, "context": 100, "rate": 16.0},
        {"width": 4, "context": 100, "rate": 24.0},
        {"width": 1, "context": 600, "rate": 8.0},
        {"width": 2, "context": 600, "rate": 12.0},
        {"width": 4, "context": 600, "rate": 16.0},
    ],
    "default_chunk": 256,
    "state": {"fixed": 200000, "per_token": 2000},
}


class Pace:
    """Sleeps so that delays do not add up while there is always something to do."""

    def __init__(self) -> None:
        self._until = 0.0

    def __call__(self, seconds: float) -> None:
        now = time.monotonic()
        if now - self._until > 0.25:  # it was idle
            self._until = now
        self._until += seconds
        time.sleep(max(0.0, self._until - now))


class Prefill:
    """Chunks that take their time; interrupted prompts are kept."""

    parks = 4

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._kept: dict[str, int] = {}
        self._pace = Pace()

    def prefill(
        self, execution: Execution, job: Job, check: Callable[[int], bool]
    ) -> Callable[[], Mapping[str, Any]]:
        done, stop = self._kept.pop(job.id, 0), job.prompt_tokens - 1
        try:
            while done < stop:
                check(done)
                length = next_chunk(done, stop, self._profile.chunk)
                self._pace(self._profile.chunk_s(done, length))
                done += length
            check(done)
        except Preempted:
            self._kept[job.id] = done
            raise
        fixed, per_token = self._profile.state
        seconds = (fixed + length * per_token) / LINK

        def tail() -> Mapping[str, Any]:
            time.sleep(seconds)
            size = int(self._profile.state_bytes(stop))
            return {"path": "tcp", "bytes": size, "seconds": seconds, "exposed_seconds": seconds}

        return tail


class Decode:
    """Steps that take their time: a chunk of one row that extends, then a token of every other."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._rows: dict[Execution, list[int]] = {}
        self._pace = Pace()

    def free(self) -> int:
        return SLOTS - len(self._rows)

    def add(self, execution: Execution, job: Job) -> None:
        held = job.held_tokens if job.handoff is None else job.prompt_tokens - 1
        self._rows[execution] = [held, 0]

    def step(self) -> Sequence[Finished]:
        seconds, rows = 0.0, list(self._rows.items())
        for execution, row in rows:
            stop = execution.job.prompt_tokens - 1
            if row[0] < stop:
                length = next_chunk(row[0], stop, self._profile.chunk)
                seconds = self._profile.chunk_s(row[0], length)
                row[0] += length
                break
        ready = [(e, row) for e, row in rows if row[0] >= e.job.prompt_tokens - 1]
        if ready:
            context = max(row[0] + row[1] for _, row in ready)
            seconds += self._profile.step_s(len(ready), context)
        self._pace(seconds)
        ended = []
        for execution, row in ready:
            execution.emit({"type": "response.output_text.delta", "delta": "x", "ids": [row[1]]})
            row[1] += 1
            if row[1] >= execution.job.request["output"]:
                del self._rows[execution]
                job = execution.job
                cached = 0 if job.handoff else job.held_tokens
                usage = {"output_tokens": row[1], "cached_tokens": cached}
                path = {"path": "restored" if cached else "cold"}
                ended.append(Finished(execution, Result(usage=usage, path=path)))
        return ended

    def cancel(self, execution: Execution) -> None:
        self._rows.pop(execution, None)

    def idle(self) -> bool:
        return False

    def drain(self) -> None:
        """Nothing to save."""


def work(role: str, url: str) -> None:
    logging.basicConfig(level="ERROR")
    profile = Profile.parse("paced", RATES)
    if role == "prefill":
        PrefillLoop(url, Prefill(profile), settings=JobsConfig()).run()
    else:
        DecodeLoop(url, Decode(profile), settings=JobsConfig()).run()


def drive(jobs: Jobs) -> None:
    """Requests of many lengths at random times; one in five continues an earlier answer."""
    chance = random.Random(5)
    made: list[tuple[str, int]] = []
    begin, at = time.monotonic(), 0.0
    for _ in range(REQUESTS):
        at += chance.expovariate(1 / EVERY)
        tokens = int(chance.choice((60, 120, 250, 500, 900)) * chance.uniform(0.7, 1.2))
        output, continues = chance.randint(3, 24), chance.random() < 0.2
        time.sleep(max(0.0, begin + at - time.monotonic()))
        more: dict[str, Any] = {}
        old = [m for m in made[:-4] if jobs.get(m[0]).ended] if continues else []
        if old:
            previous, held = old[int(chance.random() * len(old))]
            tokens = held + chance.randint(20, 200)
            more = {"previous": previous, "stage": "decode", "held_tokens": held}
        resp = response_id()
        jobs.accept(NewJob(resp, "paced", {"output": output}, bytes(4 * tokens), **more))
        made.append((resp, tokens + output - 1))
    for resp, _ in made:
        jobs.wait(resp, 600)


def main() -> None:
    if len(sys.argv) == 3:
        work(*sys.argv[1:])
        return
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with scratch_redis(durable=True) as url, connect(url) as client:
        workers = [
            subprocess.Popen([sys.executable, "-P", __file__, role, url])
            for role in ("prefill", "decode")
        ]
        try:
            jobs = Jobs(client)
            warm = response_id()
            jobs.accept(NewJob(warm, "paced", {"output": 1}, bytes(80)))
            jobs.wait(warm, 60)
            begin = time.time()
            print("load", os.getloadavg(), flush=True)
            drive(jobs)
            print("load", os.getloadavg(), flush=True)
            pasts = history.collect(client, time.time() - begin)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(60)
    history.write(out / "history.jsonl", pasts)
    (out / "prefill.json").write_text(json.dumps(RATES, indent=1) + "\n")
    (out / "decode.json").write_text(json.dumps(RATES, indent=1) + "\n")


if __name__ == "__main__":
    main()
