"""Which answers in a request were written here, and so are known by their token ids.

They are found one by one where the whole past of a request is no turn's: the client has changed
its instructions, taken out what stood earlier, or merged conversations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.faults import Fault
from scheduler.api.items import split
from scheduler.api.said import Item
from scheduler.api.threads import answers, same_answer
from scheduler.api.weave import Answer
from store.turns import Turn

_OWN = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})(?:_\d+)?\Z")
MAX_ANSWERS = 64
"""The latest answers of a request that are looked for."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """items[start:stop] of a request are what `turn` answered, in the client's rendering."""

    start: int
    stop: int
    turn: Turn

    def answer(self, first: int = 0) -> Answer:
        """The same for a list of items that begins with items[first]."""
        outputs = split(self.turn.id, self.turn.items)[1]
        return Answer(self.start - first, self.stop - first, self.turn.output_ids, outputs)


def recall(backend: Backend, items: Sequence[Item], first: int = 0) -> list[Recalled]:
    """The answers at or after items[first] that are known, in order. Empty without the store."""
    caller = current()
    seams = [(a, b) for a, b in answers(items) if first <= a and a > 0 and b < len(items)]
    seams = seams[-MAX_ANSWERS:]
    if not seams:
        return []
    found: list[Recalled] = []
    for (start, stop), names in zip(
        seams, backend.threads.writers(items, seams, caller.share or None), strict=True
    ):
        for name in names:
            try:
                turn = None if backend.deleted(name) else _turn(backend, name)
            except Fault:
                return []  # the prompt can be computed anew
            if turn is None or not caller.may_see(turn.owner) or not turn.output_ids:
                continue
            if same_answer(items[start:stop], split(turn.id, turn.items)[1]):
                found.append(Recalled(start, stop, turn))
                break
    return found


def _turn(backend: Backend, name: str) -> Turn | None:
    with backend.store() as store:
        return store.get_turn(name)


def own_answers(backend: Backend, items: Sequence[Item]) -> list[Answer]:
    """The answers among items that bear the ids of ours: those of a fork. Empty without the store.

    What was generated is gone with the conversation that it was generated for.
    """
    seams = answers(items)
    caller, known, found = current(), dict[str, Turn](), list[Answer]()
    for start, stop in reversed(list(seams)):
        match = _OWN.match(str(items[start].get("id")))
        if match is None:
            continue
        name = f"resp_{match.group(1)}"
        try:
            if name not in known:
                with backend.store() as store:
                    if store.get_turn(name) is None:
                        continue
                    known |= {turn.id: turn for turn in store.path_of(name)}
        except Fault:
            return []
        turn = known[name]
        outputs = split(turn.id, turn.items)[1]
        same = [item.get("id") for item in outputs] == [i.get("id") for i in items[start:stop]]
        if same and caller.may_see(turn.owner):
            found.append(Answer(start, stop, turn.output_ids, outputs))
    return found[::-1]
