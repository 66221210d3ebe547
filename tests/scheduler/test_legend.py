"""Every name that a ledger can show has its sentence, and no sentence is of a name that is gone."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import scheduler
from scheduler import cli
from scheduler.command import explain
from scheduler.ledger import legend
from scheduler.ledger.account import LANES
from scheduler.ledger.clock import Clock
from scheduler.ledger.drawing import COLOURS
from scheduler.ledger.notes import PARTS, Notes, Piece
from worker_decode.timing import Loop, Watch

ROOT = Path(scheduler.__file__).parents[1]
ROOMS = ("scheduler", "worker_prefill", "worker_decode", "engine", "transport", "store")
#: What takes a name from its caller, and so writes none itself.
PASSES_ON = {"scheduler/ledger/notes.py"}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The source of the product, read once for all tests here."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
    }


@functools.cache
def named() -> list[tuple[str, ast.Call, str, str]]:
    """All calls of all modules but those that pass a name on, as `calls` gives them."""
    return [
        (where, *call)
        for where, tree in trees().items()
        if where not in PASSES_ON
        for call in calls(tree)
    ]


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Calls with their function's name and, of a method, the name of what it is called on."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            yield node, called.id, ""
        elif isinstance(called, ast.Attribute):
            on = called.value
            owner = on.id if isinstance(on, ast.Name) else getattr(on, "attr", "")
            yield node, called.attr, owner.lstrip("_")


def assigned(tree: ast.Module, name: str) -> ast.Dict:
    """The dictionary that a module gives a name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            assert isinstance(node.value, ast.Dict)
            return node.value
    raise AssertionError(f"no {name}")


def names_in(argument: ast.expr, tree: ast.Module, where: str) -> set[str]:
    """The names that an argument can be; fails for one that the source does not say."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return {argument.value}
    if isinstance(argument, ast.IfExp):
        return names_in(argument.body, tree, where) | names_in(argument.orelse, tree, where)
    if isinstance(argument, ast.Subscript) and isinstance(argument.value, ast.Name):
        values = assigned(tree, argument.value.id).values
        return set().union(*(names_in(value, tree, where) for value in values))
    raise AssertionError(f"{where}:{argument.lineno}: the name of {ast.unparse(argument)} is open")


def noted(method: str) -> set[str]:
    """Names that are given to a method of notes, anywhere in the source."""
    found: set[str] = set()
    for where, call, name, owner in named():
        if name == method and owner == "notes":
            assert call.args, f"{where}:{call.lineno}"
            found |= names_in(call.args[0], trees()[where], where)
    return found


def test_every_stage_has_its_sentence_and_no_other() -> None:
    account = "scheduler/ledger/account.py"
    between = [
        names_in(call.args[0], trees()[account], account)
        for call, name, owner in calls(trees()[account])
        if (name, owner) == ("add", "")
    ]
    stages = noted("stage") | noted("add") | set(PARTS).union(*between)
    assert {"tokenise", "hand off", "restore", "wire", "save", "wait", "first decode"} <= stages
    assert stages == legend.STAGES.keys()
    assert COLOURS.keys() <= stages, "a colour of a stage that is gone"


def test_notes_are_written_under_no_other_name() -> None:
    """A receiver that is not called `notes` would hide its names from this file."""
    for where, call, name, owner in named():
        times = len(call.args) >= 3 or any(isinstance(a, ast.Starred) for a in call.args)
        hidden = name in ("stage", "fork") or (name == "add" and owner and times)
        constant = bool(call.args) and isinstance(call.args[0], ast.Constant)
        assert not (hidden and constant) or owner == "notes", f"{where}:{call.lineno}"


def test_every_fork_and_every_count_of_work_has_its_sentence_and_no_other() -> None:
    assert noted("fork") == legend.FORKS.keys()
    again: set[str] = set()
    imports = {
        where
        for where, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "store.meter"
        if any(alias.name == "work" for alias in node.names)
    }
    for where, call, name, owner in named():
        if name == "work" and (owner == "meter" or (not owner and where in imports)):
            again |= names_in(call.args[0], trees()[where], where)
    assert "grammar_compiles" in again
    assert again == legend.AGAIN.keys()


def test_every_part_of_decoding_has_its_sentence_and_no_other() -> None:
    notes, loop = Notes(), Loop()
    watch, now = Watch(notes, loop), time.monotonic()
    watch.token(now + 1)
    loop.step(now + 1, now + 2, now + 3, 0.5, now + 4)
    watch.end(now + 5)
    piece = Piece.read("run", notes.packed(Clock()))
    assert piece is not None
    assert piece.spans()[-1].facts["of"].keys() == legend.DECODING.keys()
    assert set(LANES) == legend.LANES.keys()


def test_every_row_and_column_has_its_sentence_and_no_other() -> None:
    where = "scheduler/command/explain.py"
    tree = trees()[where]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    rows: set[str] = {name.replace("_", " ") for name in explain._DETAILS}
    for call, name, _ in calls(functions["_facts"]):
        first = call.args[0] if call.args else None
        if name == "add_row" and isinstance(first, ast.Constant):
            rows.add(str(first.value))
    texts = [
        str(call.args[0].value)
        for call, name, _ in calls(functions["_stages"])
        if name == "Text" and isinstance(call.args[0], ast.Constant)
    ]
    rows |= {text for text in texts if text.strip("█ ")}
    assert rows == legend.ROWS.keys()
    table = explain._stages({"stages": [], "remainder": {"gaps": [], "seconds": 0.0, "share": 0.0,
                                                         "within": True}})  # fmt: skip
    assert [column.header for column in table.columns] == list(legend.COLUMNS)


def test_sentences_are_sentences_and_each_is_said_once() -> None:
    texts = [text for names in legend.LEGEND.values() for text in names.values()]
    assert all(text[0].isupper() and text.endswith(".") for text in texts)
    assert len(set(texts)) == len(texts)


def test_the_legend_is_shown_without_asking_anybody(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = ["--url", "http://127.0.0.1:9"]
    assert cli.main(["explain", "--legend", *nobody]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for name, text in itertools.chain(*(names.items() for names in legend.LEGEND.values())):
        assert f"{name} {text}" in told
    assert cli.main(["explain", "--legend", "--json", *nobody]) == 0
    assert json.loads(capsys.readouterr().out) == legend.LEGEND
    assert cli.main(["explain", *nobody]) == 2
    assert "--legend" in capsys.readouterr().err
    picture = ["explain", "resp_1", "--legend", "--svg", "x.svg"]
    assert cli.main([*picture, *nobody]) == 2
    assert "a picture has no legend" in capsys.readouterr().err
