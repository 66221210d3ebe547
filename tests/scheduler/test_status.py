"""/health, /ready, the status page and the metrics say how things are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_stack import Stack
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from redis_kit import Server, eventually

from scheduler.jobs import Jobs
from scheduler.nodes import Node, Presence

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


def submit(stack: Stack, text: str = "Hi", **more: object) -> str:
    body = {"input": text, "background": True, **more}
    return str(httpx.post(f"{stack.url}/v1/responses", json=body).json()["id"])


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.partition("</style>")[2]).split())


def test_the_page_shows_what_waits_and_what_runs(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    names = [submit(stack, user="<script>alert(1)</script>") for _ in range(3)]
    answer = httpx.get(f"{stack.url}/")
    assert answer.status_code == 200
    page = answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert 'http-equiv="refresh"' in page
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page
    shown = text_of(page)
    for name in names:
        assert name in shown
    assert "Requests wait at the prefill queue : 3 there" in shown
    assert "&lt;script&gt;alert(1)" in page
    assert "prefill local" in shown
    stack.workers.may_finish.clear()
    stack.workers.open()
    for name in names:
        Jobs(stack.workers.runs.client).wait(name, 60)

    def handed_over() -> bool:
        return "tcp" in text_of(httpx.get(f"{stack.url}/").text)

    eventually(handed_over, "the hand-offs are not shown")
    shown = text_of(httpx.get(f"{stack.url}/").text)
    assert "Nothing waits" in shown
    assert "3 with 3 turns" in shown


def test_the_page_says_what_is_missing(stack: Stack) -> None:
    stack.present[0].stop()
    stack.rpc.close()

    def said() -> bool:
        shown = text_of(httpx.get(f"{stack.url}/").text)
        return "no prefill worker is ready: none has reported" in shown and (
            "the store does not answer" in shown
        )

    eventually(said, "what is missing is not told")
    ready = httpx.get(f"{stack.url}/ready")
    assert ready.status_code == 503
    assert ready.json()["missing"] == [
        "the store does not answer: is the decode worker running?",
        "no prefill worker is ready: none has reported",
    ]
    starting = Node("prefill", "local", state="starting")
    with Presence(stack.config.redis_url, starting):
        eventually(
            lambda: "local is starting" in str(httpx.get(f"{stack.url}/ready").json()["missing"]),
            "a worker that starts is not named",
        )
    assert httpx.get(f"{stack.url}/health").json() == {"ok": True}


def test_it_answers_while_redis_is_away(durable_redis: Server) -> None:
    with Stack(durable_redis.url) as stack:
        httpx.get(f"{stack.url}/metrics")
        stack.workers.stop()
        durable_redis.kill()
        assert httpx.get(f"{stack.url}/health").status_code == 200
        ready = httpx.get(f"{stack.url}/ready", timeout=120)
        assert ready.status_code == 503
        assert ready.json()["missing"] == ["Redis does not answer"]
        eventually(  # what was seen a moment ago is shown for a second
            lambda: "Redis does not answer" in httpx.get(f"{stack.url}/", timeout=120).text,
            "the page does not say that Redis is away",
        )
        metrics = httpx.get(f"{stack.url}/metrics", timeout=120)
        assert "tandem_redis_up 0.0" in metrics.text
        durable_redis.start()
        eventually(
            lambda: httpx.get(f"{stack.url}/ready", timeout=120).status_code == 200,
            "it is not ready again",
        )


def test_metrics_parse_and_count_each_job_once(stack: Stack) -> None:
    before = httpx.get(f"{stack.url}/metrics")
    assert before.headers["content-type"].startswith("text/plain")
    jobs = Jobs(stack.workers.runs.client)
    ended = [jobs.wait(submit(stack), 60) for _ in range(2)]
    ended.append(jobs.wait(submit(stack, store=False), 60))
    for _ in range(2):  # a second scrape counts nothing twice
        text = httpx.get(f"{stack.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counts = {s.labels["status"]: s.value for s in families["tandem_jobs_ended"].samples
              if s.name.endswith("_total")}  # fmt: skip
    assert counts == {"completed": 3}
    written = next(
        s.value for s in families["tandem_output_tokens"].samples if s.name.endswith("_total")
    )
    assert written == sum(job.usage["output_tokens"] for job in ended if job.usage)
    assert families["tandem_ready"].samples[0].value == 1.0
    assert {s.labels["route"] for s in families["tandem_http_requests"].samples} >= {
        "/v1/responses",
        "/metrics",
    }
    asked = httpx.get(
        f"{stack.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert list(openmetrics.text_string_to_metric_families(asked.text))


_EXPRESSION = re.compile(r"(tandem_[a-z_]+)(?:\{([^}]*)\})?")


def test_every_query_of_the_grafana_dashboard_has_its_metric(stack: Stack) -> None:
    jobs = Jobs(stack.workers.runs.client)
    httpx.get(f"{stack.url}/metrics")
    jobs.wait(submit(stack), 60)
    text = httpx.get(f"{stack.url}/metrics").text
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        exported.setdefault(family.name, set())
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
    # One that has no sample yet is told by its type alone.
    exported.update({name: set() for name in re.findall(r"# TYPE (\S+)", text)
                     if name not in exported})  # fmt: skip
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(found) >= 15
    used = set()
    for expression in found:
        names = _EXPRESSION.findall(expression)
        assert names, expression
        for name, matchers in names:
            assert name in exported, f"{expression}: no metric is called {name}"
            used.add(name)
            for label in re.findall(r"(\w+)\s*[=!]", matchers):
                assert label in exported[name] | {"job", "instance"}, expression
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            for label in filter(None, re.split(r"[,\s]+", labels)):
                known = set().union(*(exported[name] for name, _ in names))
                assert label in known | {"le"}, expression
    ours = {name for name in exported if name.startswith("tandem_") and "_created" not in name}
    drawn = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in used}
    every = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in ours}
    assert every - drawn <= {"tandem_ready", "tandem_http_request_seconds", "tandem_store_turns"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
