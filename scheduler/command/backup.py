"""`tandem backup DIR` and `tandem restore DIR`."""

from __future__ import annotations

import argparse
import json
import sys

from scheduler.command.flags import config_flags, config_of, json_flag, up_command
from scheduler.host import backup, data_dir

_BACKUP = """\
Copy what this machine keeps (jobs, conversations, their states, configuration, secrets) into a new
directory, while `tandem up` runs. The copy is proven by opening it. It contains passwords and
everything that was said: keep it as safe as the machine.
"""
_RESTORE = """\
Put a backup into the data directory. `tandem up` must not run. Jobs that were waiting or running
when the backup was made run again. Configuration and secrets stay as they are now: the backup's
are beside it, in DIR.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `backup` and `restore` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    for name, text, run in (
        ("backup", ("copy what this machine keeps", _BACKUP, "directory to make"), run_backup),
        ("restore", ("put such a copy back", _RESTORE, "a backup"), run_restore),
    ):
        parser = subparsers.add_parser(
            name, help=text[0], description=text[1], formatter_class=raw,
        )  # fmt: skip
        parser.add_argument("directory", type=data_dir.directory, metavar="DIR", help=text[2])
        config_flags(parser)
        json_flag(parser)
        parser.set_defaults(run=run)
        if name == "restore":
            parser.add_argument(
                "--replace", action="store_true", help="move what is there aside first"
            )


def run_backup(args: argparse.Namespace) -> int:
    """Make a backup and say what is in it."""
    config = config_of(args)
    target = args.directory.expanduser().absolute()
    found = backup.backup(config, target, _say)
    size = sum(size for size, _ in found["files"].values())
    if args.json:
        print(json.dumps({**found, "directory": str(target), "bytes": size}))
    else:
        keys = f"{found['redis']['keys']} keys of Redis" if found["redis"] else "no Redis"
        print(f"{target}: {size:,} bytes, {keys}, {'a' if found['store'] else 'no'} store")
    return 0


def run_restore(args: argparse.Namespace) -> int:
    """Put a backup back."""
    config = config_of(args)
    source = args.directory.expanduser().absolute()
    found = backup.restore(config, source, _say, replace=args.replace)
    if args.json:
        print(json.dumps({"data": str(config.data_dir), "made": found["made"]}))
    else:
        print(f"{config.data_dir} holds what {source} held; start it: {up_command(args)}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
