"""A simulated prefill node: chunk by chunk, parking at boundaries, its state leaving behind it.

With late hand-off it decodes what it has prefilled for as long as `scheduler.staying` lets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.simulation.clock import Busy
from scheduler.simulation.cluster import TAILS, Machine, Turn
from scheduler.simulation.decode import Row, Steps
from scheduler.simulation.profile import next_chunk
from scheduler.simulation.sharing import Sharer
from scheduler.staying import choose

if TYPE_CHECKING:
    from scheduler.simulation.pipeline import Pipeline

QUEUE = "prefill"


@dataclass(slots=True)
class _Work:
    """A prompt in hand: tokens computed, and tokens of these that have left."""

    turn: Turn
    position: int
    sent: int
    chunk: int


@dataclass(slots=True)
class _Forward:
    """A chunk under way: its tokens, seconds of it that are left at full pace, since when, at which
    pace. `version` tells the event that ends it from those that are out of date."""

    length: int = 0
    left: float = 0.0
    since: float = 0.0
    pace: float = 1.0
    version: int = 0


class PrefillNode(Sharer):
    """One prefill worker."""

    def __init__(self, sim: Pipeline, machine: Machine) -> None:
        self._sim = sim
        self.machine = machine
        self.name = machine.name
        self.holder = f"prefill:{machine.name}"
        self.cost = machine.profile.beside[0]
        self.busy = Busy()
        self._work: _Work | None = None
        self._parked: dict[int, int] = {}
        self._tails = 0
        self._staying: Row | None = None
        self._steps = Steps(machine, self.busy, sim.gap)
        self._decoding = False
        self._giving = False
        self._version = 0
        self._forward = _Forward()

    def wake(self) -> None:
        """Something may have come that this node should do."""
        if self._decoding:
            self._version += 1
            version = self._version
            self._sim.clock.at(self._steps.cut(self._sim.clock.now), lambda: self._stepped(version))
        elif self._work is None and not self._giving:
            self._look()

    def _look(self) -> None:
        """Free: what stays here goes on until a prompt waits; then it leaves, and that is begun."""
        sim = self._sim
        row = self._staying
        if row is not None:
            if sim.rules.waiting.get(QUEUE, 0):
                self._staying = None
                self._give(row.turn, row.position)
            else:
                self._decode(row)
            return
        number = None
        if self._tails < TAILS:
            number = sim.rules.take(QUEUE, self.holder, sim.clock.now)
        if number is None:
            self.works(False)
        else:
            sim.note(QUEUE)
            self._begin(sim.turns[number])

    # --- a prompt ----------------------------------------------------------------------------

    def _begin(self, turn: Turn) -> None:
        if turn.begun < 0:
            turn.begun = self._sim.clock.now
        start = self._parked.pop(turn.number, 0)
        # A parked prompt's rows leave once it goes on; the receiver has dropped what it had.
        self._work = _Work(turn, start, turn.held, self.machine.forward)
        sim, more = self._sim, self.machine.profile.prompt_s
        if not start and (turn.previous is not None or turn.cached > 0):
            turn.held, turn.path, seconds = sim.stock.nearest(turn, sim.turns, sim.clock.now)
            self._work.position = self._work.sent = turn.held
            if turn.held:  # the decode node lends it
                seconds += sim.lend(turn)
            more += seconds
        if more:
            self.busy.add(sim.clock.now, sim.clock.now + more)
            sim.clock.at(sim.clock.now + more, self._chunk)
        else:
            self._chunk()

    def _chunk(self) -> None:
        work = self._work
        assert work is not None
        stop = work.turn.prompt - 1
        if work.position >= stop:
            self._computed(work)
            return
        length = next_chunk(work.position, stop, work.chunk)
        self._sim.runs(work.turn, work.position)
        forward = self._forward
        forward.length, forward.left = length, self.machine.profile.chunk_s(work.position, length)
        self.works(True)
        self._go_on()

    def _go_on(self) -> None:
        """Compute what is left of the forward, at the pace of this moment."""
        forward, now = self._forward, self._sim.clock.now
        forward.since, forward.pace = now, self.pace
        forward.version += 1
        version = forward.version
        self._sim.clock.at(now + forward.left * forward.pace, lambda: self._chunked(version))

    def disturbed(self) -> None:
        """The mate has begun or ended its work."""
        forward, now = self._forward, self._sim.clock.now
        if forward.length:
            forward.left = max(0.0, forward.left - (now - forward.since) / forward.pace)
            self.busy.add(forward.since, now)
            self._go_on()

    def _chunked(self, version: int) -> None:
        forward, work, sim = self._forward, self._work, self._sim
        if version != forward.version:
            return
        assert work is not None
        self.busy.add(forward.since, sim.clock.now)
        work.position += forward.length
        forward.length = 0
        turn, now = work.turn, sim.clock.now
        if sim.cluster.link.overlap and work.position < turn.prompt - 1:
            sim.send_rows(turn, work.position - work.sent)
            work.sent = work.position
        if work.position < turn.prompt - 1:
            better, short = sim.rules.better(QUEUE, self.holder, turn.number, work.position, now)
            if better and len(self._parked) < sim.cluster.settings.max_parked:
                self._parked[turn.number] = work.position
                turn.parked += 1
                sim.release(turn)
                sim.stops(turn)
                sim.rules.park(QUEUE, self.holder, turn.number, work.position, now)
                sim.note(QUEUE)
                self._work = None
                self._look()
                return
            small = self.machine.small_chunk or self.machine.forward
            work.chunk = min(small, self.machine.forward) if short else self.machine.forward
        self._chunk()

    def _computed(self, work: _Work) -> None:
        """The state is whole: it goes, or stays to be decoded here."""
        turn, sim = work.turn, self._sim
        turn.prefilled = sim.clock.now
        sim.stops(turn)
        self._work = None
        here = 1 / self.machine.profile.step_s(1, turn.prompt)
        there = 1 / sim.decode[turn.home].step_s()
        waiting = sim.rules.waiting.get(QUEUE, 0)
        if choose(sim.cluster.handoff, waiting, here, there).stay:
            self._staying = Row(turn, work.sent)
            self._look()
        else:
            self._give(turn, work.sent)

    # --- handing off -------------------------------------------------------------------------

    def _give(self, turn: Turn, sent: int) -> None:
        """Pay the price of handing over, then let the rest go; this node is free from then on."""
        now = self._sim.clock.now
        tokens = turn.prompt - 1 + turn.done
        seconds = tokens * self.machine.profile.handing_over_s
        self._giving = True
        self._tails += 1
        self.busy.add(now, now + seconds)
        self._sim.clock.at(now + seconds, lambda: self._given(turn, tokens - sent))

    def _given(self, turn: Turn, unsent: int) -> None:
        self._giving = False
        self._sim.send_rest(turn, unsent, self._arrived)
        self._look()

    def _arrived(self) -> None:
        self._tails -= 1
        self.wake()

    # --- decoding here -----------------------------------------------------------------------

    def _decode(self, row: Row) -> None:
        self._decoding = True
        self._version += 1
        version = self._version
        stop = self._steps.begin([row], self._sim.clock.now)
        self._sim.clock.at(stop, lambda: self._stepped(version))

    def _stepped(self, version: int) -> None:
        row = self._staying
        if version != self._version or row is None:
            return
        self._decoding = False
        if self._steps.end():
            self._staying = None
            self._sim.end(row.turn)
            self._give(row.turn, row.position)  # the store is at the decode node
        else:
            self._look()
