"""Requests for a simulated pipeline, from a trace, a table of lengths, or an exported history."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from scheduler.record import JobError, Priority
from scheduler.simulation import history, trace
from scheduler.simulation.cluster import Turn

#: Names that a column of a table may have. Times: seconds, or dates as ISO 8601 writes them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "at": ("at", "seconds", "arrival", "timestamp"),
    "prompt": ("prompt_tokens", "input_tokens", "input_length", "contexttokens"),
    "output": ("output_tokens", "output_length", "generatedtokens"),
    "previous": ("previous",),
    "cached": ("cached_tokens",),
    "owner": ("owner",),
    "priority": ("priority",),
}


def load(path: Path, part: float = 1.0, seed: int = 0) -> list[Turn]:
    """The requests of a file, in order of arrival, numbered from 0.

    `*.csv` is a table of lengths; JSON lines are Mooncake's (`hash_ids`) or an exported history.
    `part`: a random part of the conversations, chosen by `seed`, each with all its turns. Raises
    JobError naming file and line.
    """
    if path.suffix.lower() == ".csv":
        turns = _table(path)
    elif _is_history(path):
        turns = from_history(history.read(path), recorded=False)
    else:
        turns = from_trace(trace.read(path))
    return turns if part >= 1 else thin(turns, part, seed)


def thin(turns: Sequence[Turn], part: float, seed: int) -> list[Turn]:
    """A random `part` of the conversations. Raises JobError where nothing is left."""
    chance = random.Random(seed)
    root: dict[int, int] = {}
    kept: dict[int, bool] = {}
    numbers: dict[int, int] = {}
    chosen: list[Turn] = []
    for turn in turns:
        before = turn.previous
        root[turn.number] = turn.number if before is None else root[before]
        if root[turn.number] not in kept:
            kept[root[turn.number]] = chance.random() < part
        if kept[root[turn.number]]:
            numbers[turn.number] = len(chosen)
            turn.previous = None if before is None else numbers[before]
            turn.number = len(chosen)
            chosen.append(turn)
    if not chosen:
        raise JobError(f"nothing is left of the trace at a part of {part:g}: choose a larger one")
    return chosen


def from_trace(requests: Sequence[trace.Request]) -> list[Turn]:
    """Turns of a Mooncake trace.

    A request continues the latest earlier one whose whole blocks begin its own: what a state can be
    of use for, which a common beginning of two prompts is not.
    """
    ends: dict[int, int] = {}
    turns: list[Turn] = []
    for number, request in enumerate(requests):
        whole = request.tokens // trace.BLOCK
        # The first block is common to all, as a system prompt is.
        found = (ends.get(block) for block in reversed(request.blocks[1:whole]))
        previous = next((n for n in found if n is not None), None)
        if previous is not None and turns[previous].prompt >= request.tokens:
            previous = None
        turns.append(
            Turn(number, request.at, max(2, request.tokens), max(1, request.output_tokens))
        )
        turns[-1].previous = previous
        if whole > 1:
            ends[request.blocks[whole - 1]] = number
    return turns


def from_history(pasts: Sequence[history.Past], *, recorded: bool = True) -> list[Turn]:
    """Turns of an exported history.

    `recorded`: each begins at the stage and finds as many tokens as it did then. Otherwise the
    simulator decides both.
    """
    numbers = {past.id: number for number, past in enumerate(pasts)}
    turns = []
    for number, past in enumerate(pasts):
        turn = Turn(
            number,
            past.at,
            past.prompt_tokens,
            max(1, past.output_tokens),
            str(past.owner),
            past.priority,
            numbers.get(past.previous) if past.previous is not None else None,
        )
        if turn.previous is not None and turn.previous >= number:
            turn.previous = None
        if recorded:
            turn.cached = past.cached_tokens
            turn.stage = past.stage
        elif turn.previous is None:
            turn.cached = past.cached_tokens
        turns.append(turn)
    return turns


def is_queue_trace(path: Path) -> bool:
    """Whether a file can be a trace for one queue alone: neither a table nor a history."""
    return path.suffix.lower() != ".csv" and not _is_history(path)


def _is_history(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), ""))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "prompt_tokens" in first and "times" in first


def _table(path: Path) -> list[Turn]:
    try:
        # Spreadsheets begin a file with a mark, and some separate by semicolons.
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            separator = max(",;\t", key=head.count)
            file.seek(0)
            rows = list(csv.DictReader(file, delimiter=separator))
    except OSError as error:
        raise JobError(f"the table {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"the table {path} cannot be read: {error}") from None
    if not rows:
        raise JobError(f"{path} holds no requests")
    have = {str(name).strip().lower(): name for name in rows[0]}
    columns = {
        key: next((have[alias] for alias in aliases if alias in have), None)
        for key, aliases in COLUMNS.items()
    }
    for key in ("at", "prompt", "output"):
        if columns[key] is None:
            raise JobError(f"{path} has no column {' or '.join(COLUMNS[key])}")
    turns = []
    for line, row in enumerate(rows, 2):
        try:
            turns.append(_row({k: row[c] for k, c in columns.items() if c and row[c]}))
        except KeyError as error:
            names = " or ".join(COLUMNS[str(error.args[0])])
            raise JobError(f"{path}, line {line}: no {names}") from None
        except (ValueError, TypeError) as error:
            raise JobError(f"{path}, line {line}: not a request ({error})") from None
    first = min(turn.at for turn in turns)
    order = sorted(range(len(turns)), key=lambda k: (turns[k].at, k))
    numbers = {old: new for new, old in enumerate(order)}
    found = []
    for new, old in enumerate(order):
        turn = turns[old]
        turn.number, turn.at = new, turn.at - first
        if turn.previous is not None:
            before = numbers.get(turn.previous)
            if before is None or before >= new:
                raise JobError(f"{path}, line {old + 2}: it continues no earlier request")
            turn.previous = before
        found.append(turn)
    return found


def _row(row: dict[str, Any]) -> Turn:
    """A row by its columns. Raises KeyError for one that is empty, ValueError for a wrong one."""
    prompt, output = int(row["prompt"]), int(row["output"])
    if prompt < 1 or output < 0:
        raise ValueError(f"{prompt} tokens of prompt and {output} of answer")
    at = _moment(row["at"])
    turn = Turn(0, at, max(2, prompt), max(1, output))
    turn.owner = str(row.get("owner", ""))
    turn.priority = str(row.get("priority", "normal")).strip()
    if turn.priority not in get_args(Priority):
        raise ValueError(f"priority {turn.priority}, not {', '.join(get_args(Priority))}")
    turn.cached = int(row.get("cached", -1))
    if turn.cached > prompt:
        raise ValueError(f"{turn.cached} of {prompt} tokens held")
    previous = int(row.get("previous", -1))
    turn.previous = previous if previous >= 0 else None
    return turn


def _moment(text: str) -> float:
    """Seconds, from a number or a date. Raises ValueError."""
    try:
        at = float(text)
    except ValueError:
        at = datetime.fromisoformat(text.strip()).timestamp()
    if not math.isfinite(at):
        raise ValueError(f"time {text}")
    return at
