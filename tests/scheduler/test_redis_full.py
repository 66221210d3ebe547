"""Redis on a full disk: jobs are refused with the reason, and nothing that was said is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_kit import eventually
from small_disk import Disk, small_disk

from scheduler.config import Config, resolved_environment
from scheduler.doctor.service import redis_settings
from scheduler.host import data_dir
from scheduler.host.redis_server import probe
from scheduler.jobs import Jobs
from scheduler.record import NewJob, response_id
from scheduler.redis_client import AWAY, connect


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with small_disk(16) as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made.path))
        yield made


def alive(pid: int) -> bool:
    """False too for one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_jobs_are_refused_until_there_is_room(disk: Disk) -> None:
    config = Config(data_dir=disk.path / "data")
    data_dir.prepare(config)
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "scheduler.host.redis_server"],
        env=resolved_environment(config),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        probe(config.redis_url, 60)
        with connect(config.redis_url, patience=0) as client:
            jobs = Jobs(client)

            def accept() -> str | None:
                new = NewJob(response_id(), "model", {"input": "?"}, range(2000), stage="prefill")
                try:
                    return jobs.accept(new).id
                except AWAY:
                    return None

            first = accept()
            assert first is not None
            disk.fill()
            eventually(lambda: accept() is None, "Redis does not notice the full disk")
            found = redis_settings(None, client.info(), ours=True)
            assert found.status == "fail"
            assert "cannot write" in found.finding
            assert jobs.get(first).status == "queued"  # what is there can be read
            disk.free()
            second = eventually(accept, "Redis does not notice the room")
            pid = int(client.info("server")["process_id"])
        server.kill()  # its child lives on, until the next one shuts it down
        server.wait()
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "scheduler.host.redis_server"],
            env=resolved_environment(config),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: not alive(pid), "the first server goes on")
        with connect(config.redis_url, patience=60) as client:
            assert Jobs(client).get(first).status == "queued"
            assert Jobs(client).get(second).status == "queued"
    finally:
        server.terminate()
        server.wait()
