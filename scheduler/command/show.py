"""`tandem show`: one response and what it cost, or one conversation and what was said in it."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rich.table import Table

from scheduler.command import watch
from scheduler.command.client import Client
from scheduler.command.flags import client_flags, client_of
from scheduler.command.printing import out, place, print_items, print_json

_ANSWER = re.compile(r"msg_([0-9a-f]{32})(?:_\d+)?")
_SHOW = """\
Show a response (resp_...) with where it is and what it cost, or a conversation (conv_...) with
everything said in it.

  tandem show resp_3f2a...
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add show to the command line."""
    parser = subparsers.add_parser(
        "show",
        help="show a response or a conversation",
        description=_SHOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    client_flags(parser)
    parser.add_argument("id", metavar="ID", help="resp_... or conv_...")
    parser.add_argument("--wait", action="store_true", help="wait for a response's end first")
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Show one response or one conversation."""
    with client_of(args) as client:
        if args.id.startswith("conv_"):
            return _show_conversation(args, client)
        if args.wait:
            watch.wait(client, args.id, watch.stderr(), to_end=True)
        response = client.retrieve(args.id)
        if args.json:
            return print_json(response)
        inputs = client.input_items(args.id)
    facts = response["tandem"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "id": response["id"],
        "status": " ".join(filter(None, [response["status"], _reason(response)])),
        "stage": " ".join(filter(None, [facts["stage"], place(facts)])),
        "conversation": (response["conversation"] or {}).get("id", ""),
        "continues": response["previous_response_id"] or "",
        "prompt": f"{facts['prompt_tokens']:,} tokens, {facts['cached_tokens']:,} cached, "
        f"{facts['new_tokens']:,} new",
        "path": facts["path"] or "",
        "hand-off": _handoff(facts["handoff"]),
        "times": ", ".join(
            f"{k} {v:.2f} s" for k, v in sorted(facts["times"].items(), key=lambda item: item[1])
        ),
        "attempts": ", ".join(f"{count} {stage}" for stage, count in facts["attempts"].items()),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    console = out()
    console.print(table)
    print_items(console, [*inputs, *response["output"]])
    return 0


def _show_conversation(args: argparse.Namespace, client: Client) -> int:
    conversation, items = client.conversation(args.id), client.items(args.id)
    if args.json:
        return print_json({**conversation, "items": items})
    facts = conversation["tandem"]
    console = out()
    told = (
        f"{facts['turns']} turns, {facts['tokens']:,} tokens, {facts['saved_bytes']:,} bytes "
        f"saved; newest: {facts['head'] or 'none'}"
    )
    if not facts["turns"] and items:
        told = f"no turn of its own yet; begins with {len(items)} items"
        if past := _continued(items):
            told += f", a fork that goes on after {past}"
    console.print(f"{conversation['id']}  {told}", markup=False)
    print_items(console, items)
    return 0


def _continued(items: list[dict[str, Any]]) -> str:
    """The response whose answer is the last one among items: its id is in theirs. Else nothing."""
    found = [_ANSWER.fullmatch(str(item.get("id"))) for item in items if item.get("role") != "user"]
    return next((f"resp_{match[1]}" for match in reversed(found) if match), "")


def _reason(response: dict[str, Any]) -> str:
    if response["error"]:
        return f"({response['error']['message']})"
    details = response["incomplete_details"]
    return f"({details['reason']})" if details else ""


def _handoff(facts: dict[str, Any] | None) -> str:
    if not facts or facts.get("path") in (None, "none"):
        return ""
    return f"{facts.get('bytes', 0):,} bytes in {facts.get('seconds', 0):.3f} s by {facts['path']}"
