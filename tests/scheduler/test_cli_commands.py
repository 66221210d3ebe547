"""submit, resume, jobs, show, cancel and serve, as a person runs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_stack import Stack
from jobs_kit import eventually
from ports_kit import own_port

from scheduler.jobs import Jobs


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TANDEM_", "REDIS_URL"))}
    return {**kept, **more}


def tandem(*words: str, url: str = "", text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", *words],
        capture_output=True, text=True, input=text, timeout=180, encoding="utf-8",
        env=environment(TANDEM_URL=url),
    )  # fmt: skip


def test_submit_resume_show(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text("Why is the sky blue?", encoding="utf-8")
    out = tandem("submit", str(file), "--instructions", "Be brief.", url=stack.url)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("You sent ")
    assert "東京 👩‍👩‍👧 é!" in out.stdout
    (job,) = Jobs(stack.workers.runs.client).list()
    assert f"{job.id} completed" in out.stderr
    assert f"tandem resume {job.id}" in out.stderr

    out = tandem("resume", job.id, "And at sunset?", "--json", url=stack.url)
    assert out.returncode == 0, out.stderr
    second = json.loads(out.stdout)
    assert second["previous_response_id"] == job.id
    assert second["tandem"]["cached_tokens"] > 0

    conversation = second["conversation"]["id"]
    out = tandem("resume", conversation, "-", "--max-tokens", "2", text="Go on", url=stack.url)
    assert out.returncode == 0, out.stderr
    assert "incomplete (max_output_tokens)" in out.stderr

    out = tandem("show", job.id, url=stack.url)
    assert out.returncode == 0, out.stderr
    for words in ("completed", "Why is the sky blue?", "You sent", "1,000 bytes in 0.010 s by tcp"):
        assert words in out.stdout
    assert json.loads(tandem("show", job.id, "--json", url=stack.url).stdout)["id"] == job.id
    out = tandem("show", conversation, url=stack.url)
    assert "3 turns" in out.stdout
    assert out.stdout.index("And at sunset?") < out.stdout.index("Go on")
    shown = json.loads(tandem("show", conversation, "--json", url=stack.url).stdout)
    assert [item["role"] for item in shown["items"]] == ["user", "assistant"] * 3


def test_conversations(stack: Stack) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return tandem("conversations", *words, url=stack.url)

    assert run().stdout == run("list").stdout == "no conversations\n"
    made = json.loads(tandem("submit", "-", "--json", text="Hi\n", url=stack.url).stdout)
    name = made["conversation"]["id"]
    (item,) = httpx.get(f"{stack.url}/v1/responses/{made['id']}/input_items").json()["data"]
    assert item["content"][0]["text"] == "Hi"
    assert run("rename", name, "Sky & sunset").stdout == f'{name} titled "Sky & sunset"\n'
    assert run("--json", "pin", name).stdout.startswith("{")
    lines = run().stdout.splitlines()
    assert lines[1].startswith(name)
    assert "yes" in lines[1]
    assert "Sky & sunset" in lines[1]
    assert run("list", "--limit", "1").stdout.splitlines()[1].startswith(name)
    (listed,) = json.loads(run("--json").stdout)["data"]
    assert (listed["metadata"], listed["tandem"]["pinned"]) == ({"title": "Sky & sunset"}, True)
    assert run("unpin", name).stdout == f"{name} no longer pinned\n"
    assert run("rename", name, "").stdout == f"{name} has no title now\n"
    (listed,) = json.loads(run("--json").stdout)["data"]
    assert (listed["metadata"], listed["tandem"]["pinned"]) == ({}, False)
    refused = run("delete", name)
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert run("delete", "resp_1").returncode == 2
    assert run("delete", name, "--yes").stdout == f"{name} deleted\n"
    assert run().stdout == "no conversations\n"


def test_jobs_and_cancel(stack: Stack) -> None:
    assert tandem("jobs", url=stack.url).stdout == "no jobs\n"
    stack.workers.may_prefill.clear()
    ids = [
        tandem("submit", "-", "--no-wait", text=f"Number {n}", url=stack.url).stdout.strip()
        for n in range(2)
    ]
    out = tandem("jobs", url=stack.url)
    lines = out.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ids[::-1]
    assert "queued" in lines[1]
    assert "1 before" in lines[1]
    assert "next" in lines[2]
    out = tandem("cancel", ids[0], url=stack.url)
    assert (out.returncode, out.stdout) == (0, f"{ids[0]} cancelled\n")
    out = tandem("cancel", ids[0], url=stack.url)
    assert (out.returncode, "had ended before (cancelled)" in out.stdout) == (0, True)
    live = json.loads(tandem("jobs", "--status", "live", "--json", url=stack.url).stdout)
    assert [job["id"] for job in live["data"]] == [ids[1]]
    assert tandem("show", ids[0], url=stack.url).returncode == 0


def test_an_interrupted_wait_leaves_the_job(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    # A shell starts what it runs in the background with interrupts ignored, tests as well.
    heeds = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('scheduler.cli', run_name='__main__', alter_sys=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", heeds, "submit", "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(TANDEM_URL=stack.url),
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write("Hi")
    process.stdin.close()
    (job,) = eventually(lambda: Jobs(stack.workers.runs.client).list(), "no job")

    def interrupted() -> bool:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)  # one that ends is not interrupted again
        return process.poll() is not None

    eventually(interrupted, "the command does not end", 180)
    with process:
        assert process.stderr is not None
        told = process.stderr.read()
    assert process.returncode in (130, -signal.SIGINT)
    if process.returncode == 130:
        assert f"tandem show {job.id}" in told or told == ""
    assert Jobs(stack.workers.runs.client).get(job.id).status == "queued"


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["submit", "no-such-file"], 2, "no-such-file cannot be read: No such file or directory"),
        (["submit", "-"], 2, "the prompt is empty"),
        (["submit", "-", "--image", "none.png"], 2, "none.png cannot be read: No such file"),
        (["submit", "-", "--image", __file__], 2, "takes text only"),
        (["resume", "x", "Hi"], 2, "'x' is no ID"),
        (["resume", "resp_" + "0" * 32, "Hi"], 2, "does not exist here"),
        (["resume", "conv_" + "0" * 32, "Hi"], 2, "does not exist here"),
        (["show", "resp_1"], 2, "is no ID of one, which is resp_ and 32 hex digits"),
        (["cancel", "foo"], 2, "is no ID of one, which is resp_ and 32 hex digits"),
        (["show", "conv_" + "g" * 32], 2, "is no ID of one, which is conv_ and 32 hex digits"),
        (["show", ""], 2, "'' is no ID"),
        (["show", "../.."], 2, "no such path"),
        (["submit", "-", "--temperature", "nan"], 2, "finite numbers"),
        (["submit", "-", "--instructions", "\udcff"], 2, "UTF-8 text"),
        (["jobs", "--status", "odd"], 2, "status"),
        (["submit", "-", "--max-tokens", "0"], 2, "max_output_tokens"),
        (["submit", "-", "--model", "gpt"], 2, "use 'test-model'"),
        (["jobs", "--config", "no.toml"], 2, "no.toml does not exist"),
        (["jobs", "--url", "nonsense"], 2, "not a usable URL"),
        (["jobs", "--url", "http://127.0.0.1:9"], 1, "start it with `tandem up`"),
        (
            ["jobs", "--url", "http://127.0.0.1:9", "--data", "/no/such dir"],
            1,
            "start it with `tandem up --data '/no/such dir'`",
        ),
    ],
)
def test_errors(stack: Stack, words: list[str], status: int, line: str) -> None:
    out = tandem(*words, url=stack.url)
    assert out.returncode == status, out.stderr
    assert line in out.stderr
    assert out.stderr.startswith("tandem: ")
    assert len(out.stderr.splitlines()) == 1
    assert out.stdout == ""


def test_a_failed_run_and_text_that_is_none(stack: Stack, tmp_path: Path) -> None:
    stack.workers.fail_with = "no room: try later"
    out = tandem("submit", "-", text="Hi", url=stack.url)
    assert out.returncode == 1
    assert "failed: no room: try later" in out.stderr
    file = tmp_path / "x"
    file.write_bytes(b"abc\xff")
    out = tandem("submit", str(file), url=stack.url)
    assert (out.returncode, "byte 3" in out.stderr) == (2, True)


def serve(stack: Stack, port: int, **more: Any) -> subprocess.Popen[str]:
    settings = stack.config.model_copy(
        update={"api": stack.config.api.model_copy(update={"port": port, **more})}
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "scheduler.cli", "serve"],
        stderr=subprocess.PIPE, text=True,
        env=environment(TANDEM_RESOLVED=settings.model_dump_json()),
    )  # fmt: skip


def test_serve_answers_and_ends(stack: Stack) -> None:
    port = own_port()
    with serve(stack, port) as process:

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
            except httpx.TransportError:
                assert process.poll() is None, process.stderr
                return False

        eventually(answers, "the API does not answer")
        out = tandem("submit", "-", "--json", text="Hi", url=f"http://127.0.0.1:{port}/v1")
        assert json.loads(out.stdout)["status"] == "completed"
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0


def test_serve_says_why_it_cannot(stack: Stack) -> None:
    with serve(stack, stack.port) as process:
        assert process.wait(180) == 78
        assert process.stderr is not None
        assert "stop what uses it" in process.stderr.read().splitlines()[-1]
    with serve(stack, 0, host="0.0.0.0") as process:
        assert process.wait(180) == 78
        assert process.stderr is not None
        assert "api.token" in process.stderr.read().splitlines()[-1]
