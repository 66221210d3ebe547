"""What commands print in the same way: JSON, lengths of time, and what was said."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console


def out() -> Console:
    """Standard output: a terminal gets what fits, a pipe whole lines."""
    terminal = sys.stdout.isatty()
    return Console(highlight=False, width=None if terminal else 240, soft_wrap=not terminal)


def print_json(value: Any) -> int:
    """Print one JSON object; returns exit status 0."""
    print(json.dumps(value, ensure_ascii=False, indent=2))
    return 0


def age(seconds: float) -> str:
    """A length of time in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def place(facts: dict[str, Any]) -> str:
    """Where a response that waits or is prefilled is, from its field `tandem`; else nothing."""
    if facts["stage"] == "queued":
        before = facts["queue_position"]
        where = "next" if before == 0 else f"{before} before" if before else ""
        start = facts["predicted_start_s"]
        return f"{where}, in about {start:.0f} s" if where and start >= 1 else where
    if facts["stage"] == "prefilling":
        return f"{100 * facts['prefill']['done'] // max(1, facts['prefill']['total'])} %"
    return ""


def print_items(console: Console, items: list[dict[str, Any]]) -> None:
    """Print the items of a conversation, each under who said it."""
    for item in items:
        role = item.get("role") or item["type"]
        parts = item.get("content") or item.get("output") or item.get("arguments") or ""
        text = parts if isinstance(parts, str) else "".join(_shown(part) for part in parts)
        console.print(f"\n[{role}]", style="bold", markup=False)
        console.print(text, markup=False)


def _shown(part: dict[str, Any]) -> str:
    return "[image]" if part.get("type") == "input_image" else str(part.get("text") or "")
