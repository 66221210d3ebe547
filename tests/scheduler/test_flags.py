"""The flags that commands share mean the same everywhere, and find the machine with the API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler import cli


def commands(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.Action]]:
    """Every action of every command, with the command's name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from commands(inner, f"{name} {word}".strip())
        else:
            yield name, action


def test_a_flag_of_one_name_has_one_meaning() -> None:
    parser, broken = cli.build_parser(bench=False)
    assert not broken
    helps: dict[str, dict[str, str]] = {"--config": {}, "--json": {}}
    for name, action in commands(parser):
        for flag, found in helps.items():
            if flag in action.option_strings:
                found[name] = str(action.help)
    assert helps["--config"].pop("init").startswith("file to write")
    (told,) = set(helps["--config"].values())
    assert "TANDEM_CONFIG" in told
    assert {"submit", "owners add", "model push", "service install"} <= set(helps["--config"])
    assert len({told for name, told in helps["--json"].items() if name != "demo"}) == 1


def test_every_argument_says_what_it_is() -> None:
    parser, _ = cli.build_parser(bench=False)
    ours = (
        "submit",
        "resume",
        "jobs",
        "show",
        "cancel",
        "serve",
        "up",
        "worker",
        "backup",
        "store",
    )
    for name, action in commands(parser):
        if name.split(" ")[0] in ours:
            assert action.help, f"{name}: {action.dest}"


def test_a_machine_without_an_api_names_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in [key for key in os.environ if key.startswith("TANDEM_") or key == "REDIS_URL"]:
        monkeypatch.delenv(variable)
    file = tmp_path / "tandem.toml"
    file.write_text('roles = ["prefill"]\nredis.url = "unix:///nowhere/redis.sock"\n')
    for words in (["jobs"], ["submit", os.devnull], ["explain", "resp_1"], ["conversations"]):
        assert cli.main([*words, "--config", str(file)]) == 2
        assert "no API runs on this machine, which does prefill" in capsys.readouterr().err
    # The one that is named is asked.
    assert cli.main(["jobs", "--config", str(file), "--url", "http://127.0.0.1:9"]) == 1
    monkeypatch.setenv("TANDEM_URL", "http://127.0.0.1:9")
    assert cli.main(["jobs", "--config", str(file)]) == 1
