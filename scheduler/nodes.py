"""Which workers there are: a registry whose entries live as long as their owner refreshes them."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, cast

import redis

from scheduler import scripts
from scheduler.redis_client import AWAY, connect
from scheduler.serializer import pack, unpack

log = logging.getLogger("tandem.nodes")

NodeState = Literal["starting", "ready", "draining"]
Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Node:
    """One worker process. `link`: host:port of its receiver; `secret`: shared with its senders,
    new at every boot; `rpc`: socket of its store; `facts`: anything else worth showing."""

    role: Role
    name: str
    queue: str = ""
    state: NodeState = "starting"
    fingerprint: str = ""
    link: str = ""
    secret: str = ""
    rpc: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    @property
    def key(self) -> str:
        """Redis key of the entry."""
        return f"tandem:node:{self.role}:{self.name}"


#: Names of decode nodes that have served a store: they are missed while they are away.
KNOWN = "tandem:decode-nodes"


@dataclass(frozen=True, slots=True)
class Survey:
    """The nodes that live, and the decode nodes that are known and do not."""

    nodes: Sequence[Node] = ()
    away: Sequence[str] = ()


class Nodes:
    """Reads the registry."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def list(self, role: Role | None = None) -> list[Node]:
        """All live nodes, sorted by role and name."""
        pattern = f"tandem:node:{role or '*'}:*"
        keys = sorted(self._client.scan_iter(pattern, count=500))
        values = cast("list[bytes | None]", self._client.mget(keys)) if keys else []
        return [node for value in values if value and (node := _parse(value))]

    def survey(self) -> Survey:
        """All live nodes, and the known decode nodes that are away. As many round trips as `list`
        where there is a node."""
        keys = sorted(self._client.scan_iter("tandem:node:*:*", count=500))
        pipe = self._client.pipeline(transaction=False)
        pipe.smembers(KNOWN)
        for key in keys:
            pipe.get(key)
        known, *values = pipe.execute()
        nodes = [node for value in values if value and (node := _parse(value))]
        here = {node.name for node in nodes if node.role == "decode"}
        return Survey(nodes, sorted({name.decode() for name in known} - here))

    def unknow(self, name: str) -> bool:
        """A decode node does not come back; False where it was not known."""
        return bool(self._client.srem(KNOWN, name))

    def get(self, role: Role, name: str) -> Node | None:
        """One node, or None where it does not live."""
        value = cast("bytes | None", self._client.get(f"tandem:node:{role}:{name}"))
        return _parse(value) if value else None

    def wait_for(self, role: Role, name: str, timeout: float, state: NodeState = "ready") -> Node:
        """The node once it is in `state`. Raises TimeoutError after `timeout` s."""
        deadline = time.monotonic() + timeout
        while True:
            node = self.get(role, name)
            if node is not None and node.state == state:
                return node
            if time.monotonic() >= deadline:
                seen = f"is {node.state}" if node else "has not reported"
                raise TimeoutError(f"{role} node {name!r} {seen} after {timeout:g} s")
            time.sleep(0.05)


class Presence:
    """Keeps the entry of this process alive from a thread; a context manager.

    After the process dies the entry lasts `ttl` seconds more. `stop` removes it at once.
    """

    def __init__(self, url: str, node: Node, ttl: float = 6.0) -> None:
        self._url = url
        self._node = node
        self._ttl = ttl
        self._live: Callable[[], Mapping[str, Any]] = dict
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    @property
    def node(self) -> Node:
        """The entry as it is now."""
        return self._node

    def start(self) -> Presence:
        """Publish the entry and keep it alive."""
        self._thread.start()
        return self

    def update(self, **changes: Any) -> None:
        """Change fields of the entry; published at once, from the thread."""
        with self._lock:
            self._node = dataclasses.replace(self._node, **changes)
        self._changed.set()

    def watch(self, live: Callable[[], Mapping[str, Any]]) -> None:
        """Ask for facts that change by themselves, from the thread, each time it publishes."""
        self._live = live

    def stop(self) -> None:
        """Remove the entry and end the thread."""
        self._stopped.set()
        self._changed.set()
        self._thread.join(5.0)

    def __enter__(self) -> Presence:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        client = connect(self._url, timeout=2.0, patience=0)
        away = known = False
        while not self._stopped.is_set():
            self._changed.clear()
            if self._stopped.is_set():  # what `stop` has set after the look at it is cleared now
                break
            node = dataclasses.replace(self._node, facts={**self._node.facts, **self._live()})
            try:
                value = pack(dataclasses.asdict(node))
                client.set(node.key, value, px=int(self._ttl * 1000))
                if node.role == "decode" and node.rpc and not known:
                    client.sadd(KNOWN, node.name)
                    known = True
            except AWAY as error:
                if not away:  # once: an outage may last for days
                    log.warning("presence: Redis is away (%s)", error)
                away = True
                self._stopped.wait(0.3)
                continue
            if away:
                log.info("presence: Redis is back")
                away = False
            self._changed.wait(self._ttl / 3)
        end = time.monotonic() + self._ttl  # by then it has gone by itself
        while not self._removed(client) and time.monotonic() < end:
            pass
        client.close()

    def _removed(self, client: redis.Redis) -> bool:
        """Remove the entry, but not a successor's; False where Redis has not answered in time."""
        try:
            scripts.call(client, "leave", {"key": self._node.key, "boot": self._node.boot})
        except redis.TimeoutError:
            return False
        except AWAY:
            pass
        return True


def _parse(value: bytes) -> Node | None:
    try:
        return Node(**unpack(value))
    except (TypeError, ValueError):
        return None
