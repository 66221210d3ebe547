"""Two decode nodes and the link between them, for what moves from one to the other."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import redis
from decode_kit import LONG, asking, make_job, replay_of
from decode_kit import Node as DecodeKit
from redis_kit import eventually
from test_late_engine import ids

from engine.model import Model
from scheduler.api.stores import Stores
from scheduler.homes import Homes
from scheduler.leaving import facts_of
from scheduler.nodes import Node, Nodes, Presence
from scheduler.record import Job
from scheduler.runs import Runs
from store.remote import Remote
from store.serving import Server, serve
from transport.receiver import Receiver
from worker_decode.moving import Moving

SECRET = b"s" * 32
TALK = "conv_" + "7" * 32


class Pair:
    """Decode node m3, which is to stop, and m4, which takes over."""

    def __init__(
        self, url: str, client: redis.Redis, model: Model, words: Any, **sections: Any
    ) -> None:
        sections = {"link": {"deadline_seconds": LONG}, **sections}
        self.dir = Path(tempfile.mkdtemp(prefix="tm-"))
        self.client = client
        self.leaving = DecodeKit(model, words, self.dir / "3", node="m3", **sections)
        self.other = DecodeKit(model, words, self.dir / "4", node="m4", **sections)
        self.receiver = Receiver("127.0.0.1", 0, SECRET, self.other.inbox, LONG)
        self.rpc: list[Server] = []
        self.presence: list[Presence] = []
        host, port = self.receiver.address
        for name, kit in (("m3", self.leaving), ("m4", self.other)):
            rpc = serve(kit.store, self.dir / name)
            remote = rpc.offer(Remote("127.0.0.1", 0, SECRET))
            self.rpc.append(rpc)
            entry = Node(
                "decode", name, state="ready" if name == "m4" else "draining",
                fingerprint=model.fingerprint.hex(), link=f"{host}:{port}",
                secret=SECRET.hex(), rpc=str(remote),
            )  # fmt: skip
            self.presence.append(Presence(url, entry, LONG).start())
        eventually(lambda: len(Nodes(client).list("decode")) == 2, "the nodes are not published")
        self.mover = Moving(
            self.leaving.config, model, self.leaving.store, Nodes(client), Runs(client),
            self.leaving.engine.forget, self.leaving.engine.settle,
        )  # fmt: skip
        self.leaving.engine._mover = self.mover
        self.rpc[0].add("update_conversation", self.mover.update)

    def stores(self) -> Stores:
        """What an API sees; to be closed."""
        nodes = Nodes(self.client)
        return Stores("m3", self.dir / "none", nodes.survey, Homes(self.client), LONG)

    def close(self) -> None:
        self.mover.close()
        for presence in self.presence:
            presence.stop()
        self.receiver.close()
        for rpc in self.rpc:
            rpc.close()
        for kit in (self.leaving, self.other):
            kit.close()
        shutil.rmtree(self.dir)

    def move(self, job: Job, seam: int) -> dict[str, Any]:
        """Run a job with a move after `seam` tokens; the hand-off's facts."""
        kit, heir = self.leaving, self.mover.heir()
        assert heir == "m4"
        run = kit.execution(job)
        kit.engine.add(run, job)
        while len(kit.said(job)) < seam:
            assert kit.engine.step() == []
        self.mover.prepare(job, heir)
        tail = kit.engine.leave(run, heir)
        assert tail is not None
        assert kit.engine.facts()["rows"] == 0
        facts = facts_of(job, heir, tail())
        self.go_on(job, facts)
        return facts

    def go_on(self, job: Job, facts: dict[str, Any]) -> dict[str, Any]:
        """The other node takes the job; the path it took."""
        self.other.events[job.id] = self.leaving.events.get(job.id, [])
        again = make_job(
            job.prompt_ids, ident=job.id, request=job.request, handoff=facts, node="m4",
            previous=job.previous, conversation=job.conversation,
        )  # fmt: skip
        finished = self.other.answer(again, replay_of(self.other.events[job.id]))
        assert finished.result is not None
        return dict(finished.result.path)


def first_turn(pair: Pair) -> tuple[Job, list[int]]:
    pair.leaving.store.create_conversation(TALK, "@ann", {"title": "sky"}, created=5.0)
    job = make_job(ids(), request=asking(6), conversation=TALK, owner="@ann")
    pair.leaving.answer(job)
    return job, [*job.prompt_ids, *pair.leaving.said(job)]
