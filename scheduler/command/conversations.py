"""`tandem conversations`: list, show, rename, pin, fork, export, import and delete."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Table

from scheduler.command.client import Client, ClientError
from scheduler.command.flags import client_flags, client_of
from scheduler.command.printing import age, print_json
from scheduler.command.show import run_show

TITLE = "title"
"""The metadata key under which a conversation's name is kept."""

_TEXT = """\
List, show, rename, pin, fork, export, import and delete conversations.

  tandem conversations                 or: tandem conversations list
  tandem conversations show conv_77b0...
  tandem conversations rename conv_77b0... "Sky and sunset"
  tandem conversations pin conv_77b0...
  tandem conversations fork conv_77b0... --at resp_3f2a...
  tandem conversations export conv_77b0... sky.tandem
  tandem conversations import sky.tandem
  tandem conversations delete conv_77b0...

An exported file holds what was said, the exact token ids and the stored state, so that another
Tandem with the same model goes on without computing anything again.
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
        ("list", "list them, newest first, as without an action", run_list),
        ("show", "everything said in it", run_show_one),
        ("fork", "begin a new conversation with what was said in it", run_fork),
        ("export", "write it to a file, with token ids and state", run_export),
        ("import", "store a conversation from such a file", run_import),
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
        if name == "list":
            action.add_argument("--limit", type=int, metavar="N", help="at most N (30)")
        elif name != "import":
            action.add_argument("id", metavar="ID", help="conv_...")
        if name in ("export", "import"):
            action.add_argument("file", metavar="FILE", type=Path, help="the file")
        if name == "fork":
            action.add_argument("--at", metavar="RESPONSE", default=None, help="up to this answer")
        if name == "rename":
            action.add_argument("title", metavar="TITLE", help='"" takes the title away')
        if name == "delete":
            action.add_argument("--yes", action="store_true", default=False, help="do not ask")
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    """List conversations, newest first."""
    with client_of(args) as client:
        found, away = client.conversations(args.limit), client.away
    if away:
        names = ", ".join(away)
        print(f"decode node {names} is away: what lies there is not listed", file=sys.stderr)
    if args.json:
        return print_json({"object": "list", "data": found, "away": away})
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
            one["id"], _turns(facts), f"{facts['tokens']:,}", f"{facts['saved_tokens']:,}",
            age(now - facts["last_used"]), "yes" if facts["pinned"] else "",
            str(one["metadata"].get(TITLE, "")),
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)
    return 0


def _turns(facts: dict[str, Any]) -> str:
    """The number of turns; of one that has none yet, what it begins with."""
    first = facts.get("first_items", 0) if not facts["turns"] else 0
    return f"{facts['turns']} after {first} items" if first else str(facts["turns"])


def run_rename(args: argparse.Namespace) -> int:
    """Set or remove a conversation's title."""
    with client_of(args) as client:
        metadata = dict(_conversation(args, client)["metadata"])
        metadata.pop(TITLE, None)
        if args.title:
            metadata[TITLE] = args.title
        answer = client.update_conversation(args.id, metadata=metadata)
    return _tell(args, answer, f'titled "{args.title}"' if args.title else "has no title now")


def run_show_one(args: argparse.Namespace) -> int:
    """Show a conversation."""
    _check(args.id)
    return run_show(args)


def run_fork(args: argparse.Namespace) -> int:
    """Fork a conversation; print the new one's ID."""
    with client_of(args) as client:
        _conversation(args, client)
        made = client.fork_conversation(args.id, args.at)
    if args.json:
        return print_json(made)
    print(made["id"])
    past = made["forked_from"]["response"]
    print(
        f"it goes on after {past or 'what was put into it'} and has no turn of its own yet: "
        f'tandem resume {made["id"]} "..."',
        file=sys.stderr,
    )
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Export a conversation to a new file, for its user alone."""
    partial = args.file.with_name(f".{args.file.name}.part")
    with client_of(args) as client:
        _conversation(args, client)
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                size = client.export_conversation(args.id, file)
            os.link(partial, args.file)  # fails rather than replace a file
        except FileExistsError as error:
            raise ClientError(f"{args.file} exists already: give another name", 2) from error
        except OSError as error:
            raise ClientError(f"{args.file} cannot be written: {error.strerror}", 2) from error
        finally:
            partial.unlink(missing_ok=True)
    if args.json:
        return print_json({"id": args.id, "file": str(args.file), "bytes": size})
    print(f"{args.id}: {size:,} bytes in {args.file}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Import a conversation from a file, with a bar where somebody looks on."""
    with client_of(args) as client:
        try:
            quiet = not sys.stderr.isatty()
            console = Console(stderr=True)
            with progress.open(
                args.file, "rb", description="sending", disable=quiet, console=console
            ) as file:
                made = client.import_conversation(file)
        except OSError as error:
            raise ClientError(f"{args.file} cannot be read: {error.strerror}", 2) from error
    if args.json:
        return print_json(made)
    counts = made["imported"]
    print(f"{made['id']}: {counts['turns']} turns, {counts['states']} states, "
          f"{counts['bytes']:,} bytes stored")  # fmt: skip
    old = [was for was, now in counts.get("renamed", {}).items() if now == made["id"]]
    if old:
        print(f"its id in the file, {old[0]}, is taken: it and its responses have new ones")
    return 0


def run_pin(args: argparse.Namespace) -> int:
    """Pin a conversation."""
    return _pin(args, True)


def run_unpin(args: argparse.Namespace) -> int:
    """Unpin a conversation."""
    return _pin(args, False)


def run_delete(args: argparse.Namespace) -> int:
    """Delete a conversation, after asking where somebody can be asked."""
    with client_of(args) as client:
        turns = _conversation(args, client)["tandem"]["turns"]
        if not args.yes:
            if not sys.stdin.isatty():
                raise ClientError("nobody can be asked here: confirm with --yes", 2)
            if input(f"delete {args.id} with {turns} turns? [y/N] ").strip().lower() != "y":
                print("nothing deleted")
                return 1
        return _tell(args, client.delete_conversation(args.id), "deleted")


def _pin(args: argparse.Namespace, pinned: bool) -> int:
    with client_of(args) as client:
        answer = client.update_conversation(args.id, pinned=pinned)
    return _tell(args, answer, "pinned" if pinned else "no longer pinned")


def _check(ident: str) -> None:
    if not ident.startswith("conv_"):
        raise ClientError(f"{ident!r} is no conversation's ID: it begins with conv_", 2)


def _conversation(args: argparse.Namespace, client: Client) -> dict[str, Any]:
    _check(args.id)
    return client.conversation(args.id)


def _tell(args: argparse.Namespace, answer: dict[str, Any], what: str) -> int:
    if args.json:
        return print_json(answer)
    print(f"{answer['id']} {what}")
    return 0
