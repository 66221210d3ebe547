"""`truncation: auto`: a conversation that does not fit loses its oldest messages, never its head.

It is cut where a user speaks, by more than is needed at once: the turns that follow go on from the
shortened prompt, and would be computed anew each time if each of them cut it again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.api.prompt import Prompt
from scheduler.api.said import Item
from scheduler.api.tokenizer import TooLong
from scheduler.api.weave import Answer

KEPT_SHARE = 0.75
"""Part of the context that a shortened prompt takes at most, where it can be shortened so far."""

Build = Callable[[Sequence[Item], Sequence[Answer]], Prompt]


def shorten(
    items: Sequence[Item],
    answers: Sequence[Answer],
    build: Build,
    limit: int,
) -> Prompt | None:
    """The prompt of as many of the latest items as fit, or None where not even the last message
    does. `build` may raise TooLong."""
    head = 0
    while head < len(items) and items[head].get("role") in ("system", "developer"):
        head += 1
    starts = [i for i in range(head + 1, len(items)) if items[i].get("role") == "user"]
    built: dict[int, Prompt] = {}

    def fits(start: int, most: float) -> bool:
        kept = [*items[:head], *items[start:]]
        if start not in built:
            shift = start - head
            later = [
                replace(one, start=one.start - shift, stop=one.stop - shift)
                for one in answers
                if one.start >= start
            ]
            try:
                built[start] = build(kept, later)
            except TooLong:
                return False
        return len(built[start].ids) < most

    for most in (KEPT_SHARE * limit, limit):
        place = bisect_left(starts, True, key=lambda start: fits(start, most))
        if place < len(starts):
            start = starts[place]
            return replace(built[start], dropped=start - head)
    return None
