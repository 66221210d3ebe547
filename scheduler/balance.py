"""Which idle conversations should lie on another decode node: the rule, and what it looks at.

How full the stores are decides, as what is stored is what an idle conversation takes up; a node
whose batch or memory is full is given nothing. The least recently used go first: they are the least
likely to be asked for on the way, and the first that eviction would make forget their state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ABOVE = 0.5
"""A store less full than this gives nothing away: it is in no need, and moving costs."""
BAND = 0.05
"""Stores whose shares in use differ by no more than this are even."""
HIGH = 0.8
"""No store is filled beyond this: eviction begins at 0.88."""
MEMORY = 0.9
"""A node with more of its memory for states in use is given nothing."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A decode node: bytes in use of its store and the store's size, of its memory for states and
    that memory's limit (0: not known), its live rows and slots, its model, and whether it takes
    new conversations."""

    name: str
    stored: int
    size: int
    memory: int = 0
    memory_limit: int = 0
    rows: int = 0
    slots: int = 0
    model: str = ""
    takes: bool = True

    @property
    def why_not(self) -> str:
        """Why it is given nothing now, "" where it may be."""
        if not self.takes:
            return "takes no new conversations"
        if self.slots and self.rows >= self.slots:
            return f"{self.rows} of {self.slots} slots answer"
        if self.memory_limit and self.memory > MEMORY * self.memory_limit:
            return f"{self.memory / self.memory_limit:.0%} of its memory is in use"
        return ""


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation at home on decode node `node`: the bytes of its state, when it was last used
    (seconds), and whether it has to stay (pinned, or an answer of it is under way)."""

    conversation: str
    node: str
    nbytes: int
    used: float
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One conversation that is to go from its node to node `to`."""

    kept: Kept
    to: str


def plan(
    holders: Sequence[Holder], kept: Iterable[Kept], limit: int, above: float = ABOVE
) -> list[Move]:
    """Which conversations go where, in this order; of `limit` bytes at most.

    From nodes whose stores are fuller than `above` to the emptiest of the same model, and only if
    that one is not the fuller of the two afterwards. So no move makes the fullest store fuller or
    two stores less even, and planning again after all of them comes to an end.
    """
    by_name = {holder.name: holder for holder in holders}
    stored = {holder.name: holder.stored for holder in holders}

    def share(holder: Holder, more: int = 0) -> float:
        return (stored[holder.name] + more) / holder.size

    moves: list[Move] = []
    for one in sorted(kept, key=lambda one: (one.used, one.conversation)):
        came = by_name.get(one.node)
        if came is None or one.stays or not 0 < one.nbytes <= limit or share(came) <= above:
            continue
        fit = [h for h in holders if h is not came and h.model == came.model and not h.why_not]
        to = min(fit, key=lambda holder: (share(holder), holder.name), default=None)
        if to is None or share(came) - share(to) <= BAND:
            continue
        if share(to, one.nbytes) > min(HIGH, share(came, -one.nbytes)):
            continue
        moves.append(Move(one, to.name))
        stored[came.name] -= one.nbytes
        stored[to.name] += one.nbytes
        limit -= one.nbytes
    return moves
