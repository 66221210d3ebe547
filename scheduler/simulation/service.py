"""What requests cost in service beside what `tandem calibrate` can measure without one.

Queue, hand-off, unpacking and events take their time as well. It is read off requests that were
served alone: nothing else ran or waited meanwhile, so that all of their time is their own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from scheduler.record import JobError
from scheduler.simulation.history import Past
from scheduler.simulation.profile import Profile

#: Fewer say too little.
FEWEST = 5
#: Forwards that took longer in service by more than this are told of: the profile is not honest.
FAR = 1.1


@dataclass(frozen=True)
class Service:
    """Medians over `requests` that were served alone.

    `prompt_s`: of a prompt at the prefill node, besides its forwards. `start_s`: from the arrival
    of a state to the first token, besides a step; 0 where all answers began at the prefill node.
    `forwards`: how many times as long as calibrated the prefills took in service, with `prompt_s`
    left out; it is told, and changes nothing.
    """

    requests: int
    prompt_s: float
    start_s: float
    forwards: float

    def facts(self) -> dict[str, float]:
        """For reports."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def alone(pasts: Sequence[Past]) -> list[Past]:
    """Cold requests, handed off by a prefill node, during which no other one was there."""
    found: list[Past] = []
    until = float("-inf")
    order = sorted(pasts, key=lambda past: past.at)
    for number, past in enumerate(order):
        ended = past.at + (past.ended or 0.0)
        later = order[number + 1].at if number + 1 < len(order) else float("inf")
        lone = until <= past.at and ended <= later
        until = max(until, ended)
        whole = {"prefilling", "handing_off", "first_token", "ended"} <= set(past.times)
        if lone and whole and past.stage == "prefill" and past.bytes and not past.cached_tokens:
            found.append(past)
    return found


def learn(pasts: Sequence[Past], prefill: Profile, decode: Profile, chunk: int = 0) -> Service:
    """What requests cost in service, for prompts computed in chunks of `chunk` tokens (0: the
    profile's). Raises JobError where too few of them were served alone."""
    found = alone(pasts)
    if len(found) < FEWEST:
        raise JobError(
            f"{len(found)} of {len(pasts)} requests were served alone, at least {FEWEST} are "
            "needed: send some one after another and export the history again"
        )
    own = [prefill.prefill_s(0, p.prompt_tokens - 1, chunk or prefill.chunk) for p in found]
    took = [_prompt_over(p, prefill) - p.times["prefilling"] for p in found]
    moved = [p for p in found if not _begun_there(p)]
    # Where longer prompts take longer than calibrated, a constant would hide it: the line through
    # all pairs of requests tells the two apart.
    slopes = [
        (took[b] - took[a]) / (own[b] - own[a])
        for a in range(len(found))
        for b in range(a)
        if abs(own[b] - own[a]) > 0.2 * max(own)
    ]
    ratio = median(slopes) if slopes else 1.0
    start = [
        p.times["first_token"]
        - p.times["handing_off"]
        - p.exposed_s
        - decode.step_s(1, p.prompt_tokens)
        for p in moved
    ]
    return Service(
        len(found),
        max(0.0, median(t - o for t, o in zip(took, own, strict=True))),
        max(0.0, median(start)) if start else 0.0,
        ratio,
    )


def _begun_there(past: Past) -> bool:
    """Whether its answer began where its prompt was computed, before it was handed off."""
    return past.times["first_token"] < past.times["handing_off"]


def _prompt_over(past: Past, prefill: Profile) -> float:
    """When its prompt was computed; no time is taken where an answer is begun at once."""
    if _begun_there(past):
        return past.times["first_token"] - prefill.step_s(1, past.prompt_tokens)
    return past.times["handing_off"]


def note(path: Path, name: str, seconds: float) -> None:
    """Write a time into a profile's file, at once or not at all. Raises JobError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**raw, name: round(seconds, 6)}, file, indent=1)
            file.write("\n")
        os.replace(file.name, path)
    except (OSError, ValueError, TypeError) as error:
        raise JobError(f"the profile {path} cannot be written: {error}") from None
