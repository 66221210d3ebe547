"""The demo's verdict as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(outcome: dict[str, Any], console: Console) -> None:
    """Print cold against resumed, and whether the answers are those of one machine alone."""
    cold, resumed = outcome["cold"], outcome["resume"]
    table = Table(title=None, show_edge=False, pad_edge=False, box=None, padding=(0, 2))
    for name in ("", "cold", "resumed"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("prompt tokens", f"{cold['prompt_tokens']:,}", f"{resumed['prompt_tokens']:,}")
    table.add_row(
        "tokens computed", f"{cold['computed_tokens']:,}", f"{resumed['computed_tokens']:,}"
    )
    table.add_row(
        "time to first token", f"{cold['ttft_seconds']:.2f} s", f"{resumed['ttft_seconds']:.2f} s"
    )
    table.add_row("state came by", f"{cold['path']}, {outcome['handoff']['path']}", resumed["path"])
    table.add_row("answer equals solo", _word(cold["equal_solo"]), _word(resumed["equal_solo"]))
    console.print()
    console.print(table)
    console.print(
        f"\nstate saved: {outcome['saved']['bytes']:,} bytes for "
        f"{outcome['saved']['tokens']:,} tokens; resumed in "
        f"{resumed['ttft_resumed_vs_cold']:.1%} of the cold time to first token; the new turn had "
        f"{resumed['new_tokens']} tokens, {resumed['computed_tokens']} were computed"
    )
    if outcome["ok"]:
        console.print("[green]everything as promised[/]")
    else:
        console.print("[red]NOT as promised: see the table and --json[/]")


def _word(value: bool) -> str:
    return "yes" if value else "NO"
