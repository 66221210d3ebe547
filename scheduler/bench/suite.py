"""`tandem bench` without a name: every benchmark in one run, held to the path it meant to take.

Each runs in a process of its own, so that no figure depends on what ran before it. A benchmark
that took another path than it meant to has measured something else, and fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.bench import history
from scheduler.command.flags import config_flags, config_of, json_flag
from scheduler.record import JobError

#: No benchmark takes so long; one that hangs must not hang the others.
LIMIT = 1200.0


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the whole run."""
    parser.add_argument("--only", metavar="NAMES", help="these benchmarks, by commas")
    parser.add_argument(
        "--full", action="store_true", help="each as long as by itself (default: shortened)"
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE",
        help=f"where runs are kept and compared (default: {history.FILE} in the data directory)",
    )  # fmt: skip
    parser.add_argument("--no-history", action="store_true", help="neither compare nor keep")
    config_flags(parser)
    json_flag(parser)


def run(args: argparse.Namespace, benches: Mapping[str, argparse.ArgumentParser]) -> int:
    """Run all of `benches` that take part; returns 1 where one failed, 2 without any, else 0."""
    chosen = choose(benches, args.only)
    if not chosen:
        print("tandem: no benchmark takes part in a whole run", file=sys.stderr)
        return 2
    kept = None if args.no_history else args.history
    if kept is None and not args.no_history:
        kept = config_of(args).data_dir / history.FILE
    before = history.last(kept) if kept is not None else {}
    console = Console(stderr=True, highlight=False)
    results: dict[str, dict[str, Any]] = {}
    for name, quick in chosen.items():
        console.print(f"{name} ...", end=" ")
        began = time.monotonic()
        results[name] = one(name, () if args.full else quick)
        told = "" if results[name]["ok"] else f", failed: {results[name]['error']}"
        console.print(f"{time.monotonic() - began:.0f} s{told}", markup=False)
    done = history.entry(results)
    change = history.changes(results, before)
    if kept is not None:
        history.append(kept, done)
    if args.json:
        print(json.dumps({**done, "changes": change}))
    else:
        table(results, change, before)
    return 0 if all(result["ok"] for result in results.values()) else 1


def choose(
    benches: Mapping[str, argparse.ArgumentParser], only: str | None
) -> dict[str, list[str]]:
    """The benchmarks of a run, and the arguments that shorten them.

    A benchmark takes part when its parser has a default `quick`, the list of these arguments.
    Raises JobError for a name that is none.
    """
    able = {
        name: list(quick)
        for name, parser in benches.items()
        if (quick := parser.get_default("quick")) is not None
    }
    if only is None:
        return able
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in able:
            raise JobError(f"no benchmark {name!r} takes part: choose from {', '.join(able)}")
    return {name: able[name] for name in wanted}


def one(name: str, arguments: Sequence[str], command: Sequence[str] = ()) -> dict[str, Any]:
    """Run one benchmark in a process of its own. `command`: another one, for tests."""
    call = [*(command or (sys.executable, "-P", "-m", "scheduler.cli", "bench", name))]
    try:
        ended = subprocess.run(
            [*call, "--json", *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env={**os.environ, "TANDEM_DEBUG": ""},
        )
    except subprocess.TimeoutExpired:
        return _failed(f"not done after {LIMIT:.0f} s", arguments)
    except OSError as error:
        return _failed(f"cannot be started: {error.strerror}", arguments)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return _failed(lines[-1] if lines else f"status {ended.returncode}", arguments)
    return judge(ended.stdout, arguments)


def judge(output: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The result of a benchmark from what it printed; failed where it took another path."""
    try:
        told = json.loads(output.strip().splitlines()[-1])
        path, ratios = told.get("path"), told["ratios"]
    except (ValueError, IndexError, KeyError, AttributeError):
        return _failed("it printed no result", arguments)
    if not isinstance(path, dict) or not path.get("expected") or "taken" not in path:
        return _failed("it does not say which path it took", arguments)
    missed = [
        f"{fork} was {path['taken'].get(fork)} and not {wanted}"
        for fork, wanted in path["expected"].items()
        if path["taken"].get(fork) != wanted
    ]
    if missed:
        return _failed("it took another path: " + "; ".join(missed), arguments)
    numbers = {name: value for name, value in ratios.items() if isinstance(value, int | float)}
    return {
        "ok": True, "ratios": numbers, "path": path, "arguments": list(arguments), "whole": told,
    }  # fmt: skip


def _failed(why: str, arguments: Iterable[str]) -> dict[str, Any]:
    return {
        "ok": False, "error": why.removeprefix("tandem: ").removeprefix("bench: "),
        "ratios": {}, "arguments": list(arguments),
    }  # fmt: skip


def table(
    results: Mapping[str, Mapping[str, Any]],
    change: Mapping[str, Mapping[str, float]],
    before: Mapping[str, Mapping[str, Any]],
) -> None:
    """Print the ratios, what they were of, and how they have changed."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("bench", "ratio"):
        shown.add_column(name, no_wrap=True)
    for name in ("now", "of the last"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("path", overflow="fold")
    for bench, result in results.items():
        if not result["ok"]:
            shown.add_row(bench, f"failed: {result['error']}", "", "", "", style="bold red")
            continue
        path = ", ".join(f"{k} {v}" for k, v in result["path"]["taken"].items())
        for number, (ratio, value) in enumerate(result["ratios"].items()):
            part = change.get(bench, {}).get(ratio)
            shown.add_row(
                "" if number else bench, ratio, f"{value:.3f}",
                "" if part is None else f"{part:.1%}", "" if number else path,
            )  # fmt: skip
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(shown)
    times = {old["at"] for name, old in before.items() if name in change}
    if times:
        console.print(f"compared with runs from {min(times)} to {max(times)}", style="dim")
