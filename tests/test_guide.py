"""The guide for two Macs: no command without a test or a mark, no key or name that is not there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from guide_kit import GUIDE, Command, commands

from scheduler import cli
from scheduler.config import Config
from scheduler.doctor.run import cable_pairs

ROOT = GUIDE.parent.parent
ALL = commands()
OURS = [command for command in ALL if command.text.startswith("tandem ")]
#: Programs of macOS that the guide may ask for; nothing of them can be run here.
MAC = (
    "sw_vers", "rdma_ctl", "pmset", "fdesetup", "networksetup", "sysctl", "ssh", "tandem",
    "tmutil",
)  # fmt: skip


def name(command: Command) -> str:
    return re.sub(r"[^a-z-]+", " ", command.text.lower()).strip()[:40]


@pytest.mark.parametrize("command", OURS, ids=name)
def test_every_command_of_ours_is_one(command: Command) -> None:
    words = shlex.split(command.text)[1:]
    parser, broken = cli.build_parser(bench=False)
    assert not broken
    args = parser.parse_args(words)
    assert callable(args.run)


def test_what_cannot_run_here_is_marked() -> None:
    for command in ALL:
        program = command.text.removeprefix("sudo ").split()[0]
        if command.where == "mac-only":
            assert program in MAC, command
        elif command.where == "install":
            assert " ".join(command.text.split()[1:]) in " ".join(
                (ROOT / "Makefile").read_text().split()
            ).replace("-e '.[dev]'", "-e .").replace("--quiet ", "").replace("$(VENV)", ".venv"), (
                f"`make` installs in another way: {command}"
            )
        else:
            assert program == "tandem", f"not run by a test and not marked: {command}"


def test_every_setting_that_is_named_exists() -> None:
    text = GUIDE.read_text()
    sections = set(Config.model_fields)
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)(?:`| =)", text):
        if section in sections:
            model = Config.model_fields[section].annotation
            assert key in getattr(model, "model_fields", {}), f"{section}.{key}"
    assert "upkeep.low_disk_gb" in text


def test_the_cable_map_of_the_guide_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    table = json.loads(block)
    assert [table[0][0], table[1][1]] == [None, None]
    (tmp_path / "map.json").write_text(block)
    config = Config(link={"devices": str(tmp_path / "map.json")})
    assert cable_pairs(config) == [("rdma_en2", "rdma_en2"), ("rdma_en3", "rdma_en3")]


def test_every_file_that_is_named_is_here() -> None:
    assert "SOAK.md" in GUIDE.read_text()
    assert (GUIDE.parent / "SOAK.md").read_text().startswith("# Soak")
