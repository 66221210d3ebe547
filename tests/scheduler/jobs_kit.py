"""A real Redis, worker processes with small fake engines, and what they should answer."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from scheduler import events
from scheduler.jobs import Jobs
from scheduler.record import Job, NewJob, response_id

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the worker processes
from redis_kit import Server, eventually

HERE = Path(__file__).parent

__all__ = ["Server", "eventually"]


def new_job(*, tokens: int = 40, answer: int = 6, **changes: Any) -> NewJob:
    """A job for the fake engines: `answer` tokens are wanted."""
    request = {"n": answer, **changes.pop("request", {})}
    fields: dict[str, Any] = {
        "id": response_id(),
        "model": "fake",
        "request": request,
        "prompt_ids": list(range(1, tokens + 1)),
    }
    return NewJob(**{**fields, **changes})


def oracle(new: NewJob) -> list[int]:
    """Token ids that the fake engine answers with."""
    return [answer_token(list(new.prompt_ids), k) for k in range(int(new.request["n"]))]


def answer_token(prompt: list[int], position: int) -> int:
    """The fake model: token at `position` of the answer."""
    return (sum(prompt) * 31 + position * 7) % 50_000


class Worker:
    """A worker process with a fake engine (`jobs_worker.py`)."""

    def __init__(self, role: str, url: str, **options: Any) -> None:
        self.role = role
        spec = json.dumps({"role": role, "url": url, **options})
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "jobs_worker.py"), spec],
            stderr=subprocess.PIPE if options.get("quiet") else None,
        )

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self, timeout: float = 120.0) -> int:
        """SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class Hold:
    """Where a worker waits until it is let go: `spec` are options of that worker."""

    def __init__(self, folder: Path, point: str, nth: int = 1) -> None:
        self._base = folder / f"hold-{secrets.token_hex(4)}"
        self.spec = {"point": point, "nth": nth, "act": "hold", "hold": str(self._base)}

    def reached(self) -> None:
        """Wait until the worker is there."""
        there = self._base.with_suffix(".there")
        eventually(there.exists, f"nobody comes to {self.spec['point']}")

    def release(self) -> None:
        """Let it go on."""
        self._base.with_suffix(".go").touch()


def answer(client: redis.Redis, resp: str) -> list[int]:
    """Token ids in a log, after checking that the log is one well-formed story."""
    log = events.read(client, resp, count=100_000)
    assert [event.seq for event in log] == list(range(len(log)))
    last = [event.seq for event in log if events.is_terminal(event.data)]
    assert last == [len(log) - 1], "exactly one terminal event, the last one"
    return [token for event in log for token in event.data.get("ids", ())]


def assert_idle(client: redis.Redis) -> None:
    """Nothing waits, runs, is leased or locked."""
    left = {
        key: kind
        for pattern in (
            "tandem:leases", "tandem:promised:*", "tandem:abandoned", "tandem:turn:*",
            "tandem:attended", "tandem:waiting:*",
            "tandem:size:*", "tandem:due:*", "tandem:own*", "rq:wip:*", "rq:queue:*",
            "rq:execution:*", "rq:executions:*", "rq:worker:*:executions",
        )
        for key in client.scan_iter(pattern, count=1000)
        if (kind := client.type(key))
    }  # fmt: skip
    assert not left, left
    counts = Jobs(client).counts()
    live = ("queued", "prefilling", "handing_off", "decoding")
    assert not any(counts[status] for status in live), counts


def completed(client: redis.Redis, jobs: Jobs, new: NewJob) -> Job:
    """The job at its end, which has to be the oracle's answer."""
    job = jobs.wait(new.id, 120)
    assert job.status == "completed", job.error
    assert answer(client, new.id) == oracle(new)
    return job


def nothing_left(client: redis.Redis) -> None:
    """Wait until no lease is left, and check that nothing waits or runs."""
    eventually(lambda: not client.exists("tandem:leases"), "leases are left")
    assert_idle(client)


def started(url: str, **common: Any) -> Iterator[Callable[..., Worker]]:
    """Gives what starts workers with the `common` options; kills what is left of them."""
    workers: list[Worker] = []

    def start(role: str, **options: Any) -> Worker:
        worker = Worker(role, url, **common, **options)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.kill()


def is_stopped(pid: int) -> bool:
    """Whether a child was stopped by a signal since the last look."""
    done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    return done == pid and os.WIFSTOPPED(status)
