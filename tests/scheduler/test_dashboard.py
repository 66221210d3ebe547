"""The mounted rq-dashboard: true, escaped, read-only, and behind the API's own access check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import httpx
import pytest
from api_stack import Stack
from jobs_kit import eventually

from scheduler.jobs import Jobs

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


def submit(stack: Stack, text: str = "Hi") -> str:
    body = {"input": text, "background": True}
    answer = httpx.post(f"{stack.url}/v1/responses", json=body)
    return str(answer.json()["id"])


def counts(stack: Stack) -> dict[str, dict[str, int]]:
    queues = httpx.get(f"{stack.url}/rq/0/data/queues.json").json()["queues"]
    return {q["name"]: q for q in queues}


def listed(stack: Stack, queue: str, registry: str, per: int = 8, page: int = 1) -> list[str]:
    path = f"{stack.url}/rq/0/data/jobs/{queue}/{registry}/{per}/asc/{page}.json"
    return [job["id"] for job in httpx.get(path).json()["jobs"]]


def test_queues_show_what_waits_runs_and_has_ended(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    waiting = [submit(stack) for _ in range(3)]
    assert counts(stack)["prefill"]["count"] == 3
    assert listed(stack, "prefill", "queued") == [f"{name}-p" for name in waiting]
    stack.workers.may_finish.clear()
    stack.workers.may_prefill.set()
    assert stack.workers.halfway.wait(60)
    assert counts(stack)["decode"]["started_job_registry_count"] == 1
    assert len(listed(stack, "decode", "started")) == 1
    stack.workers.fail_with = EVIL
    stack.workers.open()
    jobs = Jobs(stack.workers.runs.client)
    for name in waiting:
        jobs.wait(name, 60)
    seen = counts(stack)
    assert seen["prefill"]["finished_job_registry_count"] == 3
    assert seen["decode"]["finished_job_registry_count"] == 1
    assert seen["decode"]["failed_job_registry_count"] == 2


def test_pages_are_counted_right(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    made = [f"{submit(stack)}-p" for _ in range(11)]
    pages = [listed(stack, "prefill", "queued", 4, n) for n in (1, 2, 3)]
    assert [len(page) for page in pages] == [4, 4, 3]
    assert list(chain(*pages)) == made
    jobs = Jobs(stack.workers.runs.client)
    for name in made:
        jobs.cancel(name.removesuffix("-p"))
    pages = [listed(stack, "prefill", "canceled", 4, n) for n in (1, 2, 3)]
    assert sorted(chain(*pages)) == sorted(made)


def test_every_page_answers_and_escapes(stack: Stack) -> None:
    stack.workers.fail_with = EVIL
    name = submit(stack, EVIL)
    job = Jobs(stack.workers.runs.client).wait(name, 60)
    assert job.status == "failed"
    base = f"{stack.url}/rq"
    for path in (
        "/", "/0/view/queues", "/0/view/workers", "/0/view/jobs", f"/0/view/job/{name}-d",
        f"/0/view/job/{name}-p", "/0/view/jobs/decode/failed/8/dsc/1", "/0/data/workers.json",
        f"/0/data/job/{name}-p.json", f"/0/data/job/{name}-d.json", "/static/css/main.css",
    ):  # fmt: skip
        answer = httpx.get(base + path, follow_redirects=True)
        assert answer.status_code == 200, path
        assert EVIL not in answer.text or answer.headers["content-type"] == "application/json"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    page = httpx.get(f"{base}/0/view/job/{name}-d").text
    # What is put in as HTML are only the texts that the page escapes itself.
    assert all("$(" in hole for hole in re.findall(r"<%=[^%]*%>", page))
    assert httpx.get(f"{base}/0/view/job/none").status_code == 404
    assert httpx.get(f"{base}/0/data/jobs/decode/nonsense/8/asc/1.json").status_code == 404


def test_workers_have_one_row_for_each_run(stack: Stack) -> None:
    rows = httpx.get(f"{stack.url}/rq/0/data/workers.json").json()["workers"]
    assert rows == []  # these test workers do not register with RQ


def test_nothing_can_be_changed(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    name = submit(stack)
    base = f"{stack.url}/rq"
    ajax = {"X-Requested-With": "XMLHttpRequest"}
    for path in (
        f"/job/{name}-p/delete", f"/job/{name}-p/requeue", "/queue/prefill/queued/empty",
        "/queue/prefill/compact", "/requeue/prefill",
    ):  # fmt: skip
        assert httpx.post(base + path, headers=ajax).status_code == 403
    assert httpx.get(f"{base}/requeue/prefill").status_code == 403
    assert counts(stack)["prefill"]["count"] == 1
    eventually(lambda: listed(stack, "prefill", "queued") == [f"{name}-p"], "the job is gone")


def test_the_front_page_leads_there(stack: Stack) -> None:
    answer = httpx.get(stack.url)
    assert answer.status_code == 200
    assert '<a href="/rq/">' in answer.text
    assert "RQ" in httpx.get(f"{stack.url}/rq/").text
