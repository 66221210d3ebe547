"""`tandem node`: which nodes there are, and that one does not come back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TypeVar

from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from scheduler.command.flags import config_flags, config_of, json_flag
from scheduler.config import ConfigError
from scheduler.nodes import Nodes
from scheduler.redis_client import connect

T = TypeVar("T")
_TEXT = """\
The nodes that this Tandem's Redis knows of.

  tandem node list                each node, its state, what it does now
  tandem node forget NAME         a decode node does not come back

Conversations lie on one decode node each. While a node is away, what may lie there is answered
with an error that names it, and lists say that it is missing. A node that is forgotten is missed no
more; if it comes back after all, its conversations are there again.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `node` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "node", help="which nodes there are", description=_TEXT, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="node_command", required=True, metavar="COMMAND")
    for name, text, run in (
        ("list", "each node, its state, what it does now", run_list),
        ("forget", "a decode node does not come back", run_forget),
    ):
        command = commands.add_parser(name, help=text, description=text)
        config_flags(command)
        json_flag(command)
        command.set_defaults(run=run)
        if name == "forget":
            command.add_argument("name", metavar="NAME", help="as `tandem node list` shows it")


def run_list(args: argparse.Namespace) -> int:
    """List the nodes that live, and the decode nodes that are missed."""
    seen = _ask(args, Nodes.survey)
    rows = [
        {"role": n.role, "name": n.name, "state": n.state, "host": n.host, "pid": n.pid}
        for n in seen.nodes
    ]
    rows += [{"role": "decode", "name": name, "state": "away"} for name in seen.away]
    if args.json:
        print(json.dumps({"nodes": rows}))
        return 0
    if not rows:
        print("no nodes: start them with `tandem up`")
        return 0
    table = Table("role", "name", "state", "host", box=None)
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in ("role", "name", "state", "host")))
    Console(highlight=False).print(table)
    return 0


def run_forget(args: argparse.Namespace) -> int:
    """Miss a decode node no more."""
    name = str(args.name)
    if any(node.name == name for node in _ask(args, lambda nodes: nodes.list("decode"))):
        raise ConfigError(f"decode node {name} is there: stop it first")
    if not _ask(args, lambda nodes: nodes.unknow(name)):
        raise ConfigError(f"no decode node {name} is missed: see `tandem node list`")
    print(json.dumps({"forgotten": name}) if args.json else f"{name} is forgotten")
    return 0


def _ask(args: argparse.Namespace, what: Callable[[Nodes], T]) -> T:
    client = connect(config_of(args).redis_url_of("api"), patience=0)
    try:
        return what(Nodes(client))
    except RedisError as error:
        raise ConfigError(f"Redis does not answer ({error}): is `tandem up` running?") from None
    finally:
        client.close()
