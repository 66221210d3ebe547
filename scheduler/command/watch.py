"""Following one response in a terminal: where it is while it waits, its text as it comes."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler.command.client import Client

POLL = 0.2
_BEFORE_TEXT = ("queued", "prefilling", "handing_off")
_WORDS = {
    "queued": "waiting",
    "prefilling": "prefill",
    "handing_off": "hand-off",
    "decoding": "decode",
}


def follow(client: Client, response: str, out: TextIO, console: Console) -> dict[str, Any]:
    """Show a response's progress on `console` and its text on `out`; return it as it ended."""
    wait(client, response, console)
    ended: dict[str, Any] = {}
    wrote = False
    for event in client.events(response):
        if event["type"] == "response.output_text.delta":
            out.write(event["delta"])
            out.flush()
            wrote = True
        ended = event.get("response") or ended
    if wrote:
        out.write("\n")
        out.flush()
    return ended


def wait(client: Client, response: str, console: Console, *, to_end: bool = False) -> None:
    """Show the stage of a response until its text begins, or with `to_end` until it has ended."""
    bar = Progress(
        TextColumn("{task.fields[stage]:<10}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=1, stage="waiting", note="")
        while True:
            now = client.retrieve(response, patient=True)
            facts = now["tandem"]
            stage = facts["stage"]
            if stage not in _BEFORE_TEXT and not (to_end and stage == "decoding"):
                return
            done, total = facts["prefill"]["done"], facts["prefill"]["total"]
            known = total - facts["new_tokens"]
            bar.update(
                task,
                total=max(1, total),
                completed=max(done, known),
                stage=_WORDS[stage],
                note=note(facts),
            )
            time.sleep(POLL)


def note(facts: dict[str, Any]) -> str:
    """What there is to say about a response that has not ended, in a few words."""
    stage = facts["stage"]
    done, total = facts["prefill"]["done"], facts["prefill"]["total"]
    if stage == "queued":
        before = facts["queue_position"]
        place = "next" if before == 0 else f"{before} before it" if before else "starting"
        start = facts.get("predicted_start_s")
        when = f", starts in about {start:.0f} s" if start and start >= 1 else ""
        return f"{place}{when}, {facts['new_tokens']:,} new of {total:,} tokens"
    if stage in ("prefilling", "handing_off"):
        return f"{100 * done // max(1, total)} % of {total:,} tokens"
    return ""


def summary(response: dict[str, Any]) -> str:
    """One line about an ended response, and how to go on from it."""
    facts, usage = response["tandem"], response.get("usage") or {}
    parts = [f"{response['id']} {response['status']}"]
    if reason := (response.get("incomplete_details") or {}).get("reason"):
        parts[0] += f" ({reason})"
    if usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        parts.append(f"{usage['input_tokens']:,} prompt tokens, {cached:,} of them cached")
        parts.append(f"{usage['output_tokens']:,} written")
    times = facts["times"]
    if "first_token" in times:
        parts.append(f"first token after {times['first_token']:.2f} s")
    return "; ".join(parts)


def stderr() -> Console:
    """A console on standard error, so that standard output holds the answer alone."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)
