"""The stores of all decode nodes as one: each conversation is asked for at its home.

With one decode node there is nothing to choose, and no call costs more than the call. With more, a
conversation is asked for where its pointer says (`scheduler.homes`), else everywhere; a turn
everywhere, its conversation's home first where two have it. What may lie on a node that is away is
never said not to exist: StoreAway names the node.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from scheduler.homes import Homes
from scheduler.nodes import Node, Survey
from store.errors import StoreError, StoreUnavailable
from store.remote import Remote, parse_address
from store.rpc import StoreClient
from store.turns import Turn

T = TypeVar("T")
_PAGE = 50
_REMEMBERED = 4096
_NOWHERE = Path("/nonexistent/store")


class StoreAway(StoreUnavailable):
    """What is asked for lies, or may lie, on decode nodes that do not answer: `nodes`."""

    def __init__(self, nodes: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.nodes = tuple(nodes)


class Stores:
    """As a StoreClient, for all of them. Thread-safe. Raises StoreError, and what Redis raises."""

    def __init__(
        self, own: str, socket: Path, survey: Callable[[], Survey], homes: Homes, timeout: float
    ) -> None:
        """`own`: the decode node whose store `socket` serves, if it is on this machine; `survey()`
        tells which nodes there are, and may fail while Redis is away."""
        self._own = own
        self._survey = survey
        self._homes = homes
        self._timeout = timeout
        self._alone = StoreClient(socket, timeout, self._elsewhere)
        self._lock = threading.Lock()
        self._clients: dict[str, tuple[str, StoreClient]] = {}
        self._turns: OrderedDict[str, str] = OrderedDict()

    def close(self) -> None:
        """End all connections."""
        self._alone.close()
        with self._lock:
            for _, client in self._clients.values():
                client.close()
            self._clients.clear()

    # --- which there are ----------------------------------------------------------------------

    @property
    def several(self) -> bool:
        """Whether there is more than one decode node: then homes are looked up and recorded."""
        return self._several(self._look())

    @property
    def away(self) -> list[str]:
        """Decode nodes whose stores cannot be asked now; of one alone nothing is said here."""
        seen = self._look()
        return self._missing(seen, self._reached(seen)) if self._several(seen) else []

    def home(self, conversation: str) -> str:
        """The node that the conversation lies on by its pointer, "" where nothing says."""
        return self._homes.of(conversation) if self.several else ""

    def node_of(self, turn: str) -> str:
        """The node whose store has a turn, "" where there is one node or none has it."""
        return self._at(turn) if self.several else ""

    def _look(self) -> Survey:
        return self._survey()

    def _several(self, seen: Survey) -> bool:
        return len([node for node in seen.nodes if _stores(node)]) + len(seen.away) > 1

    def _reached(self, seen: Survey) -> dict[str, StoreClient]:
        """A client for each live node that serves its store to this machine, our own first."""
        found: dict[str, StoreClient] = {}
        nodes = [node for node in seen.nodes if _stores(node)]
        for node in sorted(nodes, key=lambda node: (node.name != self._own, node.name)):
            client = self._client(node)
            if client is not None:
                found[node.name] = client
        return found

    def _client(self, node: Node) -> StoreClient | None:
        remote = parse_address(node.rpc, bytes.fromhex(node.secret)) if node.secret else None
        path = _NOWHERE if remote is not None else Path(node.rpc)
        if node.name == self._own and self._alone.path.exists():
            return self._alone
        if remote is None and not path.exists():
            return None
        with self._lock:
            at, known = self._clients.get(node.name, ("", None))
            if known is not None and at == node.boot:
                return known
            made = StoreClient(path, self._timeout, lambda: remote)
            self._clients[node.name] = (node.boot, made)
        if known is not None:
            known.close()
        return made

    def _elsewhere(self) -> Remote | None:
        for node in self._look().nodes:
            if node.role == "decode" and node.secret:
                remote = parse_address(node.rpc, bytes.fromhex(node.secret))
                if remote is not None:
                    return remote
        return None

    def _missing(self, seen: Survey, reached: dict[str, StoreClient]) -> list[str]:
        deaf = [node.name for node in seen.nodes if _stores(node) and node.name not in reached]
        return sorted({*seen.away, *deaf})

    # --- by conversation ----------------------------------------------------------------------

    def get_conversation(self, ident: str) -> dict[str, Any] | None:
        """As `Store.get_conversation`, from its home."""
        found: dict[str, Any] | None = self._of(ident, lambda at: at.get_conversation(ident))
        return found

    def conversation_turns(self, ident: str) -> list[str]:
        """As `Store.conversation_turns`."""
        return self._of(ident, lambda at: at.conversation_turns(ident)) or []

    def update_conversation(self, ident: str, **changes: Any) -> dict[str, Any]:
        """As `Store.update_conversation`."""
        found = self._of(ident, lambda at: at.update_conversation(ident, **changes))
        if found is None:
            raise StoreError(f"there is no conversation {ident}")
        return found

    def delete_conversation(self, ident: str) -> bool:
        """As `Store.delete_conversation`: at its home, and what copies there are elsewhere."""
        seen = self._look()
        if not self._several(seen):
            return self._alone.delete_conversation(ident)
        gone = bool(self._of(ident, lambda at: at.delete_conversation(ident)))
        for client in self._reached(seen).values():
            gone = client.delete_conversation(ident) or gone
        self._homes.forget(ident)
        return gone

    def create_conversation(
        self,
        ident: str,
        owner: str = "",
        metadata: dict[str, Any] | None = None,
        items: list[dict[str, Any]] | None = None,
        *,
        node: str = "",
    ) -> dict[str, Any]:
        """As `Store.create_conversation`, on the decode node `node`."""
        seen = self._look()
        if not self._several(seen):
            return self._alone.create_conversation(ident, owner, metadata, items)
        client = self._named(node or self._own, seen)
        self._homes.begin(ident, node or self._own)
        return client.create_conversation(ident, owner, metadata, items)

    def list_conversations(
        self, owner: str | None = None, limit: int = 20, after: str | None = None
    ) -> list[dict[str, Any]]:
        """As `Store.list_conversations`, of all nodes that answer; see `away`."""
        seen = self._look()
        if not self._several(seen):
            return self._alone.list_conversations(owner, limit, after)
        before = None
        if after is not None:
            record = self.get_conversation(after)
            if record is None:
                raise StoreError(f"there is no conversation {after}")
            before = (after, float(record["created"]))
        pages = [
            self._pages(name, client, owner, min(_PAGE, limit), before)
            for name, client in self._reached(seen).items()
        ]
        merged = heapq.merge(*pages, key=lambda record: record["created"], reverse=True)
        return list(islice(_once(merged), limit))

    def _pages(
        self,
        name: str,
        client: StoreClient,
        owner: str | None,
        size: int,
        before: tuple[str, float] | None,
    ) -> Iterator[dict[str, Any]]:
        """A node's conversations, newest first, without those that have their home elsewhere."""
        while page := client.list_conversations(owner, size, None, before):
            homes = self._homes.of_all([record["id"] for record in page])
            for record, home in zip(page, homes, strict=True):
                if home in ("", name):
                    yield record
            if len(page) < size:
                return
            before = (page[-1]["id"], float(page[-1]["created"]))

    def _of(self, conversation: str, ask: Callable[[StoreClient], T]) -> T | None:
        """What the home of a conversation answers; None where nobody has it."""
        seen = self._look()
        if not self._several(seen):
            return ask(self._alone)
        home, reached = self._homes.of(conversation), self._reached(seen)
        while home in reached:
            failed: StoreError | None = None
            try:
                found = ask(reached[home])
            except StoreUnavailable:
                raise
            except StoreError as error:
                found, failed = None, error
            if found or (now := self._homes.of(conversation)) == home:
                if failed is not None:
                    raise failed
                return found
            home = now  # it has moved while we asked
        missing = self._missing(seen, reached)
        if home in missing:
            raise StoreAway(
                [home], f"conversation {conversation} lies on decode node {home}, which is away"
            )
        best: tuple[int, StoreClient] | None = None
        for client in reached.values():
            record = client.get_conversation(conversation)
            if record is not None and (best is None or record["turns"] > best[0]):
                best = (record["turns"], client)
        if best is not None:
            return ask(best[1])
        self._may_be(missing, conversation)
        return None

    # --- by turn ------------------------------------------------------------------------------

    def get_turn(self, turn_id: str) -> Turn | None:
        """As `Store.get_turn`, from the home of its conversation."""
        seen = self._look()
        if not self._several(seen):
            return self._alone.get_turn(turn_id)
        reached = self._reached(seen)
        known = self._turns.get(turn_id, "")
        names = sorted(reached, key=lambda name: name != known)
        for name in [*names, *names[:-1]]:  # it may move to one that was asked before
            turn = reached[name].get_turn(turn_id)
            if turn is None:
                continue
            home = self._homes.of(turn.conversation)
            if home not in ("", name) and home in reached:
                truth = reached[home].get_turn(turn_id)
                if truth is not None:
                    turn, name = truth, home
            self._remember(turn_id, name)
            return turn
        self._may_be(self._missing(seen, reached), turn_id)
        return None

    def path_of(self, turn_id: str) -> list[Turn]:
        """As `Store.path`."""
        return self._having(turn_id, lambda at: at.path_of(turn_id))

    def turn_ids(self, turn_id: str) -> list[int]:
        """As `Store.turn_ids`."""
        return self._having(turn_id, lambda at: at.turn_ids(turn_id))

    def touch(self, turn_id: str) -> None:
        """As `Store.touch`."""
        self._having(turn_id, lambda at: at.touch(turn_id))

    def _at(self, turn_id: str) -> str:
        known = self._turns.get(turn_id)
        if known is None and self.get_turn(turn_id) is not None:
            known = self._turns.get(turn_id)
        return known or ""

    def _having(self, turn_id: str, ask: Callable[[StoreClient], T]) -> T:
        """What the node that has a turn answers. Raises StoreError where none has it."""
        seen = self._look()
        if not self._several(seen):
            return ask(self._alone)
        for _ in range(2):
            name = self._at(turn_id)
            client = self._reached(seen).get(name)
            if client is None:
                break
            try:
                return ask(client)
            except StoreUnavailable:
                raise
            except StoreError:  # it may have moved since we heard of it
                self._turns.pop(turn_id, None)
        self._turns.pop(turn_id, None)
        raise StoreError(f"there is no turn {turn_id}")

    def _remember(self, turn: str, name: str) -> None:
        with self._lock:
            self._turns[turn] = name
            while len(self._turns) > _REMEMBERED:
                self._turns.popitem(last=False)

    # --- of all -------------------------------------------------------------------------------

    def longest_prefix(
        self, ids: Sequence[int], owner: str = "", node: str = ""
    ) -> tuple[int, str]:
        """Tokens of the longest stored beginning of a prompt, and the node that has it.

        Of equal ones that of `node` is taken. Asks the nodes that answer.
        """
        seen = self._look()
        if not self._several(seen):
            return self._alone.longest_prefix(ids, owner), node
        found = (0, node)
        for name, client in self._reached(seen).items():
            tokens = client.longest_prefix(ids, owner)
            if (tokens, name == node) > (found[0], found[1] == node):
                found = (tokens, name)
        return found

    def stats(self) -> dict[str, Any]:
        """As `Store.stats`; with several nodes their sums, and each by its name in `nodes`."""
        seen = self._look()
        if not self._several(seen):
            return self._alone.stats()
        each = {name: client.stats() for name, client in self._reached(seen).items()}
        if not each:
            raise StoreAway(self._missing(seen, {}), "no decode node's store can be asked")
        total: dict[str, Any] = dict(next(iter(each.values())))
        for key, value in total.items():
            if type(value) is int and key != "page_size":
                total[key] = sum(int(one[key]) for one in each.values())
        total["live_share"] = total["live_bytes"] / total["map_bytes"]
        return {**total, "nodes": each}

    def ping(self) -> bool:
        """Whether a store answers."""
        try:
            seen = self._look()
        except Exception:  # without Redis our own can still be asked
            return self._alone.ping()
        if not self._several(seen):
            return self._alone.ping()
        return any(client.ping() for client in self._reached(seen).values())

    def client_of(self, conversation: str) -> StoreClient:
        """The client of the store that has a conversation. Raises StoreError where none has it."""
        found = self._of(conversation, lambda at: at)
        if found is None:
            raise StoreError(f"there is no conversation {conversation}")
        return found

    def _named(self, name: str, seen: Survey) -> StoreClient:
        client = self._reached(seen).get(name)
        if client is None:
            raise StoreAway([name], f"decode node {name}, where it would lie, is away")
        return client

    def _may_be(self, missing: Sequence[str], what: str) -> None:
        """Raise StoreAway where what was not found may lie on a node that is away."""
        if missing:
            names = ", ".join(missing)
            raise StoreAway(missing, f"{what} may lie on decode node {names}, which is away")


def _stores(node: Node) -> bool:
    return node.role == "decode" and bool(node.rpc)


def _once(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Without a second record of one conversation: copies without a pointer."""
    seen: set[str] = set()
    for record in records:
        if record["id"] not in seen:
            seen.add(record["id"])
            yield record
