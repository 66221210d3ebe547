"""`tandem conversations`: list, rename, pin and delete what is stored."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.command.client import Client, ClientError
from scheduler.command.jobs import age, client_flags, client_for, print_json

TITLE = "title"
"""The metadata key under which a conversation's name is kept."""

_TEXT = """\
List, rename, pin and delete conversations. `tandem show ID` shows one with everything said in it;
`tandem store export` and `tandem store import` move conversations with their state.

  tandem conversations
  tandem conversations rename conv_77b0... "Sky and sunset"
  tandem conversations pin conv_77b0...
  tandem conversations delete conv_77b0...
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tandem conversations`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "conversations", help="list and keep conversations", description=_TEXT, formatter_class=raw
    )
    client_flags(parser)
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="at most N (30)")
    parser.set_defaults(run=run_list)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for name, summary, run in (
        ("rename", "give it a title", run_rename),
        ("pin", "keep its state whatever else is evicted", run_pin),
        ("unpin", "let its state be evicted again", run_unpin),
        ("delete", "delete it with everything in it", run_delete),
    ):
        # Flags may stand before the action as well: what is not given here leaves those alone.
        action = actions.add_parser(
            name, help=summary, description=summary, argument_default=argparse.SUPPRESS
        )
        client_flags(action)
        action.add_argument("id", metavar="ID", help="conv_...")
        if name == "rename":
            action.add_argument("title", metavar="TITLE", help='"" takes the title away')
        if name == "delete":
            action.add_argument("--yes", action="store_true", default=False, help="do not ask")
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    """List conversations, newest first."""
    with client_for(args) as client:
        found = client.conversations(args.limit)
    if args.json:
        return print_json({"object": "list", "data": found})
    if not found:
        print("no conversations")
        return 0
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "turns", "tokens", "saved", "used", "pinned", "title"):
        table.add_column(name, no_wrap=True, overflow="fold")
    now = time.time()
    for one in found:
        facts = one["tandem"]
        table.add_row(
            one["id"], str(facts["turns"]), f"{facts['tokens']:,}", f"{facts['saved_tokens']:,}",
            age(now - facts["last_used"]), "yes" if facts["pinned"] else "",
            str(one["metadata"].get(TITLE, "")),
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)
    return 0


def run_rename(args: argparse.Namespace) -> int:
    """Set or remove a conversation's title."""
    with client_for(args) as client:
        metadata = dict(_conversation(args, client)["metadata"])
        metadata.pop(TITLE, None)
        if args.title:
            metadata[TITLE] = args.title
        return _tell(args, client.update_conversation(args.id, metadata=metadata))


def run_pin(args: argparse.Namespace) -> int:
    """Pin a conversation."""
    return _pin(args, True)


def run_unpin(args: argparse.Namespace) -> int:
    """Unpin a conversation."""
    return _pin(args, False)


def run_delete(args: argparse.Namespace) -> int:
    """Delete a conversation, after asking where somebody can be asked."""
    with client_for(args) as client:
        turns = _conversation(args, client)["tandem"]["turns"]
        if not args.yes:
            if not sys.stdin.isatty():
                raise ClientError("nobody can be asked here: confirm with --yes", 2)
            if input(f"delete {args.id} with {turns} turns? [y/N] ").strip().lower() != "y":
                print("nothing deleted")
                return 1
        return _tell(args, client.delete_conversation(args.id))


def _pin(args: argparse.Namespace, pinned: bool) -> int:
    with client_for(args) as client:
        return _tell(args, client.update_conversation(args.id, pinned=pinned))


def _conversation(args: argparse.Namespace, client: Client) -> dict[str, Any]:
    if not args.id.startswith("conv_"):
        raise ClientError(f"{args.id!r} is no conversation's ID: it begins with conv_", 2)
    return client.conversation(args.id)


def _tell(args: argparse.Namespace, answer: dict[str, Any]) -> int:
    if args.json:
        return print_json(answer)
    print(f"{answer['id']} {'deleted' if answer.get('deleted') else 'changed'}")
    return 0
