"""Every known hole of rq-dashboard 0.9.0: there in the stock package, closed in ours.

Each test is one function that says whether a dashboard has the hole. If an upgrade of the package
closes one by itself, its test fails, and our patch can go.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_stack import Stack
from dashboards_kit import HTTP, Pickled, Side, sides
from redis_kit import Server
from rq import SimpleWorker
from rq.job import Job
from rq.rate_limit import RateLimit
from rq.registry import ReadyJobRegistry

from scheduler.config import Config, is_loopback
from scheduler.jobs import Jobs
from scheduler.record import NewJob, response_id
from scheduler.redis_client import connect

Both = tuple[Side, Side, Stack]


@pytest.fixture(scope="module")
def _both() -> Iterator[tuple[Both, str]]:
    with Server() as server, sides(server.url) as found:
        yield found, server.url


@pytest.fixture
def both(_both: tuple[Both, str]) -> Both:
    """Both dashboards, and a Redis without a queue or job."""
    found, url = _both
    with connect(url) as client:
        for key in client.scan_iter("rq:*"):
            client.delete(key)
    return found


def check(both: Both, hole: Callable[[Side], bool]) -> None:
    stock, ours, _ = both
    assert hole(stock), "the stock package has no such hole any more: remove our patch"
    assert not hole(ours)


def test_it_imports_what_it_does_not_declare() -> None:
    names = [line.split()[0].lower() for line in importlib.metadata.requires("rq-dashboard") or ()]
    assert not any(name.startswith("six") for name in names)
    root = Path(__file__).parents[2]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(name.startswith("six") for name in wanted)


def test_a_job_with_dependencies(both: Both) -> None:
    def hole(side: Side) -> bool:
        first = side.queue().enqueue("os.getpid")
        second = side.queue().enqueue("os.getpid", depends_on=first)
        answer = side.get(f"/0/data/job/{second.id}.json")
        return answer.status_code != 200 or answer.json()["depends_on"] != [first.id]

    check(both, hole)


@pytest.mark.parametrize("field", ["description", "metadata", "result", "exc_info"])
def test_text_put_into_the_page_as_html(both: Both, field: str) -> None:
    # What a browser makes of it is in test_browser.
    def hole(side: Side) -> bool:
        job = side.queue().enqueue("os.getpid")
        page = side.get(f"/0/view/job/{job.id}").text
        assert f"d.{field}" in page
        return f"<%= d.{field}" in page or f"<%= JSON.stringify(d.{field}" in page

    check(both, hole)


def test_a_name_from_the_address_in_a_script(both: Both) -> None:
    def hole(side: Side) -> bool:
        page = side.get("/0/view/jobs/');alert(1);('/queued/8/asc/1").text
        return "val('');alert(1);('')" in page

    check(both, hole)


FOREIGN = {"Origin": "http://evil.example", "Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("path", ["/queue/holes/queued/empty", "/job/{id}/delete"])
def test_a_foreign_page_can_change_queues(both: Both, path: str) -> None:
    def hole(side: Side) -> bool:
        job = side.queue().enqueue("os.getpid")
        answer = HTTP.post(side.base + path.format(id=job.id), headers=FOREIGN)
        left = side.queue().get_job_ids()
        side.queue().empty()
        return answer.status_code == 200 and job.id not in left

    check(both, hole)


def _failed(side: Side) -> Job:
    job = side.queue().enqueue("os.getpid")
    side.queue().remove(job)
    side.queue().failed_job_registry.add(job, ttl=100)
    job.set_status("failed")  # type: ignore[arg-type]  # a plain text is what is stored
    return job


def test_a_get_requeues(both: Both) -> None:
    def hole(side: Side) -> bool:
        job = _failed(side)
        side.get("/requeue/holes")
        moved = job.id in side.queue().get_job_ids()
        side.client.flushdb()
        return moved

    check(both, hole)


@pytest.mark.parametrize("path", ["/requeue/holes", "/job/{id}/requeue", "/queue/holes/compact"])
def test_what_disabled_deletion_does_not_disable(both: Both, path: str) -> None:
    def hole(side: Side) -> bool:
        job = _failed(side)
        side.queue().enqueue("os.getpid")  # an empty queue cannot be compacted
        headers = {"X-Requested-With": "XMLHttpRequest"}
        answer = HTTP.post(side.no_delete + path.format(id=job.id), headers=headers)
        return answer.status_code == 200 and answer.json()["status"] == "OK"

    check(both, hole)


@pytest.mark.parametrize(
    "path", ["/0/data/jobs/holes/finished/8/asc/1.json", "/0/data/job/{id}.json"]
)
def test_our_serializer(both: Both, path: str) -> None:
    _, ours, _ = both

    def hole(side: Side) -> bool:
        job = ours.queue().enqueue("os.getpid")
        worker = SimpleWorker([ours.queue()], connection=ours.client, serializer=ours.serializer)
        worker.log.disabled = True
        assert worker.work(burst=True)
        return side.get(path.format(id=job.id)).status_code != 200

    check(both, hole)


def test_the_workers_page_while_a_worker_is_busy(both: Both) -> None:
    _, ours, _ = both
    worker = SimpleWorker([ours.queue()], connection=ours.client, serializer=ours.serializer)
    worker.register_birth()  # type: ignore[no-untyped-call]  # RQ has no annotations here
    worker.prepare_execution(ours.queue().enqueue("os.getpid"))
    check(both, lambda side: side.get("/0/data/workers.json").status_code != 200)


def test_what_lies_in_redis_is_executed(both: Both, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    def hole(side: Side) -> bool:
        job = side.queue().enqueue("os.getpid")
        data = zlib.compress(Pickled.dumps(("os.getpid", None, (Evil(),), {})))
        side.client.hset(f"rq:job:{job.id}", "data", data)
        side.client.hset(f"rq:job:{job.id}", "description", "")
        worker = SimpleWorker([side.queue()], connection=side.client, serializer=side.serializer)
        worker.register_birth()  # type: ignore[no-untyped-call]  # as above
        worker.prepare_execution(job)
        side.get(f"/0/data/job/{job.id}.json")
        side.get("/0/data/workers.json")
        owned = (tmp_path / "owned").exists()
        if owned:
            (tmp_path / "owned").rmdir()
        side.client.flushdb()
        return owned

    check(both, hole)


@pytest.mark.parametrize("order", ["asc", "dsc"])
def test_pages_repeat_jobs(both: Both, order: str) -> None:
    def hole(side: Side) -> bool:
        made = [side.queue().enqueue("os.getpid").id for _ in range(20)]
        table = "/0/data/jobs/holes/queued/8"
        pages = [
            [job["id"] for job in side.get(f"{table}/{order}/{n}.json").json()["jobs"]]
            for n in (1, 2, 3)
        ]
        side.client.flushdb()
        wanted = made if order == "asc" else made[::-1]
        return pages != [wanted[:8], wanted[8:16], wanted[16:]]

    check(both, hole)


def test_jobs_that_are_held_back_are_in_no_table(both: Both) -> None:
    def hole(side: Side) -> bool:
        limit = RateLimit("one", 1)
        held = [side.queue().enqueue("os.getpid", rate_limit=limit).id for _ in range(2)][1]
        ready = side.queue().enqueue("os.getpid")
        side.queue().remove(ready)
        ReadyJobRegistry("holes", connection=side.client).add(ready)
        shown = side.listed("holes", "deferred")
        (row,) = side.get("/0/data/queues.json").json()["queues"]
        side.client.flushdb()
        return not {held, ready.id} <= set(shown) or row["deferred_job_registry_count"] != 2

    check(both, hole)


def test_one_row_for_a_worker_with_several_jobs(both: Both) -> None:
    _, ours, stack = both
    stack.workers.may_decode.clear()
    worker = SimpleWorker([ours.queue("decode")], name="decode-x", connection=ours.client)
    worker.register_birth()  # type: ignore[no-untyped-call]  # as above
    jobs = Jobs(ours.client)
    for _ in range(2):
        name = response_id()
        jobs.accept(NewJob(name, "m", {}, [1, 2], stage="decode"))
        ours.client.hset(f"tandem:job:{name}", mapping={"run": "r", "worker": "decode-x"})

    def hole(side: Side) -> bool:
        rows = side.get("/0/data/workers.json").json()["workers"]
        return sum("decode-x" in row["name"] for row in rows) != 2

    check(both, hole)
    ours.client.flushdb()
    stack.workers.open()


def test_an_unknown_job_is_an_error_of_the_server(both: Both) -> None:
    check(both, lambda side: side.get("/0/data/job/none.json").status_code == 500)


def test_deleting_what_runs_loses_it(both: Both) -> None:
    _, ours, stack = both
    jobs = Jobs(ours.client)

    def hole(side: Side) -> bool:
        stack.workers.may_prefill.clear()
        body = {"input": "Hi", "background": True}
        name = HTTP.post(f"{stack.url}/v1/responses", json=body).json()["id"]
        headers = {"X-Requested-With": "XMLHttpRequest"}
        HTTP.post(f"{side.base}/job/{name}-p/delete", headers=headers)
        lost = not ours.client.exists(f"rq:job:{name}-p")
        jobs.cancel(name)
        stack.workers.open()
        return lost

    check(both, hole)


def test_it_listens_to_everybody_without_a_password(both: Both) -> None:
    from rq_dashboard import cli

    bind = next(option for option in cli.run.params if option.name == "bind")
    assert bind.default == "0.0.0.0"
    assert is_loopback(Config().api.host)
    assert "token" in inspect.signature(Config().api.__class__).parameters


def test_descriptions_hold_what_was_asked(both: Both) -> None:
    stock, ours, stack = both
    stock.queue().enqueue("os.getenv", "my secret prompt")
    assert "my secret prompt" in stock.get("/0/data/jobs/holes/queued/8/asc/1.json").text
    stack.workers.may_prefill.clear()
    body = {"input": "my secret prompt", "background": True}
    name = HTTP.post(f"{stack.url}/v1/responses", json=body).json()["id"]
    shown = ours.get("/0/data/jobs/prefill/queued/8/asc/1.json").text
    assert name in shown
    assert "secret" not in shown + ours.get(f"/0/data/job/{name}-p.json").text
    Jobs(ours.client).cancel(name)  # nobody works on it while others empty this Redis
    stack.workers.open()


def test_a_poll_asks_for_every_result(both: Both) -> None:
    def hole(side: Side) -> bool:
        for _ in range(30):
            side.queue().enqueue("os.getpid")
        side.client.config_resetstat()
        assert len(side.listed("holes", "queued", 30)) >= 29
        calls = side.client.info("commandstats")
        side.client.flushdb()
        return int(calls.get("cmdstat_xrevrange", {}).get("calls", 0)) >= 29

    check(both, hole)
