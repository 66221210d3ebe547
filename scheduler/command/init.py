"""`tandem init`: write the configuration and the secrets of this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import cast, get_args

from scheduler.command.flags import config_flags, config_of, json_flag
from scheduler.config import DEFAULT_MODEL, Config, ConfigError, default_data_dir, load
from scheduler.host import data_dir, setup
from scheduler.host.model_files import unknown
from scheduler.passwords import write_private
from store.paths import models_dir

_TEXT = """\
Write tandem.toml and the secrets for this machine. Without flags it asks.

  tandem init --role both                        one machine does everything

On two machines, first on the one that decodes and keeps the conversations:

  tandem init --role decode --link 10.0.0.1 --model NAME

It prints a join string. Then on the one that prefills:

  tandem init --role prefill --link 10.0.0.2 --join STRING

--link is the machine's own address on the cable between the two. Passwords are made once, lie in
files that only you can read, and are never printed but in the join string.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `init` to the command line."""
    parser = subparsers.add_parser(
        "init",
        help="write this machine's configuration",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--role", choices=get_args(setup.Setup))
    parser.add_argument("--link", metavar="ADDRESS", help="this machine's address on the cable")
    parser.add_argument("--join", metavar="STRING", help="from the other machine, or a file of it")
    parser.add_argument("--model", metavar="NAME", help="a name, hub name or directory")
    parser.add_argument("--models", type=data_dir.directory, metavar="DIR", help="where they lie")
    parser.add_argument("--name", metavar="NODE", help="name of this machine (local, prefill)")
    parser.add_argument("--port", type=int, default=0, help="port of Redis (6379)")
    parser.add_argument("--api", metavar="ADDRESS", help="let others use the API; makes a token")
    config_flags(parser, config="file to write (tandem.toml in the data directory)")
    parser.add_argument("--force", action="store_true", help="replace an earlier tandem.toml")
    parser.add_argument(
        "--show-join", action="store_true", help="print the join string again and write nothing"
    )
    json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files, or print the join string of a configuration that exists."""
    if args.show_join:
        print(setup.join_for(config_of(args)).text())
        return 0
    data = (args.data or default_data_dir()).expanduser().absolute()
    file = (args.config or data / "tandem.toml").expanduser().absolute()
    wishes = _wishes(args, data, file)
    problem = unknown(
        Config(data_dir=data, model=wishes.model, models_dir=wishes.models or models_dir())
    )
    if problem and wishes.role == "both":
        raise ConfigError(
            f"{problem}; no other machine can bring it: check the name, or name its directory with "
            "--model DIR"
        )
    note = problem if wishes.role == "decode" else ""
    written = setup.write(wishes, force=args.force)
    # What was written must be what the other commands accept.
    config = load(file, {"data_dir": str(data)})
    join = setup.join_for(config).text() if wishes.role == "decode" else ""
    if join:
        write_private(data / "secrets" / "join", join + "\n")
    found = {
        "role": wishes.role,
        "files": [str(path) for path in written],
        **({"join": join} if join else {}),
        **({"note": note} if note else {}),
    }
    if args.json:
        print(json.dumps(found))
        return 0
    for path in written:
        print(f"wrote {path}")
    if wishes.api:
        print(f"the API's token is in {file}")
    if join:
        print("\non the machine that prefills (the string contains a password):\n")
        print(f"  tandem init --role prefill --link ADDRESS --join {join}\n")
    usual = args.data is None or str(data) == os.environ.get("TANDEM_DATA")
    usual = usual and os.environ.get("TANDEM_CONFIG", "") in ("", str(file))
    flag = "" if file == default_data_dir() / "tandem.toml" and usual else f" --config {file}"
    if note:
        print(
            f"note: {note}. If the other machine has it, run there, once both run: tandem model "
            f"push {wishes.model}; else check the name, or give --model DIR and --force\n"
        )
    print(f"next: tandem doctor{flag}, then tandem up{flag}")
    return 0


def _wishes(args: argparse.Namespace, data: Path, file: Path) -> setup.Wishes:
    role = args.role or _ask(
        "Which part does this machine take: both, decode (and keep the conversations), or prefill?",
        "both",
        "--role both, decode or prefill",
    )
    if role not in get_args(setup.Setup):
        raise ConfigError(f"role {role!r} is not one of both, decode, prefill")
    join = None
    if role == "prefill":
        join = setup.Join.parse(
            args.join
            or _ask("The string that `tandem init` printed on the other machine:", "", "--join")
        )
    elif args.join:
        join = setup.Join.parse(args.join)
    link = args.link or ""
    if role != "both" and not link:
        link = _ask("This machine's own address on the cable (such as 10.0.0.1):", "", "--link")
    usual = join.model if join else DEFAULT_MODEL
    model = args.model or (
        _ask("Which model (a name, or its directory)?", usual, "") if args.role is None else usual
    )
    return setup.Wishes(
        role=cast(setup.Setup, role),
        data=data,
        file=file,
        model=str(Path(model).expanduser().absolute()) if Path(model).is_dir() else model,
        link=link,
        join=join,
        name=args.name or ("prefill" if role == "prefill" else ""),
        models=args.models.expanduser().absolute() if args.models else None,
        port=args.port,
        api=args.api or "",
    )


def _ask(question: str, usual: str, flag: str) -> str:
    """An answer from the terminal; `usual` for an empty one. Raises ConfigError without one."""
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked here: give {flag}; see `tandem init --help`")
    answer = input(f"{question} {f'[{usual}] ' if usual else ''}").strip() or usual
    if not answer:
        raise ConfigError(f"an answer is needed: {question}")
    return answer
