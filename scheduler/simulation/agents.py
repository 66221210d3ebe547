"""A workload of coding agents: long turns of a main agent, sub-agents, and tiny prompts between.

Built from recorded agent sessions (JSONL, one call a line: timestamp in microseconds, input). What
is new in a call is what the call before it in its session did not have; sessions share the text
that all of them begin with. Text counts as a token for every four characters.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.record import JobError
from scheduler.simulation.trace import LEAST, Arrival

#: Largest prompt that counts as tiny (a title, a summary, a classification), in tokens.
TINY = 256
_CHARACTERS = 4
#: A main agent reads whole files: its turns are that much longer than a sub-agent's.
_MAIN = 12
_TINY_SHARE, _SUB_SHARE = 0.80, 0.15


@dataclass(frozen=True, slots=True)
class Session:
    """Calls of one agent: seconds since its first call, and new tokens of each."""

    at: tuple[float, ...]
    new: tuple[int, ...]


def sessions(folder: Path) -> list[Session]:
    """The sessions of a folder. Raises JobError where there are fewer than two."""
    recorded: list[list[tuple[float, str]]] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            calls = sorted((float(row["timestamp"]) / 1e6, str(row["input"])) for row in rows)
        except (OSError, ValueError, KeyError, TypeError):
            raise JobError(f"{path} is not a recorded agent session") from None
        if calls:
            recorded.append(calls)
    if len(recorded) < 2:
        raise JobError(f"{folder} holds fewer than two recorded agent sessions")
    preamble = _shared([calls[0][1] for calls in recorded])
    found = []
    for calls in recorded:
        before, new = preamble, []
        for _, text in calls:
            known = len(_shared([before, text]))
            new.append(max(LEAST, (len(text) - known) // _CHARACTERS))
            before = text
        found.append(Session(tuple(at - calls[0][0] for at, _ in calls), tuple(new)))
    return found


def arrivals(
    recorded: Sequence[Session], *, load: float, rate: float, seconds: float, seed: int
) -> list[Arrival]:
    """About `seconds` of mixed agents that keep a node of `rate` tokens/s busy to `load`."""
    chance = random.Random(seed)
    main = max(recorded, key=lambda session: sum(session.new))
    budget, found = load * rate * seconds, list[Arrival]()
    while budget > 0:
        start, kind = chance.uniform(0, seconds), chance.random()
        if kind < _TINY_SHARE:
            fresh = [Arrival(start, chance.randint(LEAST, TINY), 16)]
        else:
            sub = kind < _TINY_SHARE + _SUB_SHARE
            session, factor = (chance.choice(recorded), 1) if sub else (main, _MAIN)
            fresh = [
                Arrival(start + at * factor, new * factor, 256)
                for at, new in zip(session.at, session.new, strict=True)
            ]
        budget -= sum(arrival.new for arrival in fresh)
        found += fresh
    return sorted(found, key=lambda arrival: arrival.at)


def _shared(texts: list[str]) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071  # texts, not paths
