"""`tandem simulate`: the scheduling rule on a trace, or the whole pipeline on any requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    rule = parser.add_argument_group("the rule")
    rule.add_argument("--horizon", type=float, default=defaults.horizon_seconds, help="seconds")
    rule.add_argument("--gain", type=float, default=defaults.preempt_gain)
    queue = parser.add_argument_group("one prefill queue (without --decode)")
    queue.add_argument("--load", type=float, default=0.78, help="share of the node that is busy")
    queue.add_argument("--seeds", type=int, default=20, help="how many random thinnings to pool")
    queue.add_argument(
        "--rate", type=float, default=simulate.RATE, help="prefill tokens per second"
    )
    both = parser.add_argument_group("both")
    both.add_argument("--first-seed", type=int, default=0, help="seed of the (first) thinning")
    both.add_argument("--chunk", type=int, default=0, help="tokens per chunk (0: the profile's)")
    whole = parser.add_argument_group("the whole pipeline (with --decode)")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "PROFILE"}
    whole.add_argument("--prefill", help="a prefill node; again for another", **many)
    whole.add_argument("--decode", help="a decode node; again for another", **many)
    whole.add_argument("--part", type=float, default=1.0, help="part of the conversations to keep")
    whole.add_argument(
        "--slots", type=int, default=8, help="rows that a decode node decodes at once"
    )
    whole.add_argument("--link-gbps", type=float, default=75.0, help="of each decode node's link")
    whole.add_argument("--link-ms", type=float, default=0.5, help="latency of a hand-off")
    whole.add_argument(
        "--shared", action="store_true", help="prefill and decode nodes are pairwise one machine"
    )
    whole.add_argument("--no-overlap", action="store_true", help="send a state only when whole")
    whole.add_argument(
        "--store-gb", type=float, default=0.0, help="size of the store (0: no limit)"
    )
    whole.add_argument(
        "--read-gbps", type=float, default=0.0, help="reading the store (0: no time)"
    )
    whole.add_argument("--memory-gb", type=float, default=0.0, help="for states that wait (0: any)")
    whole.add_argument("--handoff", choices=("prompt", "late"), default="prompt")
    whole.add_argument(
        "--slo-ttft", type=float, default=0.0, help="s (0: 10 + 2 x its own prefill)"
    )
    whole.add_argument("--slo-tpot", type=float, default=0.1, help="seconds between tokens")
    whole.add_argument("--plot", type=Path, metavar="FILE", help="picture of the run: .svg, .png")
    whole.add_argument("--compare", action="store_true", help="against what --history recorded")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _check(args)
    if args.scenario:
        _say(SCENARIOS[args.scenario](), args.json)
        return 0
    if args.decode or args.history:
        return _pipeline(args)
    return _queue(args)


def _check(args: argparse.Namespace) -> None:
    if args.seeds < 1 or args.load <= 0 or args.rate <= 0 or args.chunk < 0 or args.slots < 1:
        raise JobError("--seeds, --load, --rate, --chunk and --slots must be above 0")
    if args.link_gbps <= 0 or args.link_ms < 0 or not 0 < args.part <= 1:
        raise JobError("--link-gbps must be above 0, --link-ms not below, --part from 0 to 1")
    if min(args.store_gb, args.read_gbps, args.memory_gb, args.slo_ttft, args.slo_tpot) < 0:
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
    settings = JobsConfig(horizon_seconds=args.horizon, preempt_gain=args.gain)
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
    settings = JobsConfig(horizon_seconds=args.horizon, preempt_gain=args.gain)
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
