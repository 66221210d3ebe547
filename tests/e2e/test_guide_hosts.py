"""Two hosts that are set up by the guide's commands alone, and live through what it promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from guide_kit import Command, commands
from model_dirs import make_tiny_model
from redis.exceptions import RedisError
from redis_kit import eventually

from scheduler.bench.hosts import Host, HostsFailed, TwoHosts, namespaces_work
from scheduler.bench.soak_load import Oracle, Tally
from scheduler.host.agent import Machine
from scheduler.nodes import Nodes
from scheduler.passwords import Passwords, with_password
from scheduler.redis_client import connect

ROOT = Path(__file__).parent.parent.parent
SOAK = bool(os.environ.get("TANDEM_SOAK"))
CUT_SECONDS = 30.0
#: Greedy, so that the oracle has one answer, and short, for a model of random weights.
SHORT = ("--temperature", "0", "--max-tokens", "16")
ROOMS = ("engine", "scheduler", "store", "transport", "worker_decode", "worker_prefill")


class Desk:
    """Both hosts, the guide's placeholders, and what its commands have printed."""

    def __init__(self, hosts: TwoHosts, model: Path) -> None:
        self.hosts = hosts
        self.oracle = Oracle(hosts.decode, model, Tally())
        self.join = ""
        self.responses: list[str] = []
        for host, names in ((hosts.decode, ("NAME", "OTHER")), (hosts.prefill, ())):
            models = host.directory / "models"
            models.mkdir()
            for name in names:
                shutil.copytree(model, models / name)
            host.environment["TANDEM_MODELS"] = str(models)
            host.environment["HOME"] = str(host.directory)
            (host.directory / "question.txt").write_text("Why is the sky blue? " * 12)

    def run(self, command: Command) -> None:
        """One command of the guide where it belongs."""
        hosts = [self.hosts.decode, self.hosts.prefill]
        if command.where != "both":
            hosts = [host for host in hosts if host.name == command.where]
        for host in hosts:
            self.on(host, command.text)

    def on(self, host: Host, text: str) -> str:
        text = text.replace("10.0.0.1", self.hosts.decode.address)
        text = text.replace("10.0.0.2", self.hosts.prefill.address)
        text = text.replace("STRING", self.join).replace("~", str(host.directory))
        if self.responses:
            text = text.replace("RESPONSE", self.responses[-1])
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', text)][1:]
        if words == ["up"]:
            host.up()
            return ""
        if words[0] == "doctor":
            return self.doctor(host)
        if words[:2] == ["service", "install"]:
            words.append("--no-start")  # there is no service manager in a namespace
        if words[0] == "restore":
            host.down()
        if words[0] == "model" and words[1] != "list":
            self.meet()
        if words[0] in ("submit", "resume", "jobs"):
            self.ready()
        if words[0] in ("submit", "resume"):
            words += SHORT
        printed = host.tandem(*words)
        if found := re.search(r"tandem1-\S+", printed):
            self.join = found[0]
        if words[0] in ("submit", "resume"):
            newest = json.loads(host.tandem("jobs", "--json"))["data"][0]["id"]
            assert newest not in self.responses
            self.responses.append(newest)
        return printed

    def doctor(self, host: Host) -> str:
        """Until nothing is to be put right, as the guide says; then nothing to improve either."""

        def green() -> str:
            self.said = json.loads(host.tandem("doctor", "--json", check=False))
            return json.dumps(self.said) if not self.said["counts"]["fail"] else ""

        self.ready()
        eventually(green, f"the doctor of {host.name} is not content", 120)
        named = {check["name"]: check for check in self.said["checks"]}
        for name in ("redis", "peer", "versions", "drift", "clock", "link address", "model"):
            assert named[name]["status"] == "ok", named[name]
        return ""

    @contextmanager
    def redis(self) -> Iterator[redis.Redis]:
        """The decode host's Redis over its socket, which needs no network."""
        (path,) = self.hosts.decode.runtime.glob("tandem-*/redis.sock")
        words = Passwords.read(self.hosts.decode.data / "secrets" / "redis")
        with connect(with_password(f"unix://{path}", words, "admin"), patience=0) as client:
            yield client

    def meet(self) -> None:
        """Wait until both machines take models."""

        def both() -> bool:
            with suppress(RedisError, ValueError), self.redis() as client:
                return len([one for one in Machine.all(client) if one.files]) == 2
            return False

        eventually(both, "the machines do not see each other", 240)

    def ready(self) -> None:
        """Wait until the workers that run now are ready, and the API answers."""

        def workers() -> bool:
            living = {*self.hosts.decode.pids(), *self.hosts.prefill.pids()}
            with suppress(RedisError, ValueError), self.redis() as client:
                nodes = Nodes(client).list()
                return {n.role for n in nodes if n.state == "ready" and n.pid in living} == {
                    "decode",
                    "prefill",
                }
            return False

        def answers() -> bool:
            with suppress(HostsFailed):
                return "data" in json.loads(self.hosts.decode.tandem("jobs", "--json"))
            return False

        eventually(workers, "the workers do not get ready", 240)
        eventually(answers, "the API does not answer", 240)

    def ask(self, text: str, previous: str = "") -> dict[str, object]:
        """One more turn by the command line, and what is known of it."""
        words = ["resume", previous, text] if previous else ["submit", "-"]
        printed = self.hosts.decode.tandem(*words, *SHORT, "--json", text=text)
        found: dict[str, object] = json.loads(printed)
        assert found["status"] in ("completed", "incomplete")
        self.responses.append(str(found["id"]))
        return found

    def path(self, found: dict[str, object]) -> str:
        return str(found["tandem"]["path"])  # type: ignore[index]

    def handed_off(self, found: dict[str, object]) -> bool:
        """Whether its state crossed the link."""
        handoff = found["tandem"].get("handoff")  # type: ignore[attr-defined]
        return bool(handoff) and handoff["path"] == "tcp"

    def check_answers(self) -> None:
        """Every answer so far equals that of one process without any cache."""
        texts = {}
        for ident in dict.fromkeys(self.responses):
            found = json.loads(self.hosts.decode.tandem("show", ident, "--json"))
            texts[ident] = found["output"][0]["content"][0]["text"]
        before = self.oracle.tally.checked
        self.oracle.check(texts)
        self.oracle.finish()
        assert self.oracle.tally.lost == []
        assert self.oracle.tally.wrong == []
        assert self.oracle.tally.checked - before == len(texts)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    if not namespaces_work():
        pytest.skip("two hosts need network namespaces: Linux, root and iproute2")
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    directory = Path(tempfile.mkdtemp(prefix="t-"))
    try:
        with TwoHosts(directory) as hosts:
            desk = Desk(hosts, model)
            try:
                yield desk
            except BaseException:
                print(hosts.decode.logs(), hosts.prefill.logs())
                raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="minutes of processes on two hosts: `make soak`")
def test_two_hosts_live_by_the_guide(desk: Desk) -> None:
    hosts = desk.hosts
    for command in commands():
        if command.where in ("decode", "prefill", "both"):
            desk.run(command)
    assert len(desk.responses) == 2
    desk.check_answers()

    # A power cut of one side, then of the other: jobs that were accepted are served.
    first = desk.ask("And at night?", desk.responses[-1])
    for host in (hosts.prefill, hosts.decode):
        waiting = hosts.decode.tandem("submit", "--no-wait", "-", *SHORT, text="Still there? " * 30)
        host.crash()
        host.up()
        desk.ready()
        desk.responses.append(re.findall(r"resp_[0-9a-f]{32}", waiting)[0])

        def ended(ident: str = desk.responses[-1]) -> bool:
            found = json.loads(hosts.decode.tandem("show", ident, "--json"))
            return found["status"] in ("completed", "incomplete")

        eventually(ended, f"a job is lost with {host.name}", 120)
        resumed = desk.ask("What was that?", str(first["id"]))
        assert desk.path(resumed) in ("restored", "recomputed", "hot")
    desk.check_answers()

    # A cable cut: the decode host prefills by itself, and hands off again when it is mended.
    hosts.cut()
    until = time.monotonic() + CUT_SECONDS
    alone = desk.ask("Is anybody there? " * 20)
    assert not desk.handed_off(alone)
    while time.monotonic() < until:
        desk.ask("Hello?", str(alone["id"]))
    hosts.mend()
    desk.ready()
    eventually(lambda: desk.handed_off(desk.ask("Are you back? " * 20)), "the link stays down", 120)
    desk.check_answers()

    # An update of one side, then of the other: told apart, and served all the while.
    newer = hosts.directory / "newer"
    for room in ROOMS:
        shutil.copytree(ROOT / room, newer / room, ignore=shutil.ignore_patterns("__pycache__"))
    protocol = newer / "transport" / "protocol.py"
    text = protocol.read_text()
    changed = re.sub(r"(?m)^PROTOCOL = (\d+)$", lambda m: f"PROTOCOL = {int(m[1]) + 1}", text)
    assert changed != text
    protocol.write_text(changed)
    hosts.prefill.down()
    hosts.prefill.environment["PYTHONPATH"] = str(newer)
    hosts.prefill.up()
    desk.ready()
    assert not desk.handed_off(desk.ask("Which version? " * 20))
    finding = {
        check["name"]: check
        for check in json.loads(hosts.prefill.tandem("doctor", "--json", check=False))["checks"]
    }["versions"]
    assert finding["status"] == "fail"
    assert "install the same Tandem" in finding["cure"]
    hosts.decode.down()
    hosts.decode.environment["PYTHONPATH"] = str(newer)
    hosts.decode.up()
    desk.ready()
    eventually(lambda: desk.handed_off(desk.ask("And now? " * 20)), "they do not meet again", 120)
    desk.check_answers()
