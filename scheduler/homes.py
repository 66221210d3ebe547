"""Which decode node a conversation lies on, where a new one begins, and who takes over.

A conversation lies whole on one decode node, its home: records, token ids and states in that
node's store, its live answers in that node's batch. The stores are the truth; Redis has a pointer,
`tandem:home:<conversation>` (node; n, the jobs accepted on it), and the conversation's live jobs,
`tandem:at:<conversation>`, with those that branch from it. A pointer is set and read only where
there is more than one decode node, and a conversation without one is asked for everywhere. Pointer
and jobs change in the same scripts:

- accept: a job is accepted only for the home that its prompt was made for, and a branch only where
  its past is (`accept.lua`).
- move: an idle conversation goes with its stored states, as an export does; the pointer moves if no
  job was accepted meanwhile (`switch.lua`).
- hand over: a node that is to stop sends the state of a live answer over the link, as a prefill
  node does, and the conversation's records into the other store; then one step gives the job the
  other node and moves the pointer (`rehome.lua`). It is refused while another job of the
  conversation lives, so that what is said in one is never split.

The old copy stands still from the last comparison with the new one until it goes.

Until that step everything at the other node is a copy that nobody looks at; after it the old one
is, and is deleted. Who dies in between leaves a copy too many, which goes at a node's next start;
`tandem:moving:<conversation>` keeps that from what is on its way at the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import redis

from scheduler import scripts
from scheduler.nodes import Node
from store.errors import StoreError
from store.remote import parse_address
from store.rpc import StoreClient

KEEP = 90 * 86_400
"""Seconds for which a pointer outlives its latest use."""
DRAINED = "drained"
"""The fact of a decode node that takes no new conversations, as its operator wishes."""
_CLAIM = 3600
_CLEARING = 60


def key_of(conversation: str) -> str:
    """Redis key of a conversation's pointer."""
    return f"tandem:home:{conversation}"


def begin_at(nodes: Iterable[Node], own: str) -> str:
    """The decode node that a new conversation goes to: the ready one whose batch has most room.

    `own`, the asker's, where others have no more; it is also the answer where none is ready. One
    that is drained takes them where no other is ready.
    """
    ready = [node for node in nodes if node.role == "decode" and node.state == "ready"]
    if not ready:
        return own
    order = [(not takes_new(node), _busy(node), node.name != own, node.name) for node in ready]
    return min(order)[-1]


def takes_new(node: Node) -> bool:
    """Whether a new conversation may begin on a node while others are there as well."""
    return node.role == "decode" and node.state == "ready" and not node.facts.get(DRAINED)


def successor(nodes: Iterable[Node], leaving: str, fingerprint: str) -> Node | None:
    """The node that takes over from decode node `leaving`: ready, of the same model, with a link
    and the most room. None: what runs is finished where it is, or waits there."""
    fit = [
        node
        for node in nodes
        if node.role == "decode"
        and node.state == "ready"
        and node.name != leaving
        and node.fingerprint == fingerprint
        and node.link
        and node.rpc
    ]
    order = sorted(fit, key=lambda node: (not takes_new(node), _busy(node), node.name))
    return order[0] if order else None


def store_of(node: Node, timeout: float) -> StoreClient:
    """A client of a decode node's store, on this machine or another. Raises StoreError."""
    remote = parse_address(node.rpc, bytes.fromhex(node.secret)) if node.secret else None
    path = Path("/nonexistent/store" if remote is not None else node.rpc)
    if remote is None and not path.exists():
        raise StoreError(
            f"decode node {node.name} serves its store to its own machine only: set store.rpc_host"
        )
    return StoreClient(path, timeout, lambda: remote)


def _busy(node: Node) -> float:
    return float(node.facts.get("rows") or 0) / float(node.facts.get("slots") or 1)


class Homes:
    """The pointers. Raises what Redis raises. Thread-safe."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def of(self, conversation: str) -> str:
        """The conversation's home, or "" where no pointer says."""
        found = cast("bytes | None", self._client.hget(key_of(conversation), "node"))
        return (found or b"").decode()

    def of_all(self, conversations: Sequence[str]) -> list[str]:
        """The homes of several conversations, in their order."""
        pipe = self._client.pipeline(transaction=False)
        for conversation in conversations:
            pipe.hget(key_of(conversation), "node")
        return [(found or b"").decode() for found in pipe.execute()]

    def begin(self, conversation: str, node: str) -> None:
        """Say where a conversation that has no job yet is."""
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(key_of(conversation), "node", node)
        pipe.expire(key_of(conversation), KEEP)
        pipe.execute()

    def settle(self, conversation: str, node: str) -> None:
        """Say where a conversation is, if nothing says it yet."""
        pipe = self._client.pipeline(transaction=True)
        pipe.hsetnx(key_of(conversation), "node", node)
        pipe.expire(key_of(conversation), KEEP)
        pipe.execute()

    def count(self, conversation: str) -> int:
        """How many jobs were accepted on a conversation, and how often it has moved."""
        found = cast("bytes | None", self._client.hget(key_of(conversation), "n"))
        return int(found or 0)

    def switch(self, conversation: str, came: str, to: str, count: int) -> bool:
        """Move the pointer of a conversation that is copied, if `count` is as it was before.

        False where a job of it lives, was accepted since, or `came` is not its home.
        """
        args = {
            "conversation": conversation,
            "from": came,
            "node": to,
            "n": str(count),
            "keep_home": KEEP,
        }
        return bool(scripts.call(self._client, "switch", args) == b"ok")

    def forget(self, conversation: str) -> None:
        """The conversation is deleted."""
        self._client.delete(key_of(conversation))

    def claim(self, conversation: str, node: str) -> bool:
        """Keep copies of a conversation that `node` sends from being taken for left-overs.

        False while one is being deleted. It lasts an hour, or until `release`.
        """
        return self._claimed(conversation, node, node, _CLAIM)

    def clearing(self, conversation: str, own: str) -> bool:
        """Claim the left-over copy of node `own` while it is deleted; False while one is sent."""
        return self._claimed(conversation, own, "", _CLEARING)

    def _claimed(self, conversation: str, own: str, value: str, seconds: int) -> bool:
        args = {"conversation": conversation, "own": own, "value": value, "seconds": seconds}
        return bool(scripts.call(self._client, "claim", args) == b"ok")

    def release(self, conversation: str) -> None:
        """Nothing of the conversation is on its way any more."""
        self._client.delete(f"tandem:moving:{conversation}")
