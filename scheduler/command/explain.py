"""`tandem explain`: where a response's time went, stage by stage, and why it went that way."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler.command.client import Client, ClientError
from scheduler.command.flags import client_flags, client_of
from scheduler.command.printing import print_json
from scheduler.ledger.drawing import GAP, cells, colour, lanes_of, length, svg
from scheduler.ledger.legend import LEGEND, legend_of

_TEXT = """\
Say why a response took as long as it did: its stages on one time axis, the way that was taken at
every fork and why, what went over the wire, into the store and through Redis, and what is left
unexplained. Works for running responses, for ended ones, and months later from the store.

  tandem explain resp_3f2a...
  tandem explain resp_3f2a... --json
  tandem explain resp_3f2a... --svg timeline.svg
  tandem explain resp_3f2a... --legend    with what its names mean
  tandem explain --legend                 what all names mean
"""
_KEPT = 8
#: Details of a ledger that are shown where it has them.
_DETAILS = ("prompt_head", "route")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem explain` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="say where a response's time went",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    client_flags(parser)
    parser.add_argument("id", metavar="ID", nargs="?", help="resp_...")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the timeline as a picture")
    parser.add_argument(
        "--legend", action="store_true", help="say what the names mean: those shown, or all"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain one response, or the names in which responses are explained."""
    if args.id is None:
        return _tell_all(args)
    if args.legend and args.svg is not None:
        raise ClientError("a picture has no legend: leave out --svg or --legend", 2)
    with client_of(args) as client:
        ledger = fetch(client, args.id)
    if args.svg is not None:
        try:
            args.svg.write_text(svg(ledger), encoding="utf-8")
        except OSError as error:
            raise ClientError(f"{args.svg} cannot be written: {error.strerror}", 2) from error
        print(args.svg)
        return 0
    names = legend_of(ledger) if args.legend else {}
    if args.json:
        return print_json({**ledger, **({"legend": names} if args.legend else {})})
    console = _console()
    show(console, ledger)
    show_legend(console, names)
    return 0


def _tell_all(args: argparse.Namespace) -> int:
    """Without a response: the whole legend, for which nobody has to be asked."""
    if not args.legend or args.svg is not None:
        raise ClientError("name a response, resp_..., or ask for --legend alone", 2)
    if args.json:
        return print_json(LEGEND)
    show_legend(_console(), LEGEND)
    return 0


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(highlight=False, width=None if terminal else 120)


def fetch(client: Client, response: str) -> dict[str, Any]:
    """The ledger of a response."""
    if not response.startswith("resp_"):
        raise ClientError(f"{response!r} is no response's ID: it begins with resp_", 2)
    return client.ledger(response)


def show(console: Console, ledger: Mapping[str, Any]) -> None:
    """Print a ledger for people."""
    tokens = ledger["tokens"]
    first = ledger["first_token_s"]
    begun = "no token yet" if first is None else f"first token after {first:.3f} s"
    console.print(
        f"{ledger['id']}  {ledger['status']}  {ledger['seconds']:.3f} s, {begun}; "
        f"{tokens['prompt']:,} prompt tokens, {tokens['cached']:,} of them cached, "
        f"{tokens['output']:,} written",
        markup=False,
    )
    if not ledger["spans"]:
        console.print("nothing was noted of it: it is older than the ledger", style="dim")
        return
    console.print()
    _timeline(console, ledger)
    console.print()
    console.print(_stages(ledger))
    _facts(console, ledger)


def show_legend(console: Console, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Print what names mean, group by group."""
    width = max((len(name) for names in groups.values() for name in names), default=0)
    for group, names in groups.items():
        console.print()
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column(group, no_wrap=True, min_width=width)
        table.add_column("what it means", overflow="fold")
        for name, text in names.items():
            mark = Text("█ ", style=colour(name)) if group == "stages" else Text()
            table.add_row(mark + Text(name), Text(text))
        console.print(table)


def _timeline(console: Console, ledger: Mapping[str, Any]) -> None:
    width = max(20, console.width - 10)
    for lane in lanes_of(ledger):
        line = Text(f"{lane:<9}")
        for stage in cells(ledger, lane, width):
            line.append("█" if stage else "·", style=colour(stage) if stage else "dim")
        console.print(line, no_wrap=True, overflow="crop")
    whole = f"{length(ledger):.2f} s"
    console.print(f"{'':<9}0{whole:>{width - 1}}", style="dim", markup=False)


def _stages(ledger: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for name in ("times", "begins", "seconds", "of its own", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in ledger["stages"]:
        table.add_row(
            Text("█ ", style=colour(row["stage"])) + Text(row["stage"]),
            row["lane"], str(row["count"]), f"{row['start']:.3f}", f"{row['seconds']:.4f}",
            f"{row['own_seconds']:.4f}", f"{row['share']:.1%}",
        )  # fmt: skip
    left = ledger["remainder"]
    table.add_row(
        Text("█ ", style=GAP) + Text("not explained"), "", str(len(left["gaps"])), "",
        f"{left['seconds']:.4f}", f"{left['seconds']:.4f}", f"{left['share']:.1%}",
        style="" if left["within"] else "bold red",
    )  # fmt: skip
    return table


def _facts(console: Console, ledger: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fork in ledger["forks"]:
        why = f" ({fork['why']})" if fork["why"] else ""
        table.add_row(fork["fork"], Text(f"{fork['took']}{why}"))
    shapes = ledger["shapes"]
    if shapes["prefill"]:
        told = [f"{tokens} x {count}" for tokens, count in shapes["prefill"][:_KEPT]]
        more = len(shapes["prefill"]) - _KEPT
        table.add_row("forwards", ", ".join([*told, *([f"{more} more"] if more > 0 else [])]))
    if shapes["decode_widths"]:
        told = [f"{count} at width {width}" for width, count in shapes["decode_widths"].items()]
        table.add_row("decode steps", ", ".join(told))
    for span in ledger["spans"]:
        if parts := span.get("of"):
            told = [f"{name} {seconds:.3f} s" for name, seconds in parts.items() if seconds]
            table.add_row("decode", f"{span['tokens']} tokens in {span['steps']} steps: "
                          + ", ".join(told))  # fmt: skip
    moved = ledger["bytes"]
    control = moved["control"]
    table.add_row(
        "bytes",
        f"{moved['wire']:,} on the wire, {moved['store_read']:,} from the store, "
        f"{moved['store_written']:,} into it, "
        f"{control['sent']:,} to Redis and {control['received']:,} from it in "
        f"{control['round_trips']:g} round trips ({control['commands']:,} commands)",
    )
    budget = control["budget"]
    if not budget["within"]:
        table.add_row(
            "over budget",
            f"more through Redis than the {budget['round_trips']:,} round trips and "
            f"{budget['bytes']:,} bytes of which such a request is made",
            style="bold red",
        )
    again = {name: count for name, count in ledger["work"].items() if count}
    table.add_row(
        "done again", ", ".join(f"{count} {name}" for name, count in again.items()) or "nothing"
    )
    for name in _DETAILS:
        if found := ledger["details"].get(name):
            table.add_row(name.replace("_", " "), Text(_plain(found)))
    for gap in ledger["remainder"]["gaps"][:3]:
        if gap["seconds"] >= 0.001:
            table.add_row(
                "gap", f"{gap['seconds']:.4f} s after {gap['after']}, before {gap['before']}"
            )
    if ledger["clock_error_s"] > 0.001:
        table.add_row("clocks", f"agree to within {1000 * ledger['clock_error_s']:.1f} ms")
    console.print()
    console.print(table)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
