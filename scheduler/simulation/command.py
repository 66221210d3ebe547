"""`tandem simulate`: the scheduling rule on a trace, or the whole pipeline on any requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from scheduler.config import JobsConfig
from scheduler.record import JobError
from scheduler.simulation import compare, history, plot, published, scenario, simulate, workload
from scheduler.simulation.cluster import Cluster, Link, Machine, Shelf, Turn
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import BUILT_IN, load
from scheduler.simulation.report import Goal, summarise

SCENARIOS = {"seed": scenario.seed, "published": published.published}
#: Flags of the rule, and the settings that they stand for.
RULE = {
    "horizon": "horizon_seconds",
    "gain": "preempt_gain",
    "owner-share": "owner_share",
    "interactive-weight": "interactive_weight",
    "batch-weight": "batch_weight",
    "max-parked": "max_parked",
}
#: What a flag of the rule counts in, and what more or less of it does.
EFFECT = {
    "horizon": "seconds, about, that a normal job waits before it goes ahead of all others; longer "
    "is better for the mean wait, shorter for the longest",
    "gain": "factor by which a job must be better for a running prefill to be parked for it; 1 "
    "parks for any that is better, more parks less often",
}
_HELP = """\
Requests in simulated time, on measured or claimed rates, under the scheduling rule in use.

  tandem simulate --scenario seed --json          the published set-up of two machines
  tandem simulate --trace FILE --load 0.78        one prefill queue, against first come first served
  tandem simulate --trace FILE --decode m3-ultra --prefill m5-ultra --plot run.svg
  tandem simulate --history FILE --prefill P.json --decode D.json --compare

With --decode the whole pipeline is simulated: prefill nodes, links, decode batches, store. A trace
is Mooncake's JSON lines, a CSV table of lengths (at, prompt_tokens, output_tokens; if wanted
previous, cached_tokens, owner, priority), or what `tandem history export` wrote. A profile is a
file of `tandem calibrate`, or a claimed one that is shipped: %(shipped)s.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem simulate`."""
    defaults = JobsConfig()
    parser = subparsers.add_parser(
        "simulate",
        help="what another rule, machine, link or store would do",
        description=_HELP % {"shipped": ", ".join(BUILT_IN)},
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="requests")
    source.add_argument("--history", type=Path, metavar="FILE", help="requests that were served")
    source.add_argument(
        "--agents", type=Path, metavar="DIR", help="recorded agent sessions (JSONL)"
    )
    source.add_argument("--scenario", choices=sorted(SCENARIOS), help="a run whose rates are known")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    rule = parser.add_argument_group("the rule (as in tandem.toml's [jobs])")
    for flag, name in RULE.items():
        what = EFFECT.get(flag) or JobsConfig.model_fields[name].description or name
        _number(rule, f"--{flag}", getattr(defaults, name), what)
    queue = parser.add_argument_group("one prefill queue (without --decode)")
    _number(queue, "--load", 0.78, "share of the time that the node is busy")
    _number(queue, "--seeds", 20, "how many random thinnings to pool")
    _number(queue, "--rate", simulate.RATE, "prefill tokens per second")
    both = parser.add_argument_group("both")
    _number(both, "--first-seed", 0, "seed of the (first) thinning")
    _number(both, "--chunk", 0, "tokens per chunk; 0: the profile's")
    whole = parser.add_argument_group("the whole pipeline (with --decode)")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "PROFILE"}
    whole.add_argument("--prefill", help="a prefill node; again for another", **many)
    whole.add_argument("--decode", help="a decode node; again for another", **many)
    whole.add_argument(
        "--shared", action="store_true", help="prefill and decode nodes are pairwise one machine"
    )
    _number(whole, "--part", 1.0, "part of the conversations to keep, chosen by the seed")
    _number(whole, "--slots", 8, "rows that a decode node decodes at once")
    _number(whole, "--link-gbps", 75.0, "gigabits per second to each decode node")
    _number(whole, "--link-ms", 0.5, "latency of a hand-off in milliseconds")
    whole.add_argument("--no-overlap", action="store_true", help="send a state only when whole")
    _number(whole, "--store-gb", 0.0, "size of the store in GB; 0: no limit")
    _number(whole, "--read-gbps", 0.0, "gigabits per second read from the store; 0: no time")
    _number(whole, "--memory-gb", 0.0, "GB for states that wait at a decode node; 0: no limit")
    whole.add_argument(
        "--handoff",
        choices=("prompt", "late"),
        default="prompt",
        help="hand off at the prompt's end, or once another prompt waits (prompt)",
    )
    _number(whole, "--slo-ttft", 0.0, "seconds to the first token; 0: 10 + 2 x its own prefill")
    _number(whole, "--slo-tpot", 0.1, "seconds between tokens")
    whole.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw queue lengths and how busy each machine was: .svg or .png",
    )
    whole.add_argument("--compare", action="store_true", help="against what --history recorded")
    parser.set_defaults(run=_run)


def _number(group: argparse._ArgumentGroup, flag: str, default: float, what: str) -> None:
    """Add a flag for a number of the default's kind, which the help names."""
    group.add_argument(
        flag, type=type(default), default=default, metavar="N", help=f"{what} (default {default:g})"
    )


def _settings(args: argparse.Namespace) -> JobsConfig:
    """The rule that the flags name. Raises JobError for a value that cannot be."""
    asked = {name: getattr(args, flag.replace("-", "_")) for flag, name in RULE.items()}
    try:
        return JobsConfig.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        raise JobError(f"{first['loc'][0]}: {first['msg'].lower()}") from None


def _run(args: argparse.Namespace) -> int:
    _check(args)
    if args.scenario:
        _say(SCENARIOS[args.scenario](), args.json)
        return 0
    if args.decode or args.history:
        return _pipeline(args)
    return _queue(args)


def _check(args: argparse.Namespace) -> None:
    above = (args.seeds, args.load, args.rate, args.slots, args.link_gbps, args.part)
    if not all(value > 0 for value in above) or not args.part <= 1:
        raise JobError(
            "--seeds, --load, --rate, --slots and --link-gbps must be above 0, --part from 0 to 1"
        )
    sizes = (args.chunk, args.link_ms, args.store_gb, args.read_gbps, args.memory_gb)
    if not all(value >= 0 for value in (*sizes, args.slo_ttft, args.slo_tpot)):
        raise JobError("sizes, rates and seconds cannot be negative")
    if args.compare and not args.history:
        raise JobError("--compare needs --history: there is nothing to compare with otherwise")
    if args.history and not args.decode:
        raise JobError("--history needs --decode PROFILE (and --prefill PROFILE)")
    if args.scenario and (args.decode or args.prefill or args.plot):
        raise JobError("a scenario has its own machines and is not drawn: name a --trace instead")
    if (args.plot or args.prefill) and not args.decode:
        raise JobError("--plot and --prefill belong to the whole pipeline: add --decode PROFILE")
    if args.trace and not args.decode and not workload.is_queue_trace(args.trace):
        raise JobError(
            f"{args.trace} is a table or a history: add --decode PROFILE (and --prefill PROFILE)"
        )
    if args.shared and not args.prefill:
        raise JobError("--shared is about prefill and decode nodes on one machine: add --prefill")
    if args.plot:
        plot.check(args.plot)


def _pipeline(args: argparse.Namespace) -> int:
    if args.agents:
        raise JobError("recorded agents give no answers' lengths: use --trace with --decode")
    cluster = cluster_of(args)
    pasts: list[history.Past] = []
    if args.history:
        pasts = history.read(args.history)
        # Compared with what was: each begins where it did, with the state that it found.
        turns = workload.from_history(pasts, recorded=args.compare)
    else:
        turns = workload.load(args.trace, args.part, args.first_seed)
    sim = Pipeline(cluster, turns)
    with _progress("requests served", len(turns)) as told:
        sim.run(told)
    report = summarise(sim, Goal(args.slo_ttft, args.slo_tpot))
    if args.plot:
        plot.draw(args.plot, sim)
    if args.compare:
        report["against"] = compare.against(pasts, turns)
    report["cluster"] = describe(cluster)
    _say(report, args.json)
    return 0


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster that the flags describe."""
    settings = _settings(args)
    prefill = [load(name) for name in args.prefill]
    decode = [load(name) for name in args.decode]
    found = Cluster(
        tuple(Machine(f"p{k}", p, chunk=args.chunk) for k, p in enumerate(prefill)),
        tuple(
            Machine(f"d{k}", p, chunk=args.chunk, slots=args.slots, memory=args.memory_gb * 1e9)
            for k, p in enumerate(decode)
        ),
    )
    return replace(
        found,
        link=Link(args.link_gbps * 1e9 / 8, args.link_ms / 1000, not args.no_overlap),
        store=Shelf(args.store_gb * 1e9, read_rate=args.read_gbps * 1e9 / 8),
        settings=settings,
        handoff=args.handoff,
        shared=args.shared,
    )


def describe(cluster: Cluster) -> dict[str, Any]:
    """What was simulated, with the sources of the rates."""
    machines = (*cluster.prefill, *cluster.decode)
    return {
        "prefill": [machine.profile.name for machine in cluster.prefill],
        "decode": [machine.profile.name for machine in cluster.decode],
        "chunk": {machine.name: machine.forward for machine in machines},
        "slots": cluster.decode[0].slots,
        "link_bytes_s": cluster.link.rate,
        "handoff": cluster.handoff,
        "shared": cluster.shared,
        "store_bytes": cluster.store.size,
        "sources": {m.profile.name: m.profile.source or "measured here" for m in machines},
    }


def _queue(args: argparse.Namespace) -> int:
    settings = _settings(args)
    options: dict[str, Any] = {
        "load": args.load,
        "seeds": range(args.first_seed, args.first_seed + args.seeds),
        "settings": settings,
        "rate": args.rate,
        "chunk": args.chunk or simulate.CHUNK,
    }
    first, count = args.first_seed, args.seeds
    with _progress("thinnings simulated", count) as told:

        def seen(seed: int) -> None:
            told(seed - first + 1)

        if args.agents:
            report = simulate.simulate_agents(args.agents, progress=seen, **options)
        else:
            report = simulate.simulate(args.trace, progress=seen, **options)
    if args.json:
        print(json.dumps(report))
    else:
        simulate.say(report)
    return 0


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, nothing elsewhere; yields what is told how far it is."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _say(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    for line in lines(report):
        print(line)


def lines(report: Mapping[str, Any], indent: int = 0) -> list[str]:
    """A report as text: one figure a line, a row of figures on one."""
    found: list[str] = []
    for name, value in report.items():
        head = " " * indent + str(name)
        if isinstance(value, Mapping):
            if any(isinstance(item, Mapping | list) for item in value.values()):
                found += [head, *lines(value, indent + 2)]
            else:
                row = "  ".join(f"{k} {_figure(v)}" for k, v in value.items())
                found.append(f"{head:<26} {row}")
        elif isinstance(value, list) and value:
            found.append(head)
            for item in value:
                if isinstance(item, Mapping):
                    row = "  ".join(f"{k} {_figure(v)}" for k, v in item.items())
                    found.append(" " * (indent + 2) + row)
                else:
                    found.append(" " * (indent + 2) + str(item))
        else:
            found.append(f"{head:<26} {_figure(value)}")
    return found


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and abs(value) >= 1e5 else str(value)


__all__ = ["Turn", "cluster_of", "describe", "lines", "register"]
