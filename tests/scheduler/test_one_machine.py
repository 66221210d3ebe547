"""What commands say on a machine that is set up alone, and where no Tandem runs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis

from scheduler.cli import main
from scheduler.command.demo_run import run_saying
from scheduler.config import load
from scheduler.host.agent import Machine
from scheduler.host.data_dir import Claim
from scheduler.serializer import pack


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of one machine, with one model of a few bytes."""
    for name in [n for n in os.environ if n.startswith("TANDEM_") or n == "REDIS_URL"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    file = tmp_path / "tandem.toml"
    file.write_text(f'data_dir = "{tmp_path}"\nmodels_dir = "{model.parent}"\n', encoding="utf-8")
    return file


def test_which_set_up_is_alone(here: Path) -> None:
    assert load(here).alone
    assert load(here, {"roles": ["prefill", "decode", "api"]}).alone
    for more in (
        {"roles": ["api", "decode"]},
        {"redis.url": "redis://127.0.0.1:1/0"},
        {"redis.listen": "127.0.0.1:6379"},
    ):
        assert not load(here, more).alone


def test_models_of_one_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(*words: str) -> tuple[int, str]:
        status = main(["model", *words, "--config", str(here)])
        return status, "".join(capsys.readouterr())

    status, text = say("list")
    assert (status, "small" in text, "there is no other machine" in text) == (0, True, True)
    assert "cable" not in text
    assert "(only" not in text
    status, text = say("push", "small")
    assert (status, "there is no other machine" in text) == (2, True)
    status, text = say("verify", "small")
    assert (status, "no other machine to compare with" in text) == (0, True)


def test_a_model_serves_only_where_a_machine_does_it(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    client: redis.Redis,
    redis_url: str,
) -> None:
    def say() -> tuple[str, dict[str, Any]]:
        assert main(["model", "list", "--config", str(here)]) == 0
        text = capsys.readouterr().out
        assert main(["model", "list", "--json", "--config", str(here)]) == 0
        return text, json.loads(capsys.readouterr().out)

    monkeypatch.setenv("TANDEM_MODEL", "small")
    text, told = say()
    assert text.split()[-1] == "configured"
    assert (told["configured"], told["serving"]) == ("small", "")
    monkeypatch.setenv("REDIS_URL", redis_url)
    machine = Machine("local", "here", 1, ("api", "decode", "prefill"), "small", "small")
    client.set("tandem:machine:local", pack(asdict(machine)))
    text, told = say()
    assert text.split()[-1] == "serves"
    assert told["serving"] == "small"


@pytest.mark.parametrize(
    "words", [["node", "list"], ["bottleneck"], ["history", "export", "x"], ["model", "use", "x"]]
)
def test_nothing_runs(here: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    command = [*words, "--config", str(here)]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem: no Tandem runs here: start it with `tandem up` (Redis: ")
    with Claim(here.parent):  # one that runs, whose Redis is away
        assert main(command) == 2
    assert "tandem: Redis does not answer (" in capsys.readouterr().err


def test_what_takes_long_says_that_it_goes_on(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = (
        "import os, sys, time\ntext = sys.stdin.read()\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
        "print(text * 2)\nsys.exit(3)\n"
    )
    done = run_saying([sys.executable, "-c", program], "ab", lambda _: seen.touch(), 0.2)
    assert (done.returncode, done.stdout, done.stderr) == (3, "abab\n", "")
