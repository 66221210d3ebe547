"""The `tandem` command: finds its subcommands by entry points and reports errors in one line.

Every room registers its own commands in the group `tandem.commands`, and its benchmarks, which
stand under `tandem bench`, in `tandem.benches`. An entry is `register(subparsers)`; each parser it
adds sets `run`, a function of the parsed arguments that returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any

COMMANDS = "tandem.commands"
BENCHES = "tandem.benches"
OWN = ("engine", "store", "transport", "scheduler", "worker_prefill", "worker_decode")

_DESCRIPTION = """\
Serve one language model on two unequal machines: one prefills, the other decodes. Every answer
has an ID, and any conversation goes on from its ID for as long as it is stored.
"""
_EXAMPLES = """\
examples:
  tandem demo                          show everything at once, on a small model
  tandem up                            run a stack on this machine
  tandem submit question.txt           ask, and watch the answer come
  tandem resume resp_3f2a... "Why?"    go on from that answer
  tandem jobs                          what waits and what runs
  tandem explain resp_3f2a...          why it took so long
  tandem doctor                        what is wrong here, and the cure

  two machines      init, up, model, node, doctor, service
  what is kept      conversations, store, owners, backup, restore
  how fast, and why explain, calibrate, profile, bench, bottleneck, history, simulate
  parts by hand     serve, worker

More, with examples: tandem COMMAND --help.
Set TANDEM_DEBUG=1 to see the traceback behind an error.
"""


_BENCH = """\
Measure one part, or without a name all of them in one run: ratios against the bare operation, taken
in turns. Fails where a benchmark did not take the path that it meant to measure. Runs are kept in a
file, and the last one on this machine is compared.

  tandem bench
  tandem bench --only codec,link --json
  tandem bench decode --seconds 30
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a failure, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, broken = build_parser(bench="bench" in words[:1])
    if words and words[0] in broken:
        return _say(f"the command '{words[0]}' cannot be loaded: {broken[words[0]]}", 1)
    args = parser.parse_args(words)
    if not hasattr(args, "run"):
        getattr(args, "parser", parser).print_help()
        return 2
    try:
        if getattr(args, "measures_model", False) and args.model is None:
            args.model = _configured_model()
        if getattr(args, "asks_store", False):
            _name_store(args)
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has had enough; nothing more may be written on exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("TANDEM_DEBUG"):
            raise
        return _say(describe(error), exit_status(error))


def build_parser(*, bench: bool) -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """The parser with every command that can be loaded, and why the others cannot.

    Benchmarks are loaded only when one is asked for (`bench`).
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "tandem", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"tandem {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    broken = _load(COMMANDS, commands)
    benches = commands.add_parser(
        "bench", help="measure every part, or one", description=_BENCH, formatter_class=raw
    )
    benches.set_defaults(parser=benches)
    inner = benches.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    if bench:
        for name, why in _load(BENCHES, inner).items():
            print(f"tandem: the benchmark '{name}' cannot be loaded: {why}", file=sys.stderr)
        from scheduler.bench import suite

        suite.flags(benches)
        if suite.choose(inner.choices, None):
            benches.set_defaults(run=lambda args: suite.run(args, inner.choices))
    if broken:
        missing = "".join(f"\n  {name}: {why}" for name, why in sorted(broken.items()))
        parser.epilog = f"{_EXAMPLES}\ncannot be loaded:{missing}\n"
    return parser, broken


def _configured_model() -> str:
    """What the configuration serves, for a command of a room that knows no configuration.

    Raises ConfigError.
    """
    from scheduler.config import find_model, load

    config = load()
    return str(find_model(config) or config.model)


def _name_store(args: argparse.Namespace) -> None:
    """Fill in which store the configuration names, for a command of a room that knows none.

    Raises ConfigError.
    """
    from scheduler.config import ConfigError, load

    config = load(args.config, {"data_dir": args.data})
    if config.roles and "decode" not in config.roles and args.data is None and args.node is None:
        raise ConfigError(
            f"no store lies on this machine, which does {' and '.join(config.roles)}: ask on one "
            "that decodes, or name a data directory with --data"
        )
    args.data = str(config.data_dir)
    args.node = args.node or config.node


def _load(group: str, subparsers: Any) -> dict[str, str]:
    """Register the entries of a group in order of name; returns name to reason of the broken."""
    broken: dict[str, str] = {}
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda e: e.name):
        try:
            entry.load()(subparsers)
        except Exception as error:
            broken[entry.name] = describe(error)
    return broken


def describe(error: BaseException) -> str:
    """One line about an error: its own words if it is one of ours, with its kind otherwise."""
    lines = str(error).strip().splitlines()
    words = lines[0] if lines else ""
    if type(error).__module__.partition(".")[0] in OWN and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def exit_status(error: BaseException) -> int:
    """2 where the input or the configuration is at fault, 1 otherwise."""
    told = getattr(error, "exit_status", None)
    if isinstance(told, int):
        return told
    return 2 if type(error).__name__ == "ConfigError" else 1


def _say(line: str, status: int) -> int:
    print(f"tandem: {line}", file=sys.stderr)
    return status


def _version() -> str:
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
