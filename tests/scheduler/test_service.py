"""The service files that are generated, and logs that are turned over while they are written."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from redis_kit import eventually

from scheduler import cli
from scheduler.config import Config
from scheduler.host import logs, service
from scheduler.host.data_dir import Claim, owner

PLAN = service.Plan(
    config=Path('/Users/me/My "Data" $HOME/100%/tandem.toml'),
    data=Path("/Users/me/Library/Application Support/tandem"),
    drain_seconds=20,
    python=Path("/Users/me/tandem/.venv/bin/python"),
)


def test_a_launchd_agent() -> None:
    found = plistlib.loads(service.plist(PLAN))
    assert found["Label"] == service.LABEL
    assert found["ProgramArguments"] == [
        str(PLAN.python), "-P", "-m", "scheduler.cli", "up", "--config", str(PLAN.config),
    ]  # fmt: skip
    assert found["RunAtLoad"] is True
    assert found["KeepAlive"] is True
    assert found["ExitTimeOut"] >= PLAN.drain_seconds + 70  # a drain, then states are written
    assert found["ProcessType"] == "Interactive"
    assert found["StandardOutPath"] == found["StandardErrorPath"] == str(PLAN.log)
    assert found["SoftResourceLimits"]["NumberOfFiles"] >= 1024
    assert found["EnvironmentVariables"]["PATH"].startswith(str(PLAN.python.parent))
    assert found["Umask"] == 0o077
    assert "UserName" not in found


def test_a_launchd_daemon_runs_as_the_user() -> None:
    assert plistlib.loads(service.plist(PLAN, "me"))["UserName"] == "me"


def test_a_systemd_unit_passes_its_own_check(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not here")
    data = tmp_path / "My %Data"
    data.mkdir()
    plan = service.Plan(data / 'a "b" $c.toml', data, 20, Path(sys.executable))
    path = tmp_path / service.UNIT
    path.write_text(service.unit(plan))
    done = subprocess.run([tool, "verify", "--man=no", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert service.UNIT not in done.stderr
    broken = tmp_path / "broken.service"
    broken.write_text(service.unit(plan).replace("Type=exec", "Type=nonsense"))
    done = subprocess.run([tool, "verify", "--man=no", broken], capture_output=True, text=True)
    assert "nonsense" in done.stderr


def test_a_systemd_unit_quotes_what_systemd_would_replace() -> None:
    text = service.unit(PLAN)
    assert r'"/Users/me/My \"Data\" $$HOME/100%%/tandem.toml"' in text
    assert "KillMode=mixed" in text  # the supervisor drains; systemd must not stop its children
    assert f"TimeoutStopSec={PLAN.stop_seconds}" in text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with nothing but an initialised data directory."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    monkeypatch.setenv("TANDEM_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_install_status_and_uninstall(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["service", "install", "--no-start"]) == 2
    assert "run `tandem init` first" in capsys.readouterr().err
    assert cli.main(["init", "--role", "both"]) == 0
    assert cli.main(["service", "install", "--no-start"]) == 0
    path = service.place()
    assert str(home) in str(path)
    assert path.stat().st_mode & 0o077 == 0
    assert str(home / "data" / "tandem.toml") in path.read_text()
    capsys.readouterr()
    assert cli.main(["service", "status", "--json"]) == 1  # nothing runs
    found = json.loads(capsys.readouterr().out)
    assert found["installed"] == str(path)
    assert found["running"] is False
    with Claim(home / "data"):
        assert owner(home / "data") == os.getpid()
        assert cli.main(["service", "status"]) == 0
        assert f"yes, process {os.getpid()}" in capsys.readouterr().out
    assert owner(home / "data") is None
    assert cli.main(["service", "uninstall"]) == 0
    assert not path.exists()
    assert (home / "data" / "tandem.toml").exists()
    assert cli.main(["service", "uninstall"]) == 2


@pytest.mark.skipif(sys.platform == "darwin", reason="systemd")
def test_without_a_users_systemd_the_cure_is_named(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = home / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert cli.main(["init", "--role", "both"]) == 0
    assert cli.main(["service", "install"]) == 2
    said = capsys.readouterr().err
    for words in ("No medium found", "written and stays", "enable-linger", "XDG_RUNTIME_DIR"):
        assert words in said
    assert service.place().exists()


LAUNCHCTL = """\
#!/bin/sh
echo "$1 $2" >> {folder}/calls
case $1 in
  print) test -e {folder}/loaded && mv {folder}/loaded {folder}/gone ;;
  bootstrap)
    test -e {folder}/nobody || exit 0
    echo "Bootstrap failed: 125: no domain" >&2
    exit 125 ;;
esac
"""


@pytest.fixture
def mac(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same user on a system that says it is macOS; launchctl notes how it is called.

    While `loaded` lies beside it, it once answers that the service is there; with `nobody`, that no
    user is logged in at the screen.
    """
    tool = home / "bin" / "launchctl"
    tool.parent.mkdir()
    tool.write_text(LAUNCHCTL.format(folder=tool.parent))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(service, "DAEMON", home / "daemon.plist")
    return tool.parent


def test_an_agent_takes_the_place_of_an_earlier_one(
    mac: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--role", "both"]) == 0
    (mac / "loaded").touch()
    assert cli.main(["service", "install"]) == 0
    domain = f"gui/{os.getuid()}"
    ours = f"{domain}/{service.LABEL}"
    # launchd refuses a second service of the same name, so the first must be gone.
    assert (mac / "calls").read_text().splitlines() == [
        f"bootout {ours}", f"print {ours}", f"print {ours}", f"bootstrap {domain}",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "local network" not in said  # one machine asks no other
    (mac / "nobody").touch()
    assert cli.main(["service", "install"]) == 2
    assert "use --system" in capsys.readouterr().err


def test_an_agent_of_one_machine_of_two_must_be_allowed_to_reach_the_other(
    mac: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--role", "decode", "--link", "127.0.0.1"]) == 0
    assert cli.main(["service", "install"]) == 0
    assert "Local Network" in capsys.readouterr().out


def test_a_daemon_is_seen_and_left_to_root(mac: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--role", "both"]) == 0
    assert cli.main(["service", "install", "--system"]) == 0
    assert f"sudo launchctl bootstrap system {service.DAEMON}" in capsys.readouterr().out
    service.DAEMON.touch()
    cli.main(["service", "status"])
    assert f"installed  {service.DAEMON}" in capsys.readouterr().out
    assert (mac / "calls").read_text() == f"print system/{service.LABEL}\n"
    assert cli.main(["service", "uninstall"]) == 0
    assert f"sudo launchctl bootout system/{service.LABEL}" in capsys.readouterr().out
    assert service.DAEMON.exists()


def test_logs_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["init", "--role", "both"])
    folder = Config(data_dir=home / "data").data_dir / "logs"
    assert cli.main(["service", "logs"]) == 0
    assert f"no logs yet in {folder}" in capsys.readouterr().err
    folder.mkdir()
    (folder / "api.log").write_text("one\ntwo\n")
    capsys.readouterr()
    assert cli.main(["service", "logs", "api", "-n", "1"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert cli.main(["service", "logs"]) == 0
    assert capsys.readouterr().out == "api      one\napi      two\n"
    assert cli.main(["service", "logs", "redis"]) == 2
    assert "there are api" in capsys.readouterr().err


def test_a_log_is_turned_over_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        for round_ in range(5):
            writer.write(b"%d" % round_ * 101 + b"\n")
            assert logs.turn_over(path, 100, 2)
            assert path.stat().st_size == 0
        writer.write(b"now\n")
        assert not logs.turn_over(path, 100, 2)
    assert path.read_bytes() == b"now\n"
    earlier = [(tmp_path / f"a.log.{n}").read_bytes()[:1] for n in (1, 2)]
    assert earlier == [b"4", b"3"]
    assert not (tmp_path / "a.log.3").exists()
    assert (tmp_path / "a.log.1").stat().st_mode & 0o077 == 0
    assert not logs.turn_over(tmp_path / "none.log")


def test_following_goes_on_after_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")
    lines = logs.follow([path], wait=0.01)
    seen: list[str] = []

    def read() -> None:
        for _, line in lines:
            seen.append(line)
            if line == "after":
                return

    def written(line: str) -> bool:
        with path.open("a") as file:
            file.write(f"{line}\n")
        time.sleep(0.05)
        return line in seen

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    # It begins at the end, which it may not have seen yet.
    eventually(lambda: written("first"), "nothing is followed")
    os.truncate(path, 0)
    eventually(lambda: written("after"), "what comes after the turn is not followed")
    reader.join(60)
    assert not reader.is_alive()
    assert "before" not in seen
