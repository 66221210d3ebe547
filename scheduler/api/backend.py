"""What the API's routes work with: the jobs, the decode node's store, the tokenizer, the events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter
from redis.exceptions import RedisError

from scheduler import events
from scheduler.api.caller import current
from scheduler.api.clients import Clients
from scheduler.api.faults import Fault, unavailable
from scheduler.api.pictures import Pictures
from scheduler.api.preamble import Preambles
from scheduler.api.stores import StoreAway, Stores
from scheduler.api.stream import EventHub
from scheduler.api.threads import Threads
from scheduler.api.tokenizer import Tokenizer
from scheduler.audit import Action, Audit
from scheduler.batches import Batches
from scheduler.config import Config
from scheduler.files import Files
from scheduler.homes import Homes, begin_at
from scheduler.jobs import Jobs
from scheduler.nodes import Node, Nodes, Survey
from scheduler.owners import Owners
from scheduler.record import Job, JobNotFound
from scheduler.redis_client import AWAY, connect, connect_async
from store.errors import StoreError, StoreUnavailable

PATIENCE = 3.0
"""Seconds that a request waits for Redis before it is told to come back later."""
STORE_TIMEOUT = 10.0
LOOKING = 4
"""Jobs that are looked up in Redis for streams at the same time: clients that come back all at
once must not take every thread. These threads are none of those that other requests wait for."""
ASKING = 1
"""Of those that Redis does not have, as many are looked up in a store. It answers one after the
other, and new requests ask it too: they must not stand in line behind many of these."""
_NODES_FOR = 1.0


class Backend:
    """Connections and caches of one API process. Thread-safe, but for the hub and limiters."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer; connects to nothing yet. Raises TokenizerError."""
        assert config.model_dir is not None, "the model's files must be found first"
        self.config = config
        self.model_dir: Path = config.model_dir
        self.tokenizer = Tokenizer.load(self.model_dir)
        self.preambles = Preambles(self.tokenizer)
        self.pictures = Pictures(self.model_dir, config.api)
        self.redis = connect(config.redis_url_of("api"), patience=PATIENCE)
        self.probe = connect(config.redis_url_of("api"), timeout=2.0, patience=0)
        """Asks only whether Redis is there, and does not wait for it."""
        self.jobs = Jobs(self.redis, config.jobs)
        self.clients = Clients(self.jobs)
        self.nodes = Nodes(self.redis)
        days = config.jobs.result_days
        self.threads = Threads(self.redis, config.model_name, days * 86_400)
        self.async_redis = connect_async(config.redis_url_of("api"), patience=PATIENCE)
        self.hub = EventHub(self.async_redis)
        self.looking = CapacityLimiter(LOOKING)
        """Taken while a job is looked up in Redis for a stream."""
        self.asking = CapacityLimiter(ASKING)
        """Taken while one is looked up in a store."""
        self.audit = Audit.of(config.data_dir)
        self.owners = Owners(config.data_dir)
        self.files = Files(self.redis, config.data_dir / "files", int(config.api.files_gb * 1e9))
        self.batches = Batches(self.redis)
        self.started = int(time.time())
        self.stores = Stores(
            config.node, config.store_socket, self._known_nodes, Homes(self.redis), STORE_TIMEOUT
        )
        self._nodes: tuple[float, Survey] = (0.0, Survey())

    async def close(self) -> None:
        """Close every connection."""
        await self.hub.stop()
        await self.async_redis.aclose()
        self.stores.close()
        self.pictures.close()
        self.redis.close()
        self.probe.close()
        self.audit.close()

    def _is_ours(self, name: str) -> bool:
        """Whether `name` stands for the served model."""
        config = self.config
        names = {config.model_name, config.model, self.model_dir.name, "default", "tandem"}
        return name in names or any(fnmatchcase(name, alias) for alias in config.api.aliases)

    def model(self, name: str | None) -> str:
        """The served model's name; Fault 404 where `name` is another's."""
        if name is not None and not self._is_ours(name):
            raise Fault(
                404,
                f"model '{name[:80]}' is not served here: use '{self.config.model_name}', or let "
                "it stand for that by api.aliases",
                code="model_not_found",
                param="model",
            )
        return self.config.model_name

    @contextmanager
    def store(self) -> Iterator[Stores]:
        """The stores of the decode nodes. Fault 503 where the one in question is not there."""
        try:
            yield self.stores
        except StoreAway as error:
            raise unavailable(
                f"decode node {', '.join(error.nodes)}, where this lies or may lie,",
                "start its worker; if it does not come back, `tandem node forget NAME`",
            ) from error
        except StoreUnavailable as error:
            raise unavailable(
                "the decode node's store", "its worker is starting or down; try again shortly"
            ) from error

    def _known_nodes(self) -> Survey:
        """Which nodes there are, as last heard where Redis is away: stores answer without it."""
        with contextlib.suppress(RedisError, *AWAY):
            self.present()
        return self._nodes[1]

    def decode_node(self) -> str:
        """Name of the decode node that new conversations go to."""
        return begin_at(self.present(), self.config.node)

    def present(self) -> Sequence[Node]:
        """The nodes that are registered now, at most a second old."""
        at, seen = self._nodes
        if time.monotonic() - at > _NODES_FOR:
            seen = self.nodes.survey()
            self._nodes = (time.monotonic(), seen)
        return seen.nodes

    def note(self, action: Action, ident: str, **more: Any) -> None:
        """A line in the audit log about what the present caller did."""
        caller = current()
        self.audit.note(action, ident, owner=caller.owner, address=caller.address, **more)

    def deleted(self, response: str) -> bool:
        """Whether a client has deleted this response."""
        return bool(self.redis.exists(f"tandem:deleted:{response}"))

    def delete(self, job: Job) -> None:
        """Forget an ended response: its record, its events, and its conversation if it is alone.

        Token ids that later turns build on stay with those turns' conversation; the response
        itself can no longer be retrieved or continued.
        """
        self._forget(job)
        about = (job.request.get("params") or {}).get("about") or {}
        if not job.conversation or not about.get("new_conversation"):
            return
        with self.store() as store:
            record = store.get_conversation(job.conversation)
            if record is not None and record["head"] == job.id and record["turns"] == 1:
                store.delete_conversation(job.conversation)
                self.redis.expire(f"tandem:deleted:{job.id}", self._mark_seconds)

    def delete_conversation(self, conversation: str) -> None:
        """Delete a conversation with everything said in it; Fault 503 without the store."""
        with self.store() as store:
            turns = store.conversation_turns(conversation)
            store.delete_conversation(conversation)
        for turn in turns:
            with contextlib.suppress(JobNotFound):
                self._forget(self.jobs.get(turn), self._mark_seconds)

    @property
    def _mark_seconds(self) -> int:
        """How long a mark is needed where nothing of a response is left to be found."""
        return int(self.config.jobs.result_days * 86_400) + 60

    def _forget(self, job: Job, seconds: int | None = None) -> None:
        pipe = self.redis.pipeline()
        pipe.set(f"tandem:deleted:{job.id}", 1, ex=seconds)
        pipe.delete(f"tandem:job:{job.id}", f"tandem:prompt:{job.id}", events.key(job.id))
        pipe.zrem(f"tandem:jobs:{job.status}", job.id)
        pipe.execute()
        self.hub.forget(job.id)

    def health(self) -> dict[str, Any]:
        """What of the stack answers, and which nodes are ready; never raises."""
        facts: dict[str, Any] = {"model": self.config.model_name, "redis": False, "store": False}
        nodes: list[Node] = []
        try:
            facts["redis"] = bool(self.probe.ping())
            nodes = self.nodes.list()
        except (RedisError, *AWAY):
            facts["redis"] = False
        try:
            facts["store"] = self.stores.ping()
        except StoreError:
            facts["store"] = False
        facts["nodes"] = [
            {"role": n.role, "name": n.name, "state": n.state, "pid": n.pid, "facts": n.facts}
            for n in nodes
        ]
        ready = {n.role for n in nodes if n.state == "ready"}
        facts["prefill"] = "prefill" in ready
        facts["decode"] = "decode" in ready
        facts["ready"] = all(facts[part] for part in ("redis", "store", "prefill", "decode"))
        facts["missing"] = _missing(facts, nodes)
        return facts


def _missing(facts: dict[str, Any], nodes: list[Node]) -> list[str]:
    """What keeps requests from being served, each with what is known of it."""
    if not facts["redis"]:
        # Which workers there are stands in Redis.
        return ["Redis does not answer"] + ([] if facts["store"] else ["the store does not answer"])
    missing = [] if facts["store"] else ["the store does not answer: is the decode worker running?"]
    return missing + missing_workers(nodes)


def missing_workers(nodes: Sequence[Node]) -> list[str]:
    """Roles of which no worker is ready, each with what is known of it."""
    missing = []
    for role in ("prefill", "decode"):
        found = [node for node in nodes if node.role == role]
        if not any(node.state == "ready" for node in found):
            states = ", ".join(f"{node.name} is {node.state}" for node in found)
            missing.append(f"no {role} worker is ready: {states or 'none has reported'}")
    return missing
