"""`tandem node balance`: even out what decode nodes have stored, and show what is done and why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import redis
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from scheduler.balance import ABOVE, BAND, Holder, Move
from scheduler.balancing import Balancing, Done
from scheduler.config import ConfigError

GB = 1e9
_SHOWN = 10
TEXT = f"""\
Bring idle conversations from decode nodes whose stores are full to others that have room.

The least recently used go first; pinned ones, those with an answer under way, and those used
lately stay. A node whose slots or memory are all in use is given nothing. Stores whose shares in
use differ by {BAND:.0%} or less are even. Each conversation moves whole or not at all: after an
interruption the same command plans again from what is there, and goes on.

  tandem node balance --dry-run        what would move, and why
  tandem node balance --gb 20          up to 20 GB in this run
  tandem node balance --above 0        also where no store is half full
"""


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command, beside those of all `tandem node` commands."""
    parser.add_argument("--dry-run", action="store_true", help="show the plan and move nothing")
    parser.add_argument(
        "--gb", type=float, default=4.0, metavar="N", help="move at most N GB in this run (4)"
    )
    parser.add_argument(
        "--above", type=float, default=100 * ABOVE, metavar="PERCENT",
        help=f"only from stores that are fuller than this ({100 * ABOVE:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--idle", type=float, default=600.0, metavar="SECONDS",
        help="only what nobody has used for so long (600)",
    )  # fmt: skip


def balance(client: redis.Redis, args: argparse.Namespace) -> int:
    """Plan, show, move; 1 where something that was planned stayed. Raises ConfigError."""
    if not 0 < args.gb < 1e6 or not 0 <= args.above < 100 or not args.idle >= 0:
        raise ConfigError("--gb is above 0, --above from 0 to below 100, --idle 0 or more")
    work = Balancing(client, limit=int(args.gb * GB), above=args.above / 100, idle=args.idle)
    holders = work.holders()
    away = dict(work.away)
    if len(holders) < 2:
        left = "".join(f"; {name} is left out: {why}" for name, why in away.items())
        raise ConfigError(
            f"there are no two decode nodes that are ready: see `tandem node list`{left}"
        )
    moves = work.plan(holders)
    if not args.json:
        for name, why in away.items():
            print(f"{name} is left out: {why}")
        _show(holders, moves, args.above / 100)
    done: list[Done] = []
    cut = False
    if moves and not args.dry_run:
        try:
            _run(work, moves, done, quiet=args.json)
        except KeyboardInterrupt:
            cut = True
    told = [one for one in done if one.moved is not None]
    stayed = [one for one in done if one.moved is None]
    if args.json:
        print(json.dumps({**_plain(holders, moves, done, cut, args.dry_run), "not_asked": away}))
    elif moves and not args.dry_run:
        nbytes = sum(int(one.moved["bytes"]) for one in told if one.moved is not None)
        print(f"{len(told)} conversations moved, {nbytes / GB:,.3f} GB; {len(stayed)} stayed")
    if cut:
        print("interrupted: what has moved is there; run it again to go on", file=sys.stderr)
        return 130
    return 1 if stayed else 0


def _run(work: Balancing, moves: Sequence[Move], done: list[Done], *, quiet: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True, highlight=False)
    shown, said = console.is_terminal and not quiet, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("moving", total=sum(move.kept.nbytes for move in moves))

        def told(one: Done) -> None:
            nonlocal said
            done.append(one)
            bar.advance(task, one.move.kept.nbytes)
            bar.update(task, description=f"{len(done)} of {len(moves)}")
            if one.moved is None and not quiet:
                print(f"{one.move.kept.conversation} stays: {one.why}", file=sys.stderr)
            if not shown and not quiet and time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{len(done)} of {len(moves)}", file=sys.stderr)

        work.run(moves, told)


def _show(holders: Sequence[Holder], moves: Sequence[Move], above: float) -> None:
    console = Console(highlight=False)
    table = Table("node", "store", "", "memory", "rows", box=None)
    for one in holders:
        table.add_row(
            one.name,
            f"{one.stored / one.size:.1%}",
            f"of {one.size / GB:,.2f} GB",
            f"{one.memory / one.memory_limit:.0%}" if one.memory_limit else "",
            f"{one.rows}/{one.slots}" if one.slots else "",
        )
    console.print(table)
    for one in holders:
        if one.why_not:
            console.print(f"{one.name} is given nothing: {one.why_not}")
    if not moves:
        console.print(f"\n{_reason(holders, above)}")
        return
    ways = Counter((move.kept.node, move.to) for move in moves)
    for (came, to), count in sorted(ways.items()):
        nbytes = sum(m.kept.nbytes for m in moves if (m.kept.node, m.to) == (came, to))
        console.print(f"\n{came} -> {to}: {count} conversations, {nbytes / GB:,.3f} GB of state")
    for move in moves[:_SHOWN]:
        console.print(f"  {move.kept.conversation}  {move.kept.nbytes / 1e6:,.1f} MB")
    if len(moves) > _SHOWN:
        console.print(f"  and {len(moves) - _SHOWN} more")


def _reason(holders: Sequence[Holder], above: float) -> str:
    """Why nothing is to move."""
    full = [one for one in holders if one.stored > above * one.size]
    if not full:
        return f"nothing to move: no store is fuller than {above:.0%}"
    if all(one.why_not for one in holders if one not in full) and len(full) < len(holders):
        return "nothing to move: no other node can be given anything now"
    shares = [one.stored / one.size for one in holders]
    if max(shares) - min(shares) <= BAND:
        return "nothing to move: the stores are even"
    return "nothing to move: what is idle is pinned, was used lately, or does not fit"


def _plain(
    holders: Sequence[Holder], moves: Sequence[Move], done: Sequence[Done], cut: bool, dry: bool
) -> dict[str, Any]:
    return {
        "nodes": [{**asdict(one), "given_nothing": one.why_not} for one in holders],
        "plan": [
            {
                "conversation": move.kept.conversation,
                "from": move.kept.node,
                "to": move.to,
                "bytes": move.kept.nbytes,
                "last_used": move.kept.used,
            }
            for move in moves
        ],
        "dry_run": dry,
        "interrupted": cut,
        "moved": [one.moved for one in done if one.moved is not None],
        "stayed": [
            {"conversation": one.move.kept.conversation, "why": one.why}
            for one in done
            if one.moved is None
        ],
    }
