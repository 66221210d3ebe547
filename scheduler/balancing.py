"""Evening out what decode nodes have stored: measured, planned, and moved one after another.

A conversation is moved by its node (`scheduler.homes`), whole or not at all. So whoever is
interrupted leaves nothing half done, and whoever begins again plans from what is there then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import redis

from scheduler.balance import ABOVE, Holder, Kept, Move, plan
from scheduler.homes import Homes, store_of, takes_new
from scheduler.nodes import Node, Nodes
from scheduler.record import TERMINAL
from store.errors import StoreError, StoreUnavailable

PATIENCE = 900.0
"""Seconds that one conversation may take."""
_PAGE = 500
_ASK = 10.0


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one planned move: `moved` is what the node told of it; else `why` it stays."""

    move: Move
    moved: dict[str, Any] | None = None
    why: str = ""


class Balancing:
    """Raises what Redis raises, and StoreError where the store that is moved from cannot be asked.

    `away`: decode nodes that could not be asked since `holders`, and why. They give and get
    nothing, and hold up no other.
    """

    def __init__(
        self, client: redis.Redis, *, limit: int, above: float = ABOVE, idle: float = 0.0
    ) -> None:
        """At most `limit` bytes, from nodes whose stores are fuller than `above`, of conversations
        that nobody has used for `idle` seconds."""
        self._client = client
        self._nodes, self._homes = Nodes(client), Homes(client)
        self._limit, self._above, self._idle = limit, above, idle
        self.away: dict[str, str] = {}

    def holders(self) -> list[Holder]:
        """The decode nodes that are ready and can be asked, as they stand now."""
        self.away = {}
        return self._holders(self._ready())

    def plan(self, holders: Sequence[Holder], only: str = "") -> list[Move]:
        """What should move, of node `only` where it is named."""
        full = {h.name for h in holders if h.stored > self._above * h.size}
        kept: list[Kept] = []
        for node in self._ready():
            if node.name in full and only in ("", node.name):
                kept += self._kept(node)
        return plan(holders, kept, self._limit, self._above)

    def run(
        self,
        moves: Sequence[Move],
        told: Callable[[Done], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Move them, as far as it is still of use; `told` hears what became of each."""
        left = self._limit
        for move in moves:
            if stopped():
                return
            done = self._one(move, left)
            left -= int(done.moved["bytes"]) if done.moved is not None else 0
            told(done)

    def _one(self, move: Move, left: int) -> Done:
        ident, nodes = move.kept.conversation, {node.name: node for node in self._ready()}
        node = nodes.get(move.kept.node)
        if node is None:
            return Done(move, why=f"decode node {move.kept.node} is not ready any more")
        with closing(store_of(node, PATIENCE)) as store:
            record = store.get_conversation(ident)
            if record is None:
                return Done(move, why="it is gone")
            found = self._as_kept(node, [record])
            if not found:
                return Done(move, why="it went to another node meanwhile")
            now = found[0]
            if now.stays or now.used > move.kept.used:
                return Done(move, why="it is in use, or was pinned")
            # What was moved before may have taken up more or less than was thought.
            again = plan(self._holders(nodes.values()), [now], left, self._above)
            if node.name in self.away:
                return Done(move, why=f"its node cannot be asked: {self.away[node.name]}")
            if not again:
                return Done(move, why="it is of no use any more")
            try:
                moved = store.call("move_conversation", ident=ident, to=again[0].to)
            except StoreUnavailable:
                raise
            except StoreError as error:
                return Done(move, why=str(error))
        return Done(again[0], moved=dict(moved))

    def _ready(self) -> list[Node]:
        return [n for n in self._nodes.list("decode") if n.state == "ready" and n.rpc]

    def _holders(self, nodes: Iterable[Node]) -> list[Holder]:
        found: list[Holder] = []
        for node in nodes:
            if node.name in self.away:
                continue
            try:
                found.append(self._holder(node))
            except StoreError as error:
                self.away[node.name] = str(error)
        return found

    def _holder(self, node: Node) -> Holder:
        with closing(store_of(node, _ASK)) as store:
            stats = store.stats()
        facts = node.facts
        return Holder(
            name=node.name,
            stored=int(stats["live_bytes"]),
            size=max(1, int(stats["map_bytes"])),
            memory=int(facts.get("memory_used") or 0),
            memory_limit=int(facts.get("memory_limit") or 0),
            rows=int(facts.get("rows") or 0),
            slots=int(facts.get("slots") or 0),
            model=node.fingerprint,
            takes=takes_new(node) and bool(node.link),
        )

    def _kept(self, node: Node) -> list[Kept]:
        found: list[Kept] = []
        before: tuple[str, float] | None = None
        with closing(store_of(node, _ASK)) as store:
            while page := store.list_conversations(None, _PAGE, None, before):
                before = (page[-1]["id"], float(page[-1]["created"]))
                found += self._as_kept(node, page)
        return found

    def _as_kept(self, node: Node, records: Sequence[dict[str, Any]]) -> list[Kept]:
        """Those of a node that are at home there."""
        names, late = [one["id"] for one in records], time.time() - self._idle
        live = self._live(names)
        return [
            Kept(
                one["id"], node.name, int(one["bytes"]), float(one["last_used"]),
                stays=bool(one["pinned"]) or one["id"] in live or float(one["last_used"]) > late,
            )
            for one, home in zip(records, self._homes.of_all(names), strict=True)
            if home in ("", node.name)
        ]  # fmt: skip

    def _live(self, conversations: Sequence[str]) -> set[str]:
        """Those of which, or of a branch of which, an answer is under way."""
        pipe = self._client.pipeline(transaction=False)
        for conversation in conversations:
            pipe.smembers(f"tandem:at:{conversation}")
        jobs = [
            (conversation, job.decode())
            for conversation, found in zip(conversations, pipe.execute(), strict=True)
            for job in found
        ]
        for _, job in jobs:
            pipe.hget(f"tandem:job:{job}", "status")
        states = cast("list[bytes | None]", pipe.execute())
        return {
            conversation
            for (conversation, _), status in zip(jobs, states, strict=True)
            if status is not None and status.decode() not in TERMINAL
        }
