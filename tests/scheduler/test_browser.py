"""The pages in a real browser: they render, what clients wrote stays text, other sites do nothing.

Screenshots lie in tests/artefacts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from api_stack import Stack
from browser_kit import ARTEFACTS, chromium
from dashboards_kit import Side, sides
from playwright.sync_api import Browser, Page
from redis_kit import Server, eventually
from rq import SimpleWorker

from scheduler.api import status
from scheduler.jobs import Jobs
from scheduler.owners import add as add_owner

EVIL = "<img src=x onerror='window.fired=(window.fired||0)+1'><script>window.fired=99</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Side, Side, Stack]]:
    with Server() as server, sides(server.url) as found:
        yield found


@contextmanager
def page_of(browser: Browser, **options: Any) -> Iterator[Page]:
    """A page in a context of its own, which fails the test on an error of a script."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    context.set_default_timeout(120_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        yield page
        assert not errors
    finally:
        context.close()


def shoot(page: Page, name: str) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)


def submit(stack: Stack, text: str) -> str:
    body = {"input": text, "background": True, "user": EVIL, "metadata": {"a": EVIL}}
    return str(httpx.post(f"{stack.url}/v1/responses", json=body).json()["id"])


def test_queues_jobs_and_workers_render_with_live_jobs(
    browser: Browser, both: tuple[Side, Side, Stack]
) -> None:
    _, ours, stack = both
    stack.workers.may_prefill.clear()
    names = [submit(stack, EVIL) for _ in range(3)]
    worker = SimpleWorker([ours.queue("prefill")], name="prefill-x", connection=ours.client)
    worker.register_birth()  # type: ignore[no-untyped-call]  # RQ has no annotations here
    with page_of(browser) as page:
        page.goto(f"{ours.base}/")
        page.get_by_role("cell", name="prefill", exact=True).wait_for()
        assert page.locator("tr[data-role=queue]").count() >= 1
        shoot(page, "rq-queues")
        page.goto(f"{ours.base}/0/view/jobs/prefill/queued/8/asc/1")
        for name in names:
            page.get_by_text(f"{name}-p", exact=True).wait_for()
        assert not page.get_by_text("Requeue All").is_visible()
        assert not page.get_by_text("Empty queue").is_visible()
        shoot(page, "rq-jobs")
        page.goto(f"{ours.base}/0/view/workers")
        page.get_by_text("prefill-x").wait_for()
        shoot(page, "rq-workers")
        page.goto(f"{ours.base}/0/view/job/{names[0]}-p")
        page.get_by_text("tokens").first.wait_for()
        shoot(page, "rq-job")
        assert page.evaluate("window.fired") is None
    stack.workers.fail_with = EVIL
    stack.workers.open()
    for name in names:
        Jobs(ours.client).wait(name, 60)
    with page_of(browser) as page:
        page.goto(f"{ours.base}/0/view/jobs/decode/failed/8/asc/1")
        page.get_by_text("window.fired").first.wait_for()
        shoot(page, "rq-failed")
        page.goto(f"{ours.base}/0/view/job/{names[0]}-d")
        page.get_by_text("window.fired").first.wait_for()
        shoot(page, "rq-failed-job")
        assert page.evaluate("window.fired") is None
    stack.workers.fail_with = None


@pytest.mark.rotate(2)
@pytest.mark.parametrize("field", ["description", "meta", "result", "exc_info"])
def test_script_in_a_job_runs_in_the_stock_dashboard_and_stays_text_in_ours(
    browser: Browser, both: tuple[Side, Side, Stack], field: str
) -> None:
    def fired(side: Side) -> Any:
        queue = side.queue("evil")
        job = queue.enqueue("os.getpid")
        queue.remove(job)
        if field == "description":
            side.client.hset(f"rq:job:{job.id}", "description", EVIL)
        elif field == "meta":
            job.meta["m"] = EVIL
            job.save_meta()
        else:
            worker = SimpleWorker([queue], connection=side.client, serializer=side.serializer)
            worker.log.disabled = True
            name = "os.path.basename" if field == "result" else "os.listdir"
            # basename would cut at the slash of a closing tag
            job = queue.enqueue(name, EVIL.partition("<script>")[0])
            worker.work(burst=True)
        with page_of(browser) as page:
            page.goto(f"{side.base}/0/view/job/{job.id}")
            page.get_by_text("Exception Info").wait_for()
            if side is both[0]:
                page.wait_for_function("window.fired > 0")
            else:
                page.get_by_text("window.fired").first.wait_for()
                shoot(page, f"rq-evil-{field}")
            return page.evaluate("window.fired")

    assert fired(both[0])
    assert fired(both[1]) is None


def test_the_status_page_shows_live_jobs_and_no_script(
    browser: Browser, both: tuple[Side, Side, Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REFRESH", 600)  # it stays while it is looked at
    _, ours, stack = both
    stack.workers.may_prefill.clear()
    names = [submit(stack, EVIL) for _ in range(4)]

    with page_of(browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))

        def shown() -> bool:
            page.goto(f"{stack.url}/")
            ready = page.locator("#state").inner_text() == "ready"
            return ready and all(page.get_by_text(name).count() for name in names)

        eventually(shown, "the jobs are not shown")
        assert page.locator("#bottleneck").inner_text().startswith("Requests wait at the prefill")
        assert EVIL in page.locator("#requests").inner_text()
        assert page.locator("#requests img").count() == 0
        shoot(page, "status")
        assert page.evaluate("window.fired") is None
        # It loads nothing but itself, and a second time by itself.
        loads = asked.count(f"{stack.url}/")
        monkeypatch.setattr(status, "REFRESH", Once())
        page.goto(f"{stack.url}/")

        def again() -> bool:
            page.wait_for_timeout(50)
            return asked.count(f"{stack.url}/") > loads + 1

        eventually(again, "it does not load itself again")
        page.wait_for_load_state()
        assert set(asked) <= {f"{stack.url}/", f"{stack.url}/favicon.ico"}
        page.set_viewport_size({"width": 390, "height": 800})
        shoot(page, "status-narrow")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390
    stack.workers.open()
    for name in names:
        Jobs(ours.client).wait(name, 60)


class Once:
    """A second until the page loads itself again, for the page that is made first."""

    def __init__(self) -> None:
        self._seconds = iter((1,))

    def __str__(self) -> str:
        return str(next(self._seconds, 600))


@contextmanager
def other_site(html: Callable[[], str]) -> Iterator[str]:
    """A web page of another origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html().encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


@pytest.mark.rotate(2)
@pytest.mark.parametrize("token", [False, True])
def test_a_page_of_another_site_can_change_nothing(
    browser: Browser, redis_url: str, token: bool
) -> None:
    api: dict[str, Any] = {"dashboard": "cancel"}
    with Stack(redis_url, api={**api, **({"token": "t0p"} if token else {})}) as stack:
        stack.workers.may_prefill.clear()
        headers = {"Authorization": "Bearer t0p"} if token else {}
        body = {"input": "Hi", "background": True}
        name = httpx.post(f"{stack.url}/v1/responses", json=body, headers=headers).json()["id"]
        targets = [
            f"{stack.url}/rq/job/{name}-p/delete",
            f"{stack.url}/rq/queue/prefill/queued/empty",
            f"{stack.url}/v1/responses/{name}/cancel?force=true",
        ]
        html = "".join(
            f"<form id=g{n} method=post action='{url}'></form>" for n, url in enumerate(targets)
        )
        login = {"username": "x", "password": "t0p"} if token else None
        options: dict[str, Any] = {"http_credentials": login} if login else {}
        with other_site(lambda: html) as site, page_of(browser, **options) as page:
            if token:
                page.goto(f"{stack.url}/rq/")  # the browser knows the password from now on
                page.get_by_role("cell", name="prefill", exact=True).wait_for()
            for number, url in enumerate(targets):
                page.goto(site)
                with page.expect_navigation(url=url) as answer:
                    page.evaluate(f"document.getElementById('g{number}').submit()")
                assert answer.value is not None
                # The dashboard gets the password that the browser knows, and refuses all the same.
                refusals = (403,) if "/rq/" in url else (401, 403)
                assert answer.value.status in refusals, url
        job = Jobs(stack.workers.runs.client).get(name)
        assert (job.status, job.cancel) == ("queued", False)
        # The dashboard's own button does cancel.
        with page_of(browser, **options) as page:
            page.goto(f"{stack.url}/rq/0/view/job/{name}-p")
            page.get_by_role("button", name="Delete").click()
            with page.expect_response(targets[0]) as answer:
                page.get_by_role("button", name="Yes").click()
            assert answer.value.status == 200
        assert Jobs(stack.workers.runs.client).get(name).status == "cancelled"
        lines = (stack.config.data_dir / "logs" / "audit.log").read_text().splitlines()
        assert sum('"refused"' in line for line in lines) >= 2
        assert sum('"how":"cancelled"' in line for line in lines) == 1


def test_an_owner_who_is_no_operator_sees_no_dashboard(browser: Browser, redis_url: str) -> None:
    with Stack(redis_url) as stack:
        token = add_owner(stack.config.data_dir, "alice")
        boss = add_owner(stack.config.data_dir, "boss", operator=True)
        for word, status in ((token, 403), (boss, 200)):
            login = {"username": "x", "password": word}
            with page_of(browser, http_credentials=login) as page:
                for path in ("/", "/rq/", "/metrics"):
                    answer = page.goto(f"{stack.url}{path}")
                    assert answer is not None
                    assert answer.status == status, path
