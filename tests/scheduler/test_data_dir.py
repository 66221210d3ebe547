"""The data directory belongs to one stack; what cannot be used is named."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.config import Config, ConfigError, load
from scheduler.host import data_dir
from scheduler.host.data_dir import Claim


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    # pytest's own directories may be too long for a socket's name.
    with tempfile.TemporaryDirectory(prefix="d-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Config(data_dir=tmp_path / "data")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_made_for_this_user_only(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.model_copy(update={"data_dir": tmp_path / "Größe & mehr" / "data"})
    old = os.umask(0)
    try:
        data_dir.prepare(config)
        with Claim(config.data_dir) as claim:
            assert mode(claim.path) == 0o600
    finally:
        os.umask(old)
    for path in (config.data_dir, config.data_dir / "logs", config.runtime_dir):
        assert mode(path) == 0o700
    data_dir.prepare(config)


def test_a_users_own_directory_keeps_its_mode_and_ours_do_not(config: Config) -> None:
    for path in (config.data_dir, config.data_dir / "logs", config.runtime_dir):
        path.mkdir()
        path.chmod(0o755)
    data_dir.prepare(config)
    assert mode(config.data_dir) == 0o755
    assert mode(config.data_dir / "logs") == mode(config.runtime_dir) == 0o700


def test_a_file_in_the_way(config: Config, tmp_path: Path) -> None:
    config.data_dir.write_text("mine")
    for use in (lambda: data_dir.prepare(config), lambda: Claim(config.data_dir)):
        with pytest.raises(ConfigError, match=r"data cannot be used: File exists.*--data"):
            use()
    inside = config.model_copy(update={"data_dir": config.data_dir / "below"})
    with pytest.raises(ConfigError, match="Not a directory"):
        data_dir.prepare(inside)
    assert config.data_dir.read_text() == "mine"


def test_a_directory_in_the_way_of_the_lock(config: Config) -> None:
    (config.data_dir / "tandem.lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be used: Is a directory"):
        Claim(config.data_dir)


def test_a_link_in_the_way_of_the_runtime_directory(config: Config, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    config.runtime_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link: remove it"):
        data_dir.prepare(config)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a directory away")
def test_somebody_elses_directory(config: Config) -> None:
    config.runtime_dir.mkdir()
    os.chown(config.runtime_dir, 12345, 12345)
    with pytest.raises(ConfigError, match="not a directory of this user"):
        data_dir.prepare(config)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission(config: Config) -> None:
    config.data_dir.mkdir()
    config.data_dir.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        data_dir.prepare(config)


@pytest.mark.parametrize("node", ["local", "a-node-with-quite-a-long-name"])
def test_sockets_whose_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    config = Config(data_dir=tmp_path / "data", node=node)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "r" * 70)
    longest = max(len(os.fsencode(p)) for p in (config.redis_socket, config.store_socket))
    base = "/tmp/" + "x" * (65 - (longest - data_dir.MAX_SOCKET))
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    longest = max(len(os.fsencode(p)) for p in (config.redis_socket, config.store_socket))
    assert longest == data_dir.MAX_SOCKET - 1
    monkeypatch.setenv("XDG_RUNTIME_DIR", base + "yy")
    with pytest.raises(ConfigError, match=r"too long for a socket.*XDG_RUNTIME_DIR"):
        data_dir.prepare(config)
    assert not config.data_dir.exists()


def test_one_stack_at_a_time(config: Config) -> None:
    script = (
        "import sys; from pathlib import Path; from scheduler.host.data_dir import Claim\n"
        "Claim(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(config.data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(ConfigError, match=rf"in use .*process {other.pid}\): .*--data"):
            Claim(config.data_dir)
        other.kill()
        other.wait()
    with Claim(config.data_dir) as claim:
        assert claim.path.read_text() == f"{os.getpid()}\n"
        claim.release()
        with Claim(config.data_dir):
            pass


def test_a_worker_is_told_in_one_line(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.data_dir.write_text("in the way")
    monkeypatch.setenv("TANDEM_DATA", str(config.data_dir))
    assert load().data_dir == config.data_dir
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "worker_prefill"], capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 78
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "cannot be used: File exists" in lines[0]
