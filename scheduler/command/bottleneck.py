"""`tandem bottleneck` and `tandem history`: where requests waited, and what would help."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from scheduler.command.flags import config_flags, config_of, json_flag, no_redis
from scheduler.command.printing import age
from scheduler.config import Config, ConfigError
from scheduler.nodes import Nodes
from scheduler.record import JobError
from scheduler.redis_client import AWAY, connect
from scheduler.simulation import bottleneck, history, profile, service

_BOTTLENECK = """\
Say at which stage requests waited within a time, how busy each stage was, and what one more node,
a bigger chunk, a faster link or a larger store would have done to the same requests: simulated
with this installation's own scheduling rule. A change of topology is told apart from a speed-up.

  tandem bottleneck
  tandem bottleneck --window 24h --prefill-profile P.json --decode-profile D.json
  tandem bottleneck --history FILE --json

With the profiles of `tandem calibrate` it knows what other chunks and batches would do; without
them it takes the rates that the window shows. The profile beside the model is used where there is
one.
"""
_HISTORY = """\
Write what was served, one request a line: arrival, lengths, times of every stage, nodes. Nothing
that was said is in it. `tandem simulate` and `tandem bottleneck` read it.

  tandem history export FILE --window 24h
  tandem history rates FILE --prefill P.json --decode D.json

`rates` reads from requests that were served alone what a request costs beside its forwards and
steps (queue, hand-off, events), and writes it into two profiles of `tandem calibrate`: medians, as
prompt_s and start_s. To predict a run, take them from other requests than that run's.
"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PROFILE = ".tandem-profile"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem bottleneck` and `tandem history`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "bottleneck",
        help="where requests wait, and what would help",
        description=_BOTTLENECK,
        formatter_class=raw,
    )
    config_flags(parser)
    parser.add_argument(
        "--window", default="1h", type=seconds, metavar="TIME", help="the last 90s, 10m, 1h (1h)"
    )
    parser.add_argument("--history", type=Path, metavar="FILE", help="an exported history instead")
    parser.add_argument("--prefill-profile", metavar="FILE", help="rates of the prefill nodes")
    parser.add_argument("--decode-profile", metavar="FILE", help="rates of the decode nodes")
    parser.add_argument("--slots", type=int, default=0, help="with --history: rows decoded at once")
    parser.add_argument("--chunk", type=int, default=0, help="with --history: tokens per chunk")
    parser.add_argument(
        "--shared", action="store_true", help="with --history: both roles on one machine"
    )
    json_flag(parser)
    parser.set_defaults(run=run_bottleneck)

    parser = subparsers.add_parser(
        "history", help="export what was served", description=_HISTORY, formatter_class=raw
    )
    parser.add_argument("action", choices=("export", "rates"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--window", type=seconds, metavar="TIME", help="only the last 10m, 1h, 7d")
    parser.add_argument("--prefill", type=Path, metavar="FILE", help="rates: the prefill node's")
    parser.add_argument("--decode", type=Path, metavar="FILE", help="rates: the decode node's")
    parser.add_argument("--chunk", type=int, default=0, help="rates: as served (0: the profile's)")
    config_flags(parser)
    json_flag(parser)
    parser.set_defaults(run=run_history)


def seconds(text: str) -> float:
    """A time such as 90s, 10m, 1h or 7d. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 90s, 10m, 1h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def run_history(args: argparse.Namespace) -> int:
    """Export the history of the configured stack, or read costs off an exported one."""
    if args.action == "rates":
        return _rates(args)
    with _redis(config_of(args)) as client:
        pasts = history.collect(client, args.window)
    count = history.write(args.file, pasts)
    if args.json:
        print(json.dumps({"requests": count, "file": str(args.file)}))
    else:
        print(f"{count} requests written to {args.file}")
    return 0


def _rates(args: argparse.Namespace) -> int:
    if not (args.prefill and args.decode) or args.chunk < 0:
        raise JobError("rates needs --prefill FILE and --decode FILE, both of tandem calibrate")
    prefill, decode = profile.load(str(args.prefill)), profile.load(str(args.decode))
    found = service.learn(history.read(args.file), prefill, decode, args.chunk)
    service.note(args.prefill, "prompt_s", found.prompt_s)
    service.note(args.decode, "start_s", found.start_s)
    if args.json:
        print(json.dumps(found.facts()))
        return 0
    print(
        f"{found.requests} requests were served alone: besides its forwards a prompt costs "
        f"{found.prompt_s * 1000:.1f} ms, besides a step the first token "
        f"{found.start_s * 1000:.1f} ms; written to {args.prefill} and {args.decode}"
    )
    if not 1 / service.FAR < found.forwards < service.FAR:
        print(
            f"forwards took {found.forwards:.2f} times as long as calibrated: calibrate on the "
            "machine as it serves (other programs, chunk sizes, power mode)"
        )
    return 0


def run_bottleneck(args: argparse.Namespace) -> int:
    """Analyse a window of the configured stack, or an exported history."""
    report = bottleneck.analyse(window_of(args))
    if args.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def window_of(args: argparse.Namespace) -> bottleneck.Window:
    """What was recorded, the nodes that are registered, and the profiles that are known."""
    config = config_of(args)
    if (args.slots or args.chunk or args.shared) and not args.history:
        raise JobError(
            "--slots, --chunk and --shared tell of a --history; nodes tell it themselves"
        )
    if args.slots < 0 or args.chunk < 0:
        raise JobError("--slots and --chunk cannot be negative")
    nodes = {"prefill": 0, "decode": 0}
    hosts: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    slots = args.slots
    if args.history:
        pasts = history.read(args.history)
        span = max(past.at + (past.ended or 0.0) for past in pasts)
    else:
        with _redis(config) as client:
            pasts = history.collect(client, args.window)
            for node in Nodes(client).list():
                nodes[node.role] += 1
                hosts[node.role].add(node.host)
                if node.role == "decode":
                    slots = max(slots, int(node.facts.get("slots", 0)))
        span = min(args.window, max(past.at + (past.ended or 0.0) for past in pasts))
    used = {
        "prefill": len({past.prefill_node for past in pasts if past.prefill_node}),
        "decode": len({past.decode_node for past in pasts if past.decode_node}),
    }
    return bottleneck.Window(
        pasts,
        span,
        max(nodes["prefill"], used["prefill"], 1),
        max(nodes["decode"], used["decode"], 1),
        slots or config.decode.slots,
        args.chunk or config.prefill.chunk,
        _profile(args.prefill_profile, config),
        _profile(args.decode_profile, config),
        config.jobs,
        args.shared or bool(hosts["prefill"] & hosts["decode"]),
        str(args.history) if args.history else f"the last {age(args.window)}",
    )


@contextmanager
def _redis(config: Config) -> Iterator[redis.Redis]:
    """Redis of the configured stack. Raises ConfigError where it does not answer."""
    try:
        with connect(config.redis_url, patience=1.0) as client:
            yield client
    except AWAY as error:
        raise ConfigError(no_redis(config, error)) from None


def _profile(name: str | None, config: Config) -> profile.Profile | None:
    """The one that is named, else the one that was measured beside the model on this machine."""
    if name:
        return profile.load(name)
    if config.model_dir is None:
        return None
    beside = config.model_dir / _PROFILE
    try:
        return profile.load(str(beside)) if beside.is_file() else None
    except JobError:
        return None  # one of another version: the window's own rates hold


def show(report: Mapping[str, Any]) -> None:
    """The report as tables."""
    console = Console()
    console.print(
        f"{report['requests']} requests in {report['window_s']:.0f} s. {report['why']}.",
        highlight=False,
    )
    table = Table("stage", "requests", "served in", "busy", "wait, mean", "p95", "estimated")
    for stage in report["stages"]:
        wait = stage["wait_s"] or {"mean": 0.0, "p95": 0.0}
        estimated = stage["estimated_wait_s"]
        table.add_row(
            stage["stage"],
            str(stage["requests"]),
            f"{stage['service_s']:.2f} s",
            f"{stage['utilisation']:.0%}",
            f"{wait['mean']:.2f} s",
            f"{wait['p95']:.2f} s",
            "grows without end" if estimated is None else f"{estimated:.2f} s",
        )
    console.print(table)
    base = report["model"]["simulated"]
    for title, rows in (("speed-ups", "speed_ups"), ("changes of topology", "topology")):
        table = Table(title, "first token, mean", "end, mean", "end, p95", "saves", "by formula")
        table.add_row("as it is (simulated)", *_times(base), "", "")
        for change in report[rows]:
            table.add_row(
                change["change"],
                *_times(change),
                f"{change['gain']:.1%}",
                _formula(change["by_formula"]),
            )
        console.print(table)
    console.print(f"would help: {', '.join(report['do']) or 'nothing of these'}", highlight=False)
    if report["do_not"]:
        console.print(f"do not buy: {'; '.join(report['do_not'])}", highlight=False)
    model = report["model"]
    console.print(
        f"rates {model['rates']}; simulated against recorded: {model['ratio']:.2f}",
        highlight=False,
    )
    console.print(report["formula"], highlight=False)


def _formula(found: Mapping[str, Any]) -> str:
    """The wait at a change's stage, before and after."""
    before, after = (
        "endless" if found[key] is None else f"{found[key]:.2f} s" for key in ("wait_s", "then_s")
    )
    return f"{found['stage']}: {before} to {after}"


def _times(row: Mapping[str, float]) -> tuple[str, str, str]:
    first, mean, p95 = (row[key] for key in ("ttft_mean_s", "total_mean_s", "total_p95_s"))
    return f"{first:.2f} s", f"{mean:.2f} s", f"{p95:.2f} s"
