"""The `tandem` command itself: entry points, errors, exit statuses."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler import cli
from scheduler.config import ConfigError
from store.paths import store_dir
from store.store import Store


class Entry:
    """An entry point of a test."""

    def __init__(self, group: str, name: str, load: Callable[[], Any]) -> None:
        self.group, self.name, self._load = group, name, load

    def load(self) -> Any:
        return self._load()


def command(name: str, run: Callable[[argparse.Namespace], int]) -> Callable[[Any], None]:
    def register(subparsers: Any) -> None:
        parser = subparsers.add_parser(name, help=f"the {name} command")
        parser.set_defaults(run=run)

    return register


def fail(error: Exception) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


def broken() -> Any:
    raise ImportError("no module named fancy")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    found: list[Entry] = []
    monkeypatch.delenv("TANDEM_DEBUG", raising=False)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [entry for entry in found if entry.group == group],
    )
    return found


def test_commands_come_from_entry_points(
    entries: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    entries.append(Entry(cli.COMMANDS, "good", lambda: command("good", lambda _: 7)))
    entries.append(Entry(cli.COMMANDS, "bad", broken))
    assert cli.main(["good"]) == 7
    assert cli.main(["bad"]) == 1
    assert "'bad' cannot be loaded: ImportError: no module named fancy" in capsys.readouterr().err
    with pytest.raises(SystemExit) as help_exit:
        cli.main(["--help"])
    assert help_exit.value.code == 0
    text = capsys.readouterr().out
    assert "the good command" in text
    assert "bad: ImportError" in text
    assert "tandem submit question.txt" in text


def test_benchmarks_are_loaded_only_when_asked_for(
    entries: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    loads: list[str] = []

    def load() -> Any:
        loads.append("x")
        return command("speed", lambda _: 0)

    entries.append(Entry(cli.COMMANDS, "good", lambda: command("good", lambda _: 0)))
    entries.append(Entry(cli.BENCHES, "speed", load))
    entries.append(Entry(cli.BENCHES, "slow", broken))
    assert cli.main(["good"]) == 0
    assert loads == []
    assert cli.main(["bench", "speed"]) == 0
    assert loads == ["x"]
    assert "benchmark 'slow' cannot be loaded" in capsys.readouterr().err
    assert cli.main(["bench"]) == 2
    assert "speed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("api.port = 'x' is not accepted"), 2, "api.port = 'x' is not accepted"),
        (ValueError("odd\nsecond line"), 1, "ValueError: odd"),
        (RuntimeError(), 1, "RuntimeError"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line(
    entries: list[Entry],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    line: str,
) -> None:
    entries.append(Entry(cli.COMMANDS, "x", lambda: command("x", fail(error))))
    assert cli.main(["x"]) == status
    assert capsys.readouterr().err == (f"tandem: {line}\n" if line else "")


def test_debug_shows_the_traceback(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    entries.append(Entry(cli.COMMANDS, "x", lambda: command("x", fail(ValueError("odd")))))
    monkeypatch.setenv("TANDEM_DEBUG", "1")
    with pytest.raises(ValueError, match="odd"):
        cli.main(["x"])


def test_bad_usage_and_no_command(entries: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as wrong:
        cli.main(["nonsense"])
    assert wrong.value.code == 2
    assert cli.main([]) == 2
    assert "usage: tandem" in capsys.readouterr().out


def test_the_installed_command() -> None:
    out = subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in ("submit", "resume", "jobs", "show", "cancel", "serve", "bench"):
        assert name in out.stdout
    version = subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.startswith("tandem ")


def test_what_is_measured_is_what_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [key for key in os.environ if key.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tandem.toml").write_text(f'model = "glm"\nmodels_dir = "{tmp_path}/models"\n')
    seen: list[str] = []
    for command in ("calibrate", "profile"):
        module = "engine.calibrate" if command == "calibrate" else "engine.profile_command"
        monkeypatch.setattr(f"{module}.run", lambda args: seen.append(args.model) or 0)
        assert cli.main([command]) == 0
        assert cli.main([command, "--model", "another"]) == 0
    assert seen == ["glm", "another"] * 2
    # Found where the configuration has models, which the engine does not read.
    (tmp_path / "models" / "glm").mkdir(parents=True)
    assert cli.main(["profile"]) == 0
    assert seen[-1] == str(tmp_path / "models" / "glm")


def test_the_store_that_is_asked_is_the_one_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [key for key in os.environ if key.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "usual"))
    monkeypatch.chdir(tmp_path)
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other, tmp_path / "usual" / "tandem"):
        Store.open(store_dir(folder), 64 << 20).close()

    def asked(*words: str) -> str:
        assert cli.main(["store", "stats", "--json", *words]) == 0
        return str(json.loads(capsys.readouterr().out)["path"])

    assert asked() == str(store_dir(tmp_path / "usual" / "tandem"))
    file = tmp_path / "of-mine.toml"
    file.write_text(f'data_dir = "{mine}"\n')
    assert asked("--config", str(file)) == str(store_dir(mine))
    monkeypatch.setenv("TANDEM_CONFIG", str(file))
    assert asked() == str(store_dir(mine))
    assert asked("--data", str(other)) == str(store_dir(other))
    # One that keeps nothing does not look into whatever lies in the usual place.
    file.write_text(f'data_dir = "{mine}"\nroles = ["prefill"]\n')
    assert cli.main(["store", "stats"]) == 2
    assert "no store lies on this machine, which does prefill" in capsys.readouterr().err
    assert asked("--data", str(mine)) == str(store_dir(mine))
