"""`tandem owners`: give people tokens and limits, and take them away again."""

from __future__ import annotations

import argparse
import getpass
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler import owners
from scheduler.audit import Audit
from scheduler.command.flags import config_flags, config_of, json_flag, without_api
from scheduler.command.printing import print_json
from scheduler.config import Config, ConfigError
from scheduler.host import data_dir

_FIRST = """\
This is the first owner: from now on every request needs a token, your own `tandem` commands and
the dashboards too. To remain the operator, who sees everything, set a long random api.token in
tandem.toml and start `tandem up` again; or `tandem owners add NAME --operator` makes a token for
the dashboards, which sees of conversations and jobs only its own. Commands on a machine without
that tandem.toml take a token from TANDEM_API_TOKEN."""
_TEXT = """\
Name the people who may use this Tandem. Each gets a token for its clients (api_key), and sees only
its own conversations, jobs, files and batches. A running API heeds changes at once. With owners,
every request needs a token: theirs, or api.token, which is the operator's and sees everything.
The `tandem` command sends api.token, or the token in TANDEM_API_TOKEN.

  tandem owners add alice --max-waiting 100 --stored-gb 20 --per-minute 120
  tandem owners add alice                one more token for alice
  tandem owners add me --operator        one that sees the dashboards, too
  tandem owners list
  tandem owners remove alice             its tokens stop working; what it stored stays
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem owners`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "owners", help="tokens and limits of people", description=_TEXT, formatter_class=raw
    )
    _flags(parser)
    parser.set_defaults(run=run_list)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    add = _action(actions, "add", "make an owner, or a token more for one", run_add)
    add.add_argument("name", metavar="NAME", help="small letters, digits, '.', '_' and '-'")
    add.add_argument("--max-waiting", type=int, metavar="N", help="jobs that may wait (no limit)")
    add.add_argument("--stored-gb", type=float, metavar="GB", help="states and files (no limit)")
    add.add_argument("--per-minute", type=int, metavar="N", help="requests a minute (no limit)")
    add.add_argument(
        "--operator",
        action=argparse.BooleanOptionalAction,
        help="may see /, /rq and /metrics, which show all owners",
    )
    _action(actions, "list", "list owners and their limits", run_list)
    remove = _action(actions, "remove", "take an owner's tokens away", run_remove)
    remove.add_argument("name", metavar="NAME")


def _action(actions: Any, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    # Flags may stand before the action as well: what is not given here leaves those alone.
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, argument_default=argparse.SUPPRESS
    )
    _flags(parser)
    parser.set_defaults(run=run)
    return parser


def _flags(parser: argparse.ArgumentParser) -> None:
    config_flags(parser)
    json_flag(parser)


def _config(args: argparse.Namespace) -> Config:
    config = config_of(args)
    data_dir.make_usable(config.data_dir)
    return config


def run_add(args: argparse.Namespace) -> int:
    """Make an owner or a further token, and print the token: it is shown once."""
    config = _config(args)
    if cause := without_api(config):
        raise ConfigError(f"{cause}: add owners on the other one, whose API reads them")
    first = not owners.Owners(config.data_dir).list()
    limits = {
        name: getattr(args, name, None) for name in ("max_waiting", "stored_gb", "per_minute")
    }
    token = owners.add(
        config.data_dir, args.name, operator=getattr(args, "operator", None), **limits
    )
    _note(config, args.name, "add")
    if args.json:
        print_json({"name": args.name, "token": token})
    else:
        print(token)
        print(f"the token of {args.name}: it is kept nowhere, so note it now", file=sys.stderr)
    if first and not config.api.token:
        print(_FIRST, file=sys.stderr)
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """Take an owner's tokens away."""
    config = _config(args)
    owners.remove(config.data_dir, args.name)
    _note(config, args.name, "remove")
    if args.json:
        print_json({"name": args.name, "removed": True})
    else:
        print(f"{args.name} is removed; its tokens work no more")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """List owners with their limits, never with their tokens."""
    found = owners.Owners(_config(args).data_dir).list()
    rows = [
        {
            "name": owner.name,
            "tokens": len(owner.tokens),
            "operator": owner.operator,
            "max_waiting": owner.max_waiting,
            "stored_gb": owner.stored_gb,
            "per_minute": owner.per_minute,
        }
        for owner in found
    ]
    if args.json:
        print_json({"owners": rows})
        return 0
    if not rows:
        print("no owners: whoever reaches the API, or has api.token, may do everything")
        return 0
    table = Table("owner", "tokens", "jobs waiting", "stored", "per minute", "", box=None)
    for row in rows:
        table.add_row(
            str(row["name"]),
            str(row["tokens"]),
            str(row["max_waiting"] or "-"),
            f"{row['stored_gb']:g} GB" if row["stored_gb"] else "-",
            str(row["per_minute"] or "-"),
            "operator" if row["operator"] else "",
        )
    Console(highlight=False).print(table)
    return 0


def _note(config: Config, name: str, what: str) -> None:
    audit = Audit.of(config.data_dir)
    audit.note("owner", name, owner="", address=f"local user {getpass.getuser()}", what=what)
    audit.close()
