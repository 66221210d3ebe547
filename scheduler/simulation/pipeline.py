"""The whole pipeline in simulated time: queues, prefill nodes, links, decode nodes, store.

Picks and parking are made by the product's own Lua scripts (`rules`), evictions by its scores
(`shelf`), routes and hand-offs by its rules (`scheduler.extension`, `scheduler.staying`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from scheduler import extension
from scheduler.record import JobError, Stage
from scheduler.simulation.clock import Clock
from scheduler.simulation.cluster import Cluster, Turn
from scheduler.simulation.decode import DecodeNode, home
from scheduler.simulation.prefill import QUEUE, PrefillNode
from scheduler.simulation.rules import Rules
from scheduler.simulation.sharing import share
from scheduler.simulation.shelf import Stock

#: Ended jobs are forgotten by the rules in groups.
_FORGET = 500
#: Ended requests between two words of progress.
_TOLD = 250


class Pipeline:
    """One run over `turns`, which are changed. `turns[k].number` must be k."""

    def __init__(self, cluster: Cluster, turns: Sequence[Turn]) -> None:
        """Raises JobError for a cluster that cannot work."""
        if not cluster.decode:
            raise JobError("a pipeline needs at least one decode node")
        self.cluster = cluster
        self.turns = list(turns)
        self.clock = Clock()
        machines = cluster.prefill or cluster.decode
        self.state = cluster.decode[0].profile.state
        rate = sum(m.profile.rate(m.forward) for m in machines) / len(machines)
        self.rules = Rules(cluster.settings, rate)
        self.stock = Stock(cluster.store, self.state)
        self._limited = False
        self.prefill = [PrefillNode(self, machine) for machine in cluster.prefill]
        self.decode = {machine.name: DecodeNode(self, machine) for machine in cluster.decode}
        if cluster.shared:
            for one, other in zip(self.prefill, self.decode.values(), strict=False):
                share(one, other)
        for machine in cluster.decode:
            self.rules.set_rate(f"decode-{machine.name}", machine.profile.rate(machine.forward))
            if machine.memory and any(self.state):
                self._limited = True
                self.rules.set_budget(machine.name, machine.memory, *self.state)
        self._links: dict[str, float] = dict.fromkeys(self.decode, 0.0)
        self.link_busy: dict[str, float] = dict.fromkeys(self.decode, 0.0)
        self.gaps: Counter[float] = Counter()
        self._after: dict[int, list[Turn]] = {}
        self._gone: list[int] = []
        self._routes = any(turn.previous is not None for turn in self.turns)
        self.lengths: dict[str, list[tuple[float, int]]] = {}
        self._ended = 0
        self._progress: Callable[[int], object] = lambda ended: None

    def run(self, progress: Callable[[int], object] = lambda ended: None) -> None:
        """Serve every turn; `progress` is told now and then how many have ended."""
        self._progress = progress
        for turn in self.turns:
            self.clock.at(turn.at, self._arrival(turn))
        self.clock.run()
        lost = sum(turn.ended < 0 for turn in self.turns)
        if lost:
            raise JobError(f"{lost} requests never ended: a state is larger than the memory for it")

    def _arrival(self, turn: Turn) -> Callable[[], None]:
        return lambda: self._arrive(turn)

    def _arrive(self, turn: Turn) -> None:
        if turn.previous is not None:
            before = self.turns[turn.previous]
            if before.ended < 0:  # a client can continue only what has ended
                self._after.setdefault(turn.previous, []).append(turn)
                return
            turn.depth = before.depth + 1
            turn.home = before.home
        now = self.clock.now
        turn.at = now
        held = max(turn.cached, 0)
        if turn.cached < 0 and turn.previous is not None:
            before = self.turns[turn.previous]
            held = before.prompt + before.output - 1
        if not turn.home:
            turn.home = home(node.room for node in self.decode.values())
        if not self.prefill:
            turn.stage = "decode"
        elif not turn.stage:
            turn.stage = self._route(turn, min(held, turn.prompt - 1))
        queue = QUEUE if turn.stage == "prefill" else f"decode-{turn.home}"
        self.rules.arrive(
            queue, turn.number, now, turn.prompt, turn.owner, turn.priority,
            stage=turn.stage, held=min(held, turn.prompt - 1), node=turn.home,
        )  # fmt: skip
        if turn.stage == "prefill":
            self.decode[turn.home].expected += 1
            for node in self.prefill:
                node.wake()
        else:
            self.decode[turn.home].wake()
        self.note(queue)

    def _route(self, turn: Turn, held: int) -> Stage:
        """Where the turn begins: what is new after a held state may be computed at either node."""
        if not held:
            return "prefill"
        new, fixed, per_token = turn.prompt - held, *self.state
        costs = extension.Costs(held, new)
        if new > extension.FEW:
            machine, other = self.decode[turn.home].machine, self.prefill[0].machine
            costs = extension.Costs(
                held,
                new,
                decode_rate=machine.profile.rate(machine.forward),
                prefill_rate=other.profile.rate(other.forward),
                link_rate=self.cluster.link.rate,
                wait=self.rules.wait(QUEUE, new, turn.owner, turn.priority, self.clock.now),
                fixed=fixed,
                per_token=per_token,
            )
        return "decode" if extension.choose("auto", costs)["extend"] == "decode" else "prefill"

    def end(self, turn: Turn) -> None:
        """A turn has all its tokens."""
        turn.ended = now = self.clock.now
        self._ended += 1
        if not self._ended % _TOLD:
            self._progress(self._ended)
        self.stock.put(turn, now)
        if turn.stage == "decode" or turn.admitted >= 0:
            self._forget(turn)
        for later in self._after.pop(turn.number, ()):
            self._arrive(later)

    def _forget(self, turn: Turn) -> None:
        self._gone.append(turn.number)
        if len(self._gone) >= _FORGET:
            self.rules.forget(self._gone, self.clock.now)
            self._gone.clear()

    def release(self, turn: Turn) -> None:
        """The memory promised for a state is free: another prompt may be begun."""
        if self._limited:
            self.rules.release(turn.number, self.clock.now)
            for node in self.prefill:
                self.clock.at(self.clock.now, node.wake)

    def runs(self, turn: Turn, done: int) -> None:
        """A prompt is in hand, `done` tokens of it: what a route's forecast asks for."""
        if self._routes:
            self.rules.runs(QUEUE, turn.number, done, self.clock.now)

    def stops(self, turn: Turn) -> None:
        """It is in hand no longer."""
        if self._routes:
            self.rules.stops(turn.number)

    # --- the link ----------------------------------------------------------------------------

    def bytes_of(self, tokens: int, *, snapshot: bool = False) -> float:
        """Bytes of the rows of `tokens` tokens, with what a state has besides on request."""
        return tokens * self.state[1] + (self.state[0] if snapshot else 0.0)

    def lend(self, turn: Turn) -> float:
        """A held state goes to a prefill node, whose own direction is another; seconds it takes."""
        size = self.bytes_of(turn.held, snapshot=True)
        turn.moved += size
        return size / self.cluster.link.rate + self.cluster.link.latency

    def send_rows(self, turn: Turn, tokens: int) -> float:
        """Rows leave for the turn's decode node; returns when they are there."""
        return self._carry(turn, self.bytes_of(tokens))

    def send_rest(self, turn: Turn, tokens: int, then: Callable[[], None]) -> None:
        """The rest of a state leaves: rows and snapshot. Its decode begins when they are there."""
        done = self._carry(turn, self.bytes_of(tokens, snapshot=True)) + self.cluster.link.latency

        def arrived() -> None:
            self.decode[turn.home].expected -= 1
            if turn.ended < 0:
                self._begin_decode(turn)
            else:  # all of it was said before; what arrives is for the store
                self.release(turn)
                self._forget(turn)
            then()

        self.clock.at(done, arrived)

    def _begin_decode(self, turn: Turn) -> None:
        turn.handed = self.clock.now
        node = self.decode[turn.home]
        self.rules.arrive(
            node.queue, turn.number, turn.at, turn.prompt, turn.owner, turn.priority,
            stage="decode", node=turn.home, handed=True,
        )  # fmt: skip
        node.wake()
        self.note(node.queue)

    def _carry(self, turn: Turn, size: float) -> float:
        start = max(self.clock.now, self._links[turn.home])
        seconds = size / self.cluster.link.rate
        self._links[turn.home] = start + seconds
        self.link_busy[turn.home] += seconds
        turn.moved += size
        turn.wire_s += seconds
        return start + seconds

    # --- what is noted -----------------------------------------------------------------------

    def gap(self, seconds: float, count: int) -> None:
        """So many pairs of tokens came so far apart."""
        self.gaps[round(seconds, 5)] += count

    def note(self, queue: str) -> None:
        """How many wait in a queue has changed."""
        self.lengths.setdefault(queue, []).append(
            (self.clock.now, self.rules.waiting.get(queue, 0))
        )
