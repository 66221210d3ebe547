"""A real Redis, worker processes with small fake engines, and what they should answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.exceptions import RedisError

from scheduler import events
from scheduler.jobs import Jobs
from scheduler.record import NewJob, response_id
from scheduler.redis_client import connect
from scheduler.redis_server import find

HERE = Path(__file__).parent


class Server:
    """A Redis on a private socket."""

    def __init__(self, *, durable: bool = False) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="tq-"))
        self.url = f"unix://{self.dir}/r.sock"
        self.durable = durable
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.dir / "r.sock").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                str(find().path), "--port", "0", "--unixsocket", str(self.dir / "r.sock"),
                "--save", "", "--appendonly", "yes" if self.durable else "no",
                "--appendfsync", "everysec", "--dir", str(self.dir), "--daemonize", "no",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        client = connect(self.url, patience=0)
        try:
            eventually(lambda: _pings(client), "Redis does not answer")
        finally:
            client.close()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def eventually(condition: Callable[[], Any], message: str, seconds: float = 30.0) -> Any:
    """The condition's first true value; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{message} (after {seconds:g} s)")
        time.sleep(0.01)
    return value


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

    def stop(self, timeout: float = 30.0) -> int:
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
            "tandem:leases", "tandem:turn:*", "tandem:size:*", "tandem:due:*", "tandem:own*", "rq:wip:*", "rq:queue:*",
            "rq:execution:*", "rq:executions:*", "rq:worker:*:executions",
        )
        for key in client.scan_iter(pattern, count=1000)
        if (kind := client.type(key))
    }  # fmt: skip
    assert not left, left
    counts = Jobs(client).counts()
    live = ("queued", "prefilling", "handing_off", "decoding")
    assert not any(counts[status] for status in live), counts
