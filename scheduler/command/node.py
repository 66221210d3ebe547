"""`tandem node`: which nodes there are, and that one does not come back."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from scheduler.command import balance
from scheduler.command.flags import config_flags, config_of, json_flag, no_redis
from scheduler.config import ConfigError
from scheduler.homes import DRAINED, Homes, store_of, successor
from scheduler.host.agent import Machine
from scheduler.nodes import Node, Nodes
from scheduler.redis_client import connect
from store.errors import StoreError, StoreUnavailable

T = TypeVar("T")
PATIENCE = 900.0
"""Seconds that one conversation may take."""
_TEXT = """\
The nodes that this Tandem's Redis knows of.

  tandem node list                each node, its state, what it does now
  tandem node move ID --to NAME   bring an idle conversation to another decode node
  tandem node drain NAME          bring all of its idle conversations to others, and begin no
                                  new ones there until it restarts (or drain NAME --undo)
  tandem node balance             bring idle conversations from full stores to others
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
        ("move", "bring an idle conversation, with its state, to another decode node", run_move),
        (
            "drain",
            "bring a decode node's idle conversations to others; begin none there",
            run_drain,
        ),
        ("balance", "bring idle conversations from full stores to others", run_balance),
        ("forget", "a decode node does not come back", run_forget),
    ):
        whole = balance.TEXT if name == "balance" else text
        command = commands.add_parser(name, help=text, description=whole, formatter_class=raw)
        config_flags(command)
        json_flag(command)
        command.set_defaults(run=run)
        if name == "move":
            command.add_argument("id", metavar="ID", help="conv_...")
            command.add_argument("--to", metavar="NAME", required=True, help="the new home")
        if name == "drain":
            command.add_argument("--to", metavar="NAME", help="there (whichever has most room)")
            command.add_argument("--undo", action="store_true", help="begin new ones there again")
        if name == "balance":
            balance.flags(command)
        if name in ("forget", "drain"):
            command.add_argument("name", metavar="NAME", help="as `tandem node list` shows it")


def run_list(args: argparse.Namespace) -> int:
    """List the nodes that live, and those that are missed."""
    seen, machines = _with(args, lambda client: (Nodes(client).survey(), Machine.all(client)))
    rows = [
        {
            "role": n.role,
            "name": n.name,
            "host": n.host,
            "pid": n.pid,
            "state": DRAINED if n.state == "ready" and n.facts.get(DRAINED) else n.state,
        }
        for n in seen.nodes
    ]
    # A process that hangs reports nothing; its machine still tells what it runs.
    rows += [
        {"role": role, "name": one.node, "host": one.host, "state": "away"}
        for one in machines
        for role in one.silent(seen.nodes)
    ]
    told = {row["name"] for row in rows if row["role"] == "decode"}
    rows += [
        {"role": "decode", "name": name, "state": "away"} for name in seen.away if name not in told
    ]
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


def run_move(args: argparse.Namespace) -> int:
    """Move one conversation."""
    done = _with(args, lambda client: _move(client, str(args.id), str(args.to)))
    if args.json:
        print(json.dumps(done))
    else:
        print(
            f"{args.id}: {done['from']} -> {done['to']}, {done['turns']} turns, "
            f"{done['states']} states, {done['bytes']:,} bytes in {done['seconds']} s"
        )
    return 0


def _move(client: redis.Redis, ident: str, to: str) -> dict[str, Any]:
    home = Homes(client).of(ident)
    for node in Nodes(client).list("decode"):
        if home in ("", node.name):
            with closing(store_of(node, PATIENCE)) as store:
                if store.get_conversation(ident) is not None:
                    found: dict[str, Any] = store.call("move_conversation", ident=ident, to=to)
                    return found
    where = (
        f"decode node {home} does not have it, or is away" if home else "it may have been deleted"
    )
    raise ConfigError(f"{ident} is on no decode node that is there: {where}")


def run_drain(args: argparse.Namespace) -> int:
    """Move everything that is idle on a node; 1 where something stayed."""
    if args.undo:
        _with(args, lambda client: _undo(client, str(args.name)))
        print(json.dumps({"undone": args.name}) if args.json else f"{args.name} takes new ones")
        return 0
    moved, stayed = _with(args, lambda client: _drain(client, str(args.name), args.to or ""))
    if args.json:
        print(json.dumps({"moved": moved, "stayed": stayed}))
    else:
        print(f"{moved} conversations moved, {stayed} stayed")
    return 1 if stayed else 0


def _undo(client: redis.Redis, name: str) -> None:
    with closing(store_of(_there(Nodes(client), name), PATIENCE)) as store:
        store.call("take_new", yes=True)


def _there(nodes: Nodes, name: str) -> Node:
    node = nodes.get("decode", name)
    if node is None:
        raise ConfigError(f"no decode node {name} is there: see `tandem node list`")
    return node


def _drain(client: redis.Redis, name: str, to: str) -> tuple[int, int]:
    nodes, homes = Nodes(client), Homes(client)
    node = _there(nodes, name)
    if not to and successor(nodes.list("decode"), name, node.fingerprint) is None:
        raise ConfigError("no other decode node of the same model is ready")
    moved = stayed = 0
    before: tuple[str, float] | None = None
    status = Console(stderr=True).status("looking")
    with closing(store_of(node, PATIENCE)) as store, status:
        store.call("take_new", yes=False)
        while page := store.list_conversations(None, 100, None, before):
            before = (page[-1]["id"], float(page[-1]["created"]))
            known = homes.of_all([one["id"] for one in page])
            for one, home in zip(page, known, strict=True):
                if home not in ("", name):
                    continue
                heir = successor(nodes.list("decode"), name, node.fingerprint)
                if not to and heir is None:
                    raise ConfigError("no other decode node of the same model is ready")
                goes = to or (heir.name if heir is not None else "")
                try:
                    store.call("move_conversation", ident=one["id"], to=goes)
                    moved += 1
                except StoreUnavailable:
                    raise
                except StoreError as error:
                    stayed += 1
                    print(f"{one['id']} stays: {error}", file=sys.stderr)
                status.update(f"{moved} moved, {stayed} stayed")
    return moved, stayed


def run_balance(args: argparse.Namespace) -> int:
    """Even out the stores; 1 where something that was to move stayed."""
    return _with(args, lambda client: balance.balance(client, args))


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
    return _with(args, lambda client: what(Nodes(client)))


def _with(args: argparse.Namespace, what: Callable[[redis.Redis], T]) -> T:
    config = config_of(args)
    client = connect(config.redis_url_of("api"), patience=0)
    try:
        return what(client)
    except StoreError as error:
        raise ConfigError(str(error)) from None
    except RedisError as error:
        raise ConfigError(no_redis(config, error)) from None
    finally:
        client.close()
