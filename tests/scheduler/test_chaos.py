"""Processes are killed and frozen at random points of a seeded plan; every job still ends once.

Each run has its own Redis (append-only), a prefill and a decode worker under a small supervisor,
and a few jobs. One fault is injected: a worker dies or freezes at a named point, or Redis is
killed. `TANDEM_SOAK=1` makes 210 runs of it, otherwise a sample.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from jobs_kit import Server, Worker, answer, assert_idle, eventually, new_job, oracle

from scheduler.jobs import Jobs
from scheduler.record import NewJob
from scheduler.redis_client import connect

RUNS = 210 if os.environ.get("TANDEM_SOAK") else 5

PREFILL_POINTS = (
    "after_take", "mid_prefill", "prefilled", "after_handing_off", "mid_hand_off",
    "before_finish_prefill", "after_finish_prefill",
)  # fmt: skip
DECODE_POINTS = ("after_take", "mid_decode", "before_commit", "before_finish", "after_finish")

OPTIONS: dict[str, Any] = {"chunk_s": 0.01, "tail_s": 0.01, "step_s": 0.004, "lease": 3, "slots": 3,
                           "log": "CRITICAL", "parks": 2, "max_attempts": 5}  # fmt: skip


class Keeper(threading.Thread):
    """Restarts a worker that dies; thaws one that is frozen after a while."""

    def __init__(self, role: str, url: str, lock_dir: Path, **fault: Any) -> None:
        super().__init__(daemon=True)
        self.make = lambda **more: Worker(role, url, lock_dir=str(lock_dir), **OPTIONS, **more)
        self.worker = self.make(**fault)
        self.freezes = fault.get("act") == "stop"
        self.faults = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            pid, status = os.waitpid(self.worker.process.pid, os.WNOHANG | os.WUNTRACED)
            if not pid:
                continue
            if os.WIFSTOPPED(status):
                self.faults += 1
                # Beyond the lease: the job is taken back by the others while this one sleeps.
                time.sleep(4.0)
                os.kill(pid, signal.SIGCONT)
            else:
                self.faults += os.WIFSIGNALED(status)
                self.worker.process.returncode = -1
                self.worker = self.make()

    def close(self) -> int:
        self.done.set()
        self.join()
        return self.worker.stop()


@pytest.mark.parametrize("seed", range(RUNS))
def test_every_job_ends_once_whatever_dies(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    kind = chance.choice(("prefill", "decode", "prefill", "decode", "redis"))
    fault: dict[str, Any] = {
        "act": "stop" if chance.random() < 0.15 else "kill",
        "point": chance.choice(PREFILL_POINTS if kind == "prefill" else DECODE_POINTS),
        "nth": chance.randint(1, 4),
    }
    with Server(durable=True) as server, connect(server.url) as client:
        jobs = Jobs(client)
        keepers = [
            Keeper(role, server.url, tmp_path, **(fault if kind == role else {}))
            for role in ("prefill", "decode")
        ]
        for keeper in keepers:
            keeper.start()
        news = [_random_job(chance, number) for number in range(6)]
        cancelled = set()
        try:
            for new in news:
                jobs.accept(new)
            if kind == "redis":
                eventually(lambda: jobs.get(news[0].id).status != "queued", "nothing begins")
                server.kill()
                server.start()
            if chance.random() < 0.5:
                victim = chance.choice(news)
                jobs.cancel(victim.id)
                cancelled.add(victim.id)
            for new in news:
                _check(client, jobs, new, new.id in cancelled)
            eventually(lambda: not client.exists("tandem:leases"), "leases are left")
            assert_idle(client)
        finally:
            codes = [keeper.close() for keeper in keepers]
        assert codes == [0, 0]


def _random_job(chance: random.Random, number: int) -> NewJob:
    locked = chance.random() < 0.5
    return new_job(
        tokens=chance.choice((12, 40, 90)),
        answer=chance.randint(1, 12),
        stage="decode" if chance.random() < 0.25 else "prefill",
        conversation=f"conv_{number}" if locked else None,
        lock=locked,
        priority=chance.choice(("interactive", "normal", "batch")),
    )


def _check(client: Any, jobs: Jobs, new: NewJob, was_cancelled: bool) -> None:
    job = jobs.wait(new.id, 60)
    said = answer(client, new.id)
    if was_cancelled and job.status == "cancelled":
        assert said == oracle(new)[: len(said)], "what was said before the cancel is right"
    else:
        assert job.status == "completed", job.error
        assert said == oracle(new)
