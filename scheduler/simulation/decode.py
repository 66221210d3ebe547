"""A simulated decode node: the batch as the engine steps it.

Every step computes one chunk of at most one row that still has prompt to compute, then one token of
every other row. Between two changes of the batch all steps are alike, so they are one event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from scheduler.simulation.clock import Busy
from scheduler.simulation.cluster import Machine, Turn
from scheduler.simulation.profile import next_chunk
from scheduler.simulation.sharing import Sharer

if TYPE_CHECKING:
    from scheduler.simulation.pipeline import Pipeline


class Room(NamedTuple):
    """How a decode node stands: rows that run or wait for it, and rows it decodes at once."""

    name: str
    rows: int
    slots: int


def home(nodes: Iterable[Room]) -> str:
    """The decode node of a new conversation: the one with the most room by share.

    As `scheduler.homes.begin_at`, where no stored beginning and no session decides.
    """
    return min(nodes, key=lambda node: (node.rows / node.slots, node.name)).name


@dataclass(slots=True)
class Row:
    """A turn in a batch. `position`: prompt tokens whose state is there; the last one is computed
    in the first step."""

    turn: Turn
    position: int

    @property
    def extends(self) -> bool:
        return self.position < self.turn.prompt - 1

    @property
    def context(self) -> int:
        return self.turn.prompt + self.turn.done


class Steps:
    """A run of equal steps of some rows. Used by decode nodes, and by prefill nodes that decode."""

    def __init__(self, machine: Machine, busy: Busy, gaps: Callable[[float, int], None]) -> None:
        """`gaps(seconds, count)` is told of every time between two tokens of a row."""
        self._machine = machine
        self._busy = busy
        self._gaps = gaps
        self.rows: list[Row] = []
        self.start = self.step = 0.0
        self.count = 0

    def begin(self, rows: list[Row], now: float, pace: float = 1.0) -> float:
        """Let `rows` run until the first of them ends, `pace` times as slowly; returns when."""
        self.rows, self.start = rows, now
        self.count = min(row.turn.output - row.turn.done for row in rows)
        context = max(row.context for row in rows) + self.count / 2
        self.step = pace * self._machine.profile.step_s(len(rows), context)
        return now + self.count * self.step

    def cut(self, now: float) -> float:
        """Let the run end with the step under way at `now`; returns when that is."""
        done = max(1, math.ceil((now - self.start) / self.step - 1e-9))
        self.count = min(self.count, done)
        return self.start + self.count * self.step

    def end(self) -> list[Turn]:
        """Give the rows their tokens; returns those that have all of them."""
        return self.give(self.rows, self.start, self.step, self.count)

    def give(self, rows: list[Row], start: float, step: float, count: int) -> list[Turn]:
        """`count` tokens for each row, one every `step` seconds from `start` on."""
        self._busy.add(start, start + step * count)
        gaps = count * len(rows)
        for row in rows:
            turn = row.turn
            if turn.first < 0:
                turn.first = start + step
                gaps -= 1
            turn.done += count
        if gaps:
            self._gaps(step, gaps)
        return [row.turn for row in rows if row.turn.done >= row.turn.output]


class DecodeNode(Sharer):
    """One decode worker."""

    def __init__(self, sim: Pipeline, machine: Machine) -> None:
        self._sim = sim
        self.machine = machine
        self.name = machine.name
        self.queue = f"decode-{machine.name}"
        self.cost = machine.profile.beside[1]
        self.busy = Busy()
        self.rows: list[Row] = []
        self._joining: list[Row] = []
        self._starting = 0
        self._extended: tuple[Row, int] | None = None
        self._version = 0
        self._between = False
        self._since = 0.0
        self._steps = Steps(machine, self.busy, sim.gap)

    @property
    def room(self) -> Room:
        """Rows here and on their way here."""
        waiting = self._sim.rules.waiting.get(self.queue, 0)
        return Room(self.name, self._taken + waiting + self.expected, self.machine.slots)

    expected = 0
    """Turns whose prompts are being computed for this node."""

    @property
    def _taken(self) -> int:
        return len(self.rows) + len(self._joining) + self._starting

    def step_s(self, more: int = 1) -> float:
        """Seconds of a step with `more` rows beside those that are here."""
        context = max((row.context for row in self.rows), default=1)
        return self.machine.profile.step_s(self._taken + more, context)

    def wake(self) -> None:
        """Take what waits, as many as there is room for."""
        sim = self._sim
        while self._taken < self.machine.slots:
            number = sim.rules.take(self.queue, f"decode:{self.name}", sim.clock.now)
            if number is None:
                return
            sim.note(self.queue)
            self._admit(sim.turns[number])

    def _admit(self, turn: Turn) -> None:
        sim, now = self._sim, self._sim.clock.now
        turn.admitted = now
        if turn.begun < 0:
            turn.begun = now
        delay = 0.0
        if turn.stage == "prefill":
            sim.release(turn)
            delay = self.machine.profile.start_s
            position = turn.prompt - 1
        else:
            if turn.previous is not None or turn.cached > 0:
                turn.held, turn.path, delay = sim.stock.nearest(turn, sim.turns, now)
            position = turn.held
        row = Row(turn, position)
        if delay:
            self._starting += 1
            sim.clock.at(now + delay, lambda: self._join(row, started=True))
        else:
            self._join(row)

    def _join(self, row: Row, *, started: bool = False) -> None:
        self._starting -= started
        self._joining.append(row)
        if self._between:
            return
        if not self.working:
            self._next()
        else:
            self.disturbed()

    def disturbed(self) -> None:
        """A row joins, or the mate has begun or ended: the run ends with the step under way.

        A step that computes a chunk is the last of its run in any case.
        """
        if self.working and not self._between and self._extended is None:
            self._version += 1
            version = self._version
            self._sim.clock.at(self._steps.cut(self._sim.clock.now), lambda: self._end(version))

    def _next(self) -> None:
        """At a step boundary: begin the next step, or the next run of equal ones."""
        self.rows += self._joining
        self._joining.clear()
        self._extended = None
        self.works(bool(self.rows))
        if not self.rows:
            return
        self._since = now = self._sim.clock.now
        profile, pace = self.machine.profile, self.pace
        extended = next((row for row in self.rows if row.extends), None)
        if extended is None:
            stop = self._steps.begin(self.rows[:], now, pace)
        else:
            length = next_chunk(
                extended.position, extended.turn.prompt - 1, self.machine.forward
            )  # fmt: skip
            self._extended = (extended, length)
            stop = now + pace * profile.chunk_s(extended.position, length)
            ready = [row for row in self.rows if not row.extends]
            if ready:
                stop += pace * profile.step_s(len(ready), max(row.context for row in ready))
        self._version += 1
        version = self._version
        self._sim.clock.at(stop, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        sim, now = self._sim, self._sim.clock.now
        self._between = True
        if self._extended is None:
            ended = self._steps.end()
        else:
            row, length = self._extended
            ready = [other for other in self.rows if not other.extends]
            if ready:
                ended = self._steps.give(ready, self._since, now - self._since, 1)
            else:
                ended = []
                self.busy.add(self._since, now)
            row.position += length
            if not row.extends:
                row.turn.prefilled = now
        if ended:
            gone = {turn.number for turn in ended}
            self.rows = [row for row in self.rows if row.turn.number not in gone]
            for turn in ended:
                sim.end(turn)
            self.wake()
        self._between = False
        self._next()
