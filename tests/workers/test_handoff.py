"""Hand-offs over a real link to a node that is there, absent, late, broken, full or another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import redis
from decode_kit import LONG, asking, contents, make_job, state_of, tiny
from redis_kit import Server, eventually
from tiny_models import prompt

from engine.model import Model
from scheduler.config import LinkConfig
from scheduler.execution import Execution
from scheduler.nodes import Node, Nodes, Presence
from scheduler.record import Job
from scheduler.redis_client import connect
from scheduler.runs import Cancelled
from transport.errors import LinkError
from transport.receiver import Receiver
from worker_decode.inbox import Inbox
from worker_decode.marks import marks_of
from worker_decode.memory import Memory
from worker_decode.states import restore
from worker_prefill.engine import Engine
from worker_prefill.handoff import ATTEMPTS, Links

SECRET = b"s" * 32
CHUNK = 64


class DecodeNode:
    """The receiving end: published in Redis, with an inbox behind its link."""

    def __init__(self, url: str, model: Model, boot: str, limit: int = 1 << 26) -> None:
        self.memory = Memory(limit)
        self.inbox = Inbox(model.fingerprint, self.memory, 0.0)
        self.receiver = Receiver("127.0.0.1", 0, SECRET, self.inbox, LONG)
        host, port = self.receiver.address
        node = Node(
            "decode", "local", state="ready", boot=boot, link=f"{host}:{port}", secret=SECRET.hex()
        )
        self.presence = Presence(url, node, LONG).start()
        nodes = Nodes(connect(url))
        eventually(lambda: self._published(nodes, boot), "the node is not published")
        nodes._client.close()

    @staticmethod
    def _published(nodes: Nodes, boot: str) -> bool:
        node = nodes.get("decode", "local")
        return node is not None and node.boot == boot

    def close(self) -> None:
        self.presence.stop()
        self.receiver.close()


@pytest.fixture
def nodes() -> Iterator[list[DecodeNode]]:
    """Decode nodes of a test, closed afterwards."""
    made: list[DecodeNode] = []
    yield made
    for node in made:
        node.close()


@pytest.fixture
def links(client: redis.Redis) -> Iterator[Links]:
    made = Links(Nodes(client), LinkConfig(deadline_seconds=LONG), "m3")
    yield made
    made.close()


def prefill(
    model: Model, links: Links, job: Job, check: Callable[[int], None] = lambda _: None
) -> Callable[[], Mapping[str, Any]]:
    return Engine(model, links, CHUNK).prefill(Execution(job), job, check)


def arrived(node: DecodeNode, model: Model, job: Job) -> None:
    """The state in the inbox is bit for bit the one that a prefill alone makes."""
    pieces = node.inbox.take(job.id)
    assert pieces is not None
    assert contents(pieces) == contents(state_of(model, job.prompt_ids, CHUNK))
    assert restore(model, pieces, job.prompt_ids).ids == job.prompt_ids[:-1]
    assert node.memory.used == 0


def test_a_state_crosses_the_link(
    model: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, model, "a"))
    job = make_job(prompt(200))
    seen: list[int] = []
    facts = prefill(model, links, job, seen.append)()
    assert seen == [0, 64, 128, 164, 199]  # the short rest is shared out
    assert (facts["path"], facts["attempts"], facts["streams"]) == ("tcp", 1, 2)
    assert facts["bytes"] == nodes[0].inbox.received_bytes
    assert sum(length * count for length, count in facts["schedule"]) == 199
    assert "errors" not in facts
    arrived(nodes[0], model, job)


def test_chunks_are_small_while_an_interactive_job_waits(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))
    job = make_job(prompt(201))
    engine = Engine(llama, links, CHUNK, small_chunk=CHUNK // 2)
    facts = engine.prefill(Execution(job), job, lambda done: done in (64, 96))()
    assert facts["schedule"] == [[64, 1], [32, 2], [36, 2]], "72 at the end are shared out"
    pieces = nodes[0].inbox.take(job.id)
    assert pieces is not None
    assert restore(llama, pieces, job.prompt_ids).ids == job.prompt_ids[:-1]
    assert Engine(llama, links, CHUNK).small_chunk == CHUNK, "on a CPU there is but one size"
    assert Engine(llama, links, CHUNK, small_chunk=9000).small_chunk == CHUNK


def test_the_promise_covers_every_length(
    model: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, model, "a"))
    for length in (2, 3, 17, 300):
        job = make_job(prompt(length))
        assert prefill(model, links, job)()["attempts"] == 1
        arrived(nodes[0], model, job)
    assert nodes[0].receiver.stats()["links"] == 1  # one link for all


def test_states_inside_a_prompt_are_left_out_where_there_is_no_room(
    links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    """The state itself still comes over, though at the end."""
    model = tiny("qwen3_next")
    model.__dict__["layout"] = replace(model.layout, value_bytes=1)
    layout = model.layout
    request = asking(4, prompt={"last": 320})
    job = make_job(prompt(600), request=request)
    marks = marks_of(job, layout, 4)
    assert marks.before
    rows_and_snapshot = layout.state_bytes(599) + (1 << 20)
    nodes.append(DecodeNode(redis_url, model, "a", rows_and_snapshot + 10_000))
    engine = Engine(model, links, CHUNK, snapshots=4)
    facts = engine.prefill(Execution(job), job, lambda _: False)()
    assert (facts["path"], facts["attempts"]) == ("tcp", 2)
    assert "no memory" in facts["errors"][0]
    pieces = nodes[0].inbox.take(job.id)
    assert pieces is not None
    assert [piece.header.kind for piece in pieces].count("snapshot") == 1
    assert restore(model, pieces, job.prompt_ids).ids == job.prompt_ids[:-1]
    # With room for them they come along.
    nodes[0].memory.limit = 1 << 26
    again = make_job(prompt(600), request=request)
    assert engine.prefill(Execution(again), again, lambda _: False)()["attempts"] == 1
    pieces = nodes[0].inbox.take(again.id)
    assert pieces is not None
    stops = [piece.header.stop for piece in pieces if piece.header.kind == "snapshot"]
    assert stops == [*marks.before, 599]


def test_one_token_has_no_state(llama: Model, links: Links) -> None:
    facts = prefill(llama, links, make_job([5]))()
    assert facts["path"] == "none"


def test_without_a_decode_node_it_gives_up(llama: Model, client: redis.Redis) -> None:
    links = Links(Nodes(client), LinkConfig(deadline_seconds=0.01), "m3")
    tail = prefill(llama, links, make_job(prompt(100)))
    with pytest.raises(LinkError, match="'local' is not there, or still loading"):
        tail()


def test_a_node_that_comes_late_is_waited_for(
    llama: Model,
    links: Links,
    redis_url: str,
    nodes: list[DecodeNode],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job(prompt(100))
    refused = threading.Event()
    wait = links.wait
    monkeypatch.setattr(links, "wait", lambda *args: (refused.set(), wait(*args))[1])
    tail = prefill(llama, links, job)
    facts: list[Mapping[str, Any]] = []
    ending = threading.Thread(target=lambda: facts.append(tail()))
    ending.start()
    assert refused.wait(60)
    nodes.append(DecodeNode(redis_url, llama, "a"))
    ending.join()
    assert facts[0]["attempts"] == 2
    assert "is not there" in facts[0]["errors"][0]
    arrived(nodes[0], llama, job)


def test_a_node_that_is_replaced_gets_all_of_it(
    model: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, model, "a"))
    job = make_job(prompt(200))

    def replace(position: int) -> None:
        if position == 128:
            nodes[0].close()
            nodes.append(DecodeNode(redis_url, model, "b"))

    facts = prefill(model, links, job, replace)()
    assert facts["attempts"] == 2
    assert len(facts["errors"]) == 1
    assert nodes[0].memory.used == 0
    arrived(nodes[1], model, job)


@pytest.mark.parametrize("position", [64, 199])
def test_a_link_that_breaks_is_formed_anew(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode], position: int
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))
    job = make_job(prompt(200))

    def cut(at: int) -> None:
        if at == position:
            links.link("local").drop()

    facts = prefill(llama, links, job, cut)()
    assert facts["attempts"] == 2
    arrived(nodes[0], llama, job)


def test_a_link_that_always_breaks_is_given_up(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))
    made_before = links._to

    def dead(node: Node) -> Any:
        link = made_before(node)
        link.close()
        return link

    links._to = dead  # type: ignore[method-assign]
    job = make_job(prompt(100))
    tail = prefill(llama, links, job)
    with pytest.raises(LinkError, match="closed"):
        tail()
    assert nodes[0].inbox.take(job.id) is None
    assert nodes[0].memory.used == 0
    with pytest.raises(LinkError):  # no attempt is left
        tail()


def test_another_model_is_not_computed_for(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    other = Model(llama.path, llama.model, llama.config, llama.device, fingerprint=b"o" * 16)
    nodes.append(DecodeNode(redis_url, other, "a"))

    def check(_: int) -> None:
        raise AssertionError("it is computed although nobody takes it")

    tail = prefill(llama, links, make_job(prompt(100)), check)
    with pytest.raises(LinkError, match="another model"):
        tail()
    assert nodes[0].memory.used == 0


def test_a_full_node_is_asked_again_and_then_left(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))
    nodes[0].memory.take(nodes[0].memory.limit)
    tail = prefill(llama, links, make_job(prompt(100)))
    with pytest.raises(LinkError, match="no memory for"):
        tail()
    assert nodes[0].memory.used == nodes[0].memory.limit
    job = make_job(prompt(100))
    tail = prefill(llama, links, job)
    nodes[0].memory.release(nodes[0].memory.limit)  # room has been made meanwhile
    assert tail()["attempts"] == 2
    arrived(nodes[0], llama, job)
    assert ATTEMPTS == 3


@pytest.mark.parametrize("position", [0, 128, 199])
def test_a_prefill_that_is_stopped_takes_its_offer_back(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode], position: int
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))

    def stop(at: int) -> None:
        if at == position:
            assert nodes[0].memory.used > 0
            raise Cancelled

    with pytest.raises(Cancelled):
        prefill(llama, links, make_job(prompt(200)), stop)
    eventually(lambda: nodes[0].memory.used == 0, "the promise is not taken back")
    assert links.link("local").status().connected  # the link goes on


def test_a_delivered_state_is_not_sent_again(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    """As when the acknowledgement was lost, and the same run offers it again."""
    nodes.append(DecodeNode(redis_url, llama, "a"))
    job = make_job(prompt(100))
    once = prefill(llama, links, job)()
    received = nodes[0].inbox.received_bytes
    again = prefill(llama, links, job)()
    assert again["bytes"] == once["bytes"] == received == nodes[0].inbox.received_bytes
    arrived(nodes[0], llama, job)


def test_a_run_that_is_repeated_replaces_what_its_first_has_sent(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))
    job = make_job(prompt(100))
    again = make_job(job.prompt_ids, ident=job.id, run="fedcba9876543210")
    for each in (job, again):
        prefill(llama, links, each)()
    arrived(nodes[0], llama, job)
    assert nodes[0].inbox.take(job.id) is None


def test_redis_being_away_is_a_link_error(llama: Model) -> None:
    with Server() as server:
        client = connect(server.url, patience=0)
    links = Links(Nodes(client), LinkConfig(deadline_seconds=0.01), "m3")
    tail = prefill(llama, links, make_job(prompt(100)))
    with pytest.raises(LinkError, match="Redis, where decode nodes are listed, is away"):
        tail()
    client.close()


def test_closing_ends_every_link(
    llama: Model, links: Links, redis_url: str, nodes: list[DecodeNode]
) -> None:
    nodes.append(DecodeNode(redis_url, llama, "a"))
    job = make_job(prompt(100))
    prefill(llama, links, job)()
    link = links.link("local")
    assert links.link("local") is link
    assert link.status().connected
    links.close()
    assert not link.status().connected
    eventually(lambda: nodes[0].receiver.stats()["links"] == 0, "the receiver keeps the link")
