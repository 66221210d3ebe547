"""A prefill node's engine and a decode node, joined by a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis
from decode_kit import LONG, Node
from redis_kit import eventually

from engine.model import Model
from scheduler.config import LinkConfig
from scheduler.execution import Execution
from scheduler.nodes import Node as Presented
from scheduler.nodes import Nodes, Presence
from scheduler.record import Job
from transport.receiver import Receiver
from worker_prefill.engine import Engine
from worker_prefill.handoff import Links
from worker_prefill.parked import Parked

SECRET = b"s" * 32


class Pair:
    """A prefill node's engine, a decode node, and the link between them."""

    def __init__(
        self,
        url: str,
        client: redis.Redis,
        model: Model,
        words: Any,
        path: Path,
        *,
        gigabytes: int = 1,
        snapshots: int = 4,
    ) -> None:
        """`gigabytes` of memory for states; an eighth of that is the store's size."""
        self.node = Node(
            model, words, path, limit=gigabytes << 30, size=gigabytes << 27,
            store={"snapshots": snapshots},
        )  # fmt: skip
        self.receiver = Receiver("127.0.0.1", 0, SECRET, self.node.inbox, LONG)
        host, port = self.receiver.address
        presented = Presented(
            "decode", "local", state="ready", boot="a", link=f"{host}:{port}", secret=SECRET.hex()
        )
        self.presence = Presence(url, presented, LONG).start()
        nodes = Nodes(client)
        eventually(lambda: nodes.get("decode", "local") is not None, "the node is not published")
        self.links = Links(nodes, LinkConfig(deadline_seconds=LONG), "m3")
        parked = Parked(4, 1 << 30, 900.0)
        self.engine = Engine(model, self.links, 256, parked, snapshots=snapshots)

    def prefill(self, job: Job) -> Callable[[], Mapping[str, Any]]:
        return self.engine.prefill(Execution(job), job, lambda _: False)

    def close(self) -> None:
        self.links.close()
        self.presence.stop()
        self.receiver.close()
        self.node.close()
