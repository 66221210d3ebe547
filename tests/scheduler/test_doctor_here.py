"""What the doctor says of what should run on this machine: frozen, ended, awaited, well."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_kit import Server

from scheduler import cli
from scheduler.config import Config
from scheduler.doctor import here, machine
from scheduler.doctor.capture import Output
from scheduler.doctor.finding import Check
from scheduler.doctor.here import Process, Running
from scheduler.doctor.run import examine
from scheduler.host.agent import Agent, api_key
from scheduler.host.data_dir import Claim
from scheduler.nodes import Node
from scheduler.redis_client import connect
from scheduler.serializer import pack

ALL = ("api", "prefill", "decode")
PS = """\
    1     0 S    /sbin/init
  100     1 Ss   /opt/x/bin/python /opt/x/bin/tandem up
  101   100 Sl   /opt/x/bin/python -P -m scheduler.host.redis_server
  102   100 T    /opt/x/bin/python -P -m worker_decode
  103   100 Z    [python] <defunct>
  104   100 Sl   /opt/x/bin/python -P -m scheduler.cli serve
  105   100 SN   nice -n 10 /opt/x/bin/python -P -m scheduler.cli store check --json
  106     1 Sl   /opt/y/bin/python -P -m worker_prefill
"""
WELL = {role: Process(n, stopped=False) for n, role in enumerate(ALL)}
READY = {"ready": True, "redis": True, "store": True, "prefill": True, "decode": True}


def node(role: Any, pid: int, state: Any = "ready", name: str = "local") -> Node:
    return Node(role, name, state=state, pid=pid, host=socket.gethostname())


# --- judging --------------------------------------------------------------------------------------


def test_the_processes_of_the_stack_are_its_children_alone() -> None:
    assert here.children(100, Output(PS)) == {
        "redis": Process(101, stopped=False),
        "decode": Process(102, stopped=True),
        "api": Process(104, stopped=False),
    }
    assert here.children(7, Output(PS)) is None  # of another system that shares the directory
    assert here.children(100, None) is None
    assert here.children(None, Output(PS)) is None


@pytest.mark.parametrize(
    ("found", "children", "answers", "status", "words"),
    [
        (node("decode", 2), WELL, True, "ok", "it is ready"),
        (node("decode", 2), None, True, "ok", "it is ready"),
        (node("decode", 2, "starting"), WELL, True, "warn", "it is starting"),
        (None, WELL, True, "fail", "has not reported for seconds"),
        (None, None, True, "fail", "has not reported for seconds"),
        (node("decode", 2), {}, True, "fail", "it has ended"),
        (node("decode", 9), WELL, True, "fail", "has been started anew"),
        (node("decode", 2), {"decode": Process(2, True)}, True, "fail", "kill -CONT 2"),
        (None, {"decode": Process(2, True)}, False, "fail", "kill -CONT 2"),
        (None, WELL, False, "skip", "Redis does not answer"),
    ],
)
def test_a_worker(
    found: Node | None, children: Any, answers: bool, status: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "decode.log").write_text("loading\nno memory is left\n")
    check = here.worker("decode", found, Running(5, ALL, children, tmp_path), answers)
    assert check.status == status, check
    assert words in f"{check.finding} {check.evidence} {check.cure}"
    assert (status in ("warn", "fail")) == bool(check.cure)
    if status == "fail" and "SIGSTOP" not in check.evidence:
        assert "its log ends: no memory is left" in check.evidence
        assert "tandem service logs decode" in check.cure


def test_what_is_no_part_of_this_machine_and_what_does_not_run() -> None:
    assert here.worker("decode", None, Running(5, ("prefill",)), True).status == "skip"
    assert here.api(None, Running(5, ("prefill",)), ()).status == "skip"
    nothing = Running(None, ALL)
    for check in (
        here.worker("decode", None, nothing, False), here.api(None, nothing, ())
    ):  # fmt: skip
        assert (check.status, check.finding) == ("skip", here.NOT_RUNNING)
    check = here.up(nothing)
    assert (check.status, check.finding) == ("skip", "not running")
    assert "tandem up" in check.cure
    # `tandem worker decode` runs one worker without a stack.
    assert here.worker("decode", node("decode", 9), nothing, True).status == "ok"


@pytest.mark.parametrize(
    ("found", "nodes", "status", "words"),
    [
        (READY, [], "ok", "nothing is missing"),
        ({"problem": "timed out"}, [], "fail", "gives no answer"),
        ({"problem": "timed out", "lives": True}, [], "fail", "a part that it asks hangs"),
        ({**READY, "ready": False, "prefill": False, "missing": ["no prefill"]}, [], "warn",
         "no prefill"),
        ({**READY, "ready": False, "decode": False, "missing": ["no decode"]}, [], "fail",
         "no request is served"),
        ({**READY, "ready": False, "decode": False}, [node("decode", 2, "starting")], "warn",
         "wait until the model is loaded"),
        (None, [], "skip", "not known"),
    ],
)  # fmt: skip
def test_the_api(found: Any, nodes: list[Node], status: str, words: str, tmp_path: Path) -> None:
    check = here.api(found, Running(5, ALL, WELL, tmp_path), nodes)
    assert check.status == status, check
    assert words in f"{check.finding} {check.evidence} {check.cure}"


def test_an_api_that_is_stopped_is_not_waited_for_in_vain() -> None:
    stopped = Running(5, ALL, {"api": Process(8, stopped=True)})
    assert "kill -CONT 8" in here.api({"problem": "timed out"}, stopped, ()).cure
    redis_stopped = Running(5, ALL, {"redis": Process(8, stopped=True)})
    assert "kill -CONT 8" in here.redis_away(redis_stopped, "here", "timed out").cure
    ended = here.redis_away(Running(5, ALL, {}), "here", "refused")
    assert (ended.status, "refused" in ended.evidence) == ("fail", True)


# --- asking ---------------------------------------------------------------------------------------


class Api(BaseHTTPRequestHandler):
    """Answers /health, and /ready with what the server was given; hangs up where that is None."""

    def do_GET(self) -> None:
        told = {"ok": True} if self.path == "/health" else self.server.ready  # type: ignore[attr-defined]
        if told is None:
            self.close_connection = True
            return
        body = json.dumps(told).encode()
        self.send_response(200 if told.get("ready", True) else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(ready: dict[str, Any] | None) -> Iterator[str]:
    """URL of an API."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        server.ready = ready  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_asking_an_api(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"ready": False, "missing": ["no decode worker is ready"]}
    for told in (READY, missing):
        with answering(told) as url:
            assert here.ask_api(url) == told
    with answering(None) as url:
        found = here.ask_api(url)
        assert found["lives"]
        assert f"{url}/ready: " in found["problem"]
    monkeypatch.setattr(here, "API_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # connects, and answers nobody
        found = here.ask_api(f"http://127.0.0.1:{frozen.getsockname()[1]}")
    assert not found["lives"]
    assert "/health: timed out" in found["problem"]


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


class Here:
    """A machine whose `tandem up` is this process, and whose workers only report."""

    def __init__(self, config: Config, client: redis.Redis, stack: ExitStack) -> None:
        self.config, self.client, self.stack = config, client, stack

    def start(self, role: str) -> subprocess.Popen[bytes]:
        """A process that looks like the role's in a list of processes, and has reported."""
        module = here.MODULES[role]
        process = subprocess.Popen(
            [sys.executable, "-c", "input()", "-m", *module], stdin=subprocess.PIPE
        )
        self.stack.callback(self._end, process)
        if role != "api":
            self.report(node(role, process.pid))
        return process

    def report(self, one: Node) -> None:
        self.client.set(one.key, pack(asdict(one)))

    def checks(self) -> dict[str, Check]:
        return {check.name: check for check in examine(self.config, self.config.data_dir)}

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()


@pytest.fixture
def machine_here(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    for name in [n for n in os.environ if n.startswith("TANDEM_") or n == "REDIS_URL"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "survey", lambda _: {"error": "not asked"})
    monkeypatch.setattr(here, "API_SECONDS", 20.0)
    place = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place)
        client = stack.enter_context(connect(server.url, patience=0))
        client.flushdb()
        config = Config(data_dir=place / "data", redis={"url": server.url})
        url = stack.enter_context(answering(READY))
        client.set(api_key("local"), url)
        config.data_dir.mkdir(mode=0o700)
        yield Here(config, client, stack)


def test_a_frozen_worker_fails_at_once_and_is_named_with_its_cure(machine_here: Here) -> None:
    machine_here.stack.enter_context(Claim(machine_here.config.data_dir))
    prefill, decode, api = (machine_here.start(role) for role in ("prefill", "decode", "api"))
    found = machine_here.checks()
    for name in ("tandem up", "prefill worker", "decode worker", "api"):
        assert found[name].status == "ok", found[name]
    for process, name in ((prefill, "prefill worker"), (decode, "decode worker"), (api, "api")):
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        found = machine_here.checks()
        assert found[name].status == "fail"
        assert found[name].cure.endswith(f"`kill -CONT {process.pid}`")
    assert found["serving"].status == "skip"
    assert "prefill worker" in found["serving"].finding


def test_a_worker_that_was_killed_fails_while_its_entry_still_lives(machine_here: Here) -> None:
    machine_here.stack.enter_context(Claim(machine_here.config.data_dir))
    machine_here.start("prefill")
    decode = machine_here.start("decode")
    decode.kill()
    decode.wait()
    found = machine_here.checks()
    assert (found["decode worker"].status, found["prefill worker"].status) == ("fail", "ok")
    assert found["store health"].status == "warn"
    again = machine_here.start("decode")
    machine_here.report(node("decode", decode.pid))
    assert str(again.pid) in machine_here.checks()["decode worker"].evidence
    machine_here.client.delete(node("decode", 0).key)
    assert "has not reported" in machine_here.checks()["decode worker"].finding


def test_each_machine_answers_for_its_own_roles(machine_here: Here) -> None:
    config = machine_here.config
    machine_here.stack.enter_context(Claim(config.data_dir))
    agent = Agent(config, frozenset({"prefill"}), None)  # of `tandem up --only prefill`
    agent._tell(machine_here.client)
    machine_here.start("prefill")
    found = machine_here.checks()
    assert found["prefill worker"].status == "ok"
    assert (found["decode worker"].status, found["api"].status) == ("skip", "skip")
    assert found["peer"].status == "warn"  # no decode worker has reported
    # Another machine, whose `tandem up` tells that it runs a worker which is silent.
    machine_here.report(replace(node("decode", 1), name="b", boot="x"))
    Agent(config.model_copy(update={"node": "c"}), frozenset({"prefill"}), None)._tell(
        machine_here.client
    )
    found = machine_here.checks()
    assert (found["peer"].status, "prefill c" in found["peer"].finding) == ("warn", True)


def test_where_nothing_runs_the_doctor_says_so_plainly(
    machine_here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = machine_here.start("decode")
    decode.kill()
    decode.wait()
    config = machine_here.config
    file = config.data_dir / "tandem.toml"
    file.write_text(
        f'data_dir = "{config.data_dir}"\nmodels_dir = "{config.data_dir}"\n'
        f'model = "{config.data_dir}"\n[redis]\nurl = "{config.redis.url}"\n'
    )
    cli.main(["doctor", "--config", str(file)])
    text = capsys.readouterr().out
    assert "not running" in text
    assert "cure: run `tandem up`" in text
    assert "ok    decode worker" not in text
    assert "ok    serving" not in text


def test_a_silent_worker_stays_in_the_list_of_nodes(
    machine_here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    config = machine_here.config
    Agent(config, frozenset(ALL), None)._tell(machine_here.client)
    machine_here.report(node("decode", 1))
    file = config.data_dir / "tandem.toml"
    file.write_text(f'data_dir = "{config.data_dir}"\n[redis]\nurl = "{config.redis.url}"\n')
    assert cli.main(["node", "list", "--json", "--config", str(file)]) == 0
    rows = json.loads(capsys.readouterr().out)["nodes"]
    states = {(row["role"], row["name"]): row["state"] for row in rows}
    assert states == {("decode", "local"): "ready", ("prefill", "local"): "away"}
