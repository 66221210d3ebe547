"""`tandem doctor`: one line per check, with the finding, the evidence and the cure."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.text import Text

from scheduler.command.flags import config_flags, config_of, json_flag
from scheduler.config import find_model
from scheduler.doctor.finding import Check
from scheduler.doctor.run import counts, examine

_TEXT = """\
Look at this machine, its peer, Redis and the store, and say what is wrong and how to put it right.
Changes nothing. Run it on both machines: cables, versions and logits are compared between them.

Exit status 0 where nothing fails, 1 where something does.
"""
_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and its peer",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_flags(parser, model="another model than the configured one")
    parser.add_argument("--all", action="store_true", help="show what was skipped, too")
    json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine and print; 1 where a check fails."""
    config = config_of(args, model=args.model)
    checks = examine(config, find_model(config))
    number = counts(checks)
    if args.json:
        found = {"checks": [check.to_dict() for check in checks], "ok": not number["fail"]}
        print(json.dumps(found | {"counts": number}))
    else:
        _print(checks, args.all)
    return 1 if number["fail"] else 0


def _print(checks: list[Check], everything: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    skipped = [check for check in checks if check.status == "skip" and not check.cure]
    for check in checks:
        if check in skipped and not everything:
            continue
        line = Text(f"{check.status:<4}", style=_STYLE[check.status])
        line.append(f"  {check.name:<19} {check.finding}", style="default")
        if check.evidence:
            line.append(f"  ({check.evidence})", style="dim")
        console.print(line)
        if check.cure:
            console.print(Text(f"      {'':<19} cure: {check.cure}"))
    if skipped and not everything:
        names = ", ".join(check.name for check in skipped)
        console.print(Text(f"not looked at: {names} (--all says why)", style="dim"))
    number = counts(checks)
    console.print(f"{number['ok']} ok, {number['warn']} to improve, {number['fail']} to put right")
