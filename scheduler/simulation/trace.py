"""Request traces: reading them, thinning them to a load, and what is new in each prompt."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.record import JobError

#: Tokens that one hash id of the trace stands for.
BLOCK = 512
#: Least work of a request: its last tokens are always computed.
LEAST = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace. `at`: seconds; `tokens`: prompt length; `blocks`: hashes of its blocks,
    each of which names the whole prefix up to it."""

    at: float
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    @property
    def lineage(self) -> int:
        """What tells conversations apart: the second block (the first is often shared by all)."""
        return self.blocks[1] if len(self.blocks) > 1 else self.blocks[0]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the prefill node sees it: only `new` tokens are to be computed."""

    at: float
    new: int
    output_tokens: int


def read(path: Path) -> list[Request]:
    """Requests of a JSONL trace (timestamp in ms, input_length, output_length, hash_ids), by time.

    Raises JobError, naming the line that is not one.
    """
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise JobError(f"the trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise JobError(f"the trace {path} cannot be read: it is no text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            request = Request(
                at=float(raw["timestamp"]) / 1000,
                tokens=int(raw["input_length"]),
                output_tokens=int(raw["output_length"]),
                blocks=tuple(int(block) for block in raw["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            request = None
        if (
            request is None
            or not request.blocks
            or request.tokens < 1
            or not math.isfinite(request.at)
        ):
            raise JobError(f"{path}, line {number}: not a request of a trace")
        requests.append(request)
    if len(requests) < 2:
        raise JobError(f"{path} holds no trace: at least two requests are needed")
    return sorted(requests, key=lambda request: request.at)


def arrivals(requests: Sequence[Request]) -> list[Arrival]:
    """What each request adds to everything before it, with an unlimited cache of prefixes."""
    seen: set[int] = set()
    found = []
    for request in requests:
        known = 0
        for block in request.blocks:
            if block not in seen:
                break
            known += 1
        seen.update(request.blocks)
        new = max(LEAST, request.tokens - BLOCK * known)
        found.append(Arrival(request.at, new, request.output_tokens))
    return found


def fraction(requests: Sequence[Request], load: float, rate: float) -> float:
    """Part of the lineages to keep so that one node of `rate` tokens/s has `load` on average."""
    duration = requests[-1].at - requests[0].at
    return load * rate * duration / sum(arrival.new for arrival in arrivals(requests))


def thin(requests: Sequence[Request], part: float, seed: int) -> list[Request]:
    """A random `part` of the lineages, each with all its requests."""
    chance = random.Random(seed)
    kept: dict[int, bool] = {}
    chosen = []
    for request in requests:
        if request.lineage not in kept:
            kept[request.lineage] = chance.random() < part
        if kept[request.lineage]:
            chosen.append(request)
    return chosen
