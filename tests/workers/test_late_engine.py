"""An answer begun on the prefill node and handed off at some token, over a real link."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from decode_kit import LONG, asking, make_job, replay_of
from decode_kit import Node as DecodeKit
from redis_kit import eventually

from engine.drafters import NgramDrafter
from engine.errors import ModelError
from engine.model import Model
from scheduler import staying
from scheduler.config import LinkConfig
from scheduler.nodes import Node, Nodes, Presence
from scheduler.record import Job
from scheduler.runs import Cancelled
from scheduler.staying import Choice, Staying
from transport.receiver import Receiver
from worker_prefill.engine import Engine
from worker_prefill.handoff import Links
from worker_prefill.late import Late
from worker_prefill.parked import Parked

SECRET = b"s" * 32
LENGTH = 64
SEAMS = range(LENGTH + 1) if os.environ.get("TANDEM_SOAK") else [0, 1, 2, 23, 63, 64]


@pytest.fixture
def links(client: redis.Redis) -> Iterator[Links]:
    made = Links(Nodes(client), LinkConfig(deadline_seconds=LONG), "m5")
    yield made
    made.close()


@pytest.fixture
def decode(
    loaded: Model, words: Any, tmp_path: Path, redis_url: str, client: redis.Redis
) -> Iterator[DecodeKit]:
    """A decode node with a link."""
    made = DecodeKit(loaded, words, tmp_path)
    receiver = Receiver("127.0.0.1", 0, SECRET, made.inbox, LONG)
    host, port = receiver.address
    node = Node("decode", "local", state="ready", link=f"{host}:{port}", secret=SECRET.hex())
    presence = Presence(redis_url, node, LONG).start()
    eventually(lambda: Nodes(client).get("decode", "local"), "the node is not published")
    yield made
    presence.stop()
    receiver.close()
    made.close()


@pytest.fixture
def prefill(loaded: Model, words: Any, links: Links, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(staying, "LOOK", 0.0)
    parked = Parked(2, 1 << 30, 60.0)
    late = Late(loaded, words, 512)
    return Engine(loaded, links, 64, parked, late=late)


@pytest.fixture
def drafting(loaded: Model, words: Any, links: Links, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(staying, "LOOK", 0.0)
    late = Late(loaded, words, 512, drafter=NgramDrafter(longest=1, shortest=1))
    return Engine(loaded, links, 64, late=late)


def until(count: Callable[[], int], seam: int) -> Staying:
    """Stay for `seam` tokens: then something waits."""
    return Staying(
        lambda: None,
        lambda: int(count() >= seam),
        lambda waiting: Choice(not waiting, "asked for"),
        lambda: None,
    )


def ids(length: int = 150) -> list[int]:
    return [20 + (155 + 7 * i + i * i) % 380 for i in range(length)]


def moved(prefill: Engine, decode: DecodeKit, job: Job, seam: int) -> dict[str, Any]:
    """Run `job` with a hand-off after `seam` tokens; returns the hand-off's facts."""
    run = decode.execution(job)
    stay = until(lambda: len(decode.said(job)), seam)
    handoff = dict(prefill.begin(run, job, lambda _: False, stay)())
    fields = {"ident": job.id, "request": job.request, "handoff": handoff}
    again = make_job(job.prompt_ids, **fields)
    decode.answer(again, replay_of(decode.events[job.id]))
    return handoff


FORMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0.7, "seed": 4, "top_logprobs": 2},
    "json": {
        "temperature": 1.0,
        "grammar": {
            "kind": "json_schema",
            "text": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_the_log_is_that_of_an_answer_that_never_moved(
    prefill: Engine, decode: DecodeKit, form: str
) -> None:
    request = asking(LENGTH)
    request["params"] |= FORMS[form]
    whole = moved(prefill, decode, alone := make_job(ids(), request=request), 0)
    assert whole["late"] == {"stayed": False, "reason": "asked for"}
    said = decode.said(alone)
    if form == "greedy":
        assert said == decode.oracle(alone)
    for seam in [seam for seam in SEAMS if 0 < seam <= len(said)]:
        job = make_job(ids(), request=request)
        facts = moved(prefill, decode, job, seam)
        assert (facts["late"]["stayed"], facts["late"]["tokens"]) == (True, seam)
        assert decode.said(job) == said
        assert [_plain(e, job) for e in decode.events[job.id]] == [
            _plain(e, alone) for e in decode.events[alone.id]
        ]
        first, second = (decode.store.get_turn(j.id) for j in (alone, job))
        assert first is not None
        assert second is not None
        assert (first.output_ids, first.schedule) == (second.output_ids, second.schedule)
        assert (first.finish, first.usage) == (second.finish, second.usage)


def _plain(event: dict[str, Any], job: Job) -> str:
    return repr(event).replace(job.id.removeprefix("resp_"), "ID")


def test_the_whole_answer_is_said_here_and_ended_there(prefill: Engine, decode: DecodeKit) -> None:
    """Nothing comes to wait: the decode node gets the conversation at its end and keeps it."""
    job = make_job(ids(), request=asking(20))
    facts = moved(prefill, decode, job, 10**9)
    assert facts["late"]["ended"] == "length"
    assert facts["late"]["tokens"] == 20
    assert decode.said(job) == decode.oracle(job)
    following = make_job(
        [*decode.store.turn_ids(job.id), *ids(9)], previous=job.id, request=asking(5)
    )
    finished = decode.answer(following)
    assert finished.result is not None
    assert finished.result.path["path"] == "hot"
    assert decode.said(following) == decode.oracle(following)


def test_with_a_drafter_tokens_come_several_at_a_time(
    drafting: Engine, prefill: Engine, decode: DecodeKit
) -> None:
    request = asking(LENGTH)
    alone = make_job(ids(), request=request)
    moved(prefill, decode, alone, 0)
    for seam in (1, 9, 40):
        job = make_job(ids(), request=request)
        facts = moved(drafting, decode, job, seam)
        assert facts["late"]["tokens"] >= seam
        assert decode.said(job) == decode.said(alone) == decode.oracle(job)


def test_only_what_was_added_leaves_at_the_seam(prefill: Engine, decode: DecodeKit) -> None:
    """All whole blocks of the prompt are gone before; no row is sent twice."""
    block = prefill._model.layout.block_tokens
    prompt = ids(2 * block + 40)
    job = make_job(prompt, request=asking(30))
    before: list[int] = []
    run = decode.execution(job)

    def waiting() -> int:
        if not before:
            eventually(lambda: decode.inbox.received_bytes, "the prompt's rows do not arrive")
            before.append(decode.inbox.received_bytes)
        return int(len(decode.said(job)) >= 10)

    stay = Staying(lambda: None, waiting, lambda w: Choice(True, ""), lambda: None)
    facts = dict(prefill.begin(run, job, lambda _: False, stay)())
    assert facts["bytes"] == decode.inbox.received_bytes
    layout = prefill._model.layout
    held = len(prompt) - 1 + 10
    assert facts["bytes"] <= layout.state_bytes(held) + (1 << 16)
    pieces = decode.inbox.take(job.id)
    assert pieces is not None
    ranges = [(p.header.start, p.header.stop) for p in pieces[:-1]]
    assert ranges[-1][1] == held
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_blocks_of_the_answer_leave_while_it_is_said(prefill: Engine, decode: DecodeKit) -> None:
    """And are unpacked there: at the seam a part of a block and the snapshot are left."""
    block = prefill._model.layout.block_tokens
    prompt = ids(block - 4)
    job = make_job(prompt, request=asking(30))
    run = decode.execution(job)
    before: list[int] = []

    def waiting() -> int:
        if len(decode.said(job)) < 10:
            assert len(decode.said(job)) > 4 or not decode.inbox.received_bytes
            return 0
        eventually(lambda: decode.inbox.received_bytes, "the answer's rows do not arrive")
        before.append(decode.inbox.received_bytes)
        while decode.engine.idle():
            pass
        return 1

    stay = Staying(lambda: None, waiting, lambda w: Choice(True, ""), lambda: None)
    handoff = dict(prefill.begin(run, job, lambda _: False, stay)())
    (blocks,) = before
    assert blocks == prefill._model.layout.rows_bytes(0, block)
    assert handoff["bytes"] == decode.inbox.received_bytes > blocks
    again = make_job(prompt, ident=job.id, request=job.request, handoff=handoff)
    execution = decode.execution(again, replay_of(decode.events[job.id]))
    decode.run(execution)
    assert len(decode.said(job)) == 30
    unpacked = [facts for stage, _, _, facts in execution.notes._spans if stage == "unpack"]
    assert unpacked == [{"tokens": len(prompt) - 1 + 10, "early": block}]


def test_a_link_that_breaks_in_the_answer_is_formed_anew(
    prefill: Engine, decode: DecodeKit
) -> None:
    """What had come of it, and was unpacked already, is forgotten there."""
    block = prefill._model.layout.block_tokens
    prompt = ids(block - 4)
    job = make_job(prompt, request=asking(30))
    run = decode.execution(job)
    unpacked: list[int] = []

    def waiting() -> int:
        if len(decode.said(job)) == 10:
            eventually(lambda: decode.inbox.received_bytes, "the answer's rows do not arrive")
            (arrival,) = decode.inbox.arrivals().values()
            while decode.engine.idle():
                pass
            unpacked.append(decode.memory.used - arrival.granted)
            prefill._links.link("local").drop()
        return int(len(decode.said(job)) >= 14)

    stay = Staying(lambda: None, waiting, lambda w: Choice(True, ""), lambda: None)
    handoff = dict(prefill.begin(run, job, lambda _: False, stay)())
    assert unpacked[0] > 0
    assert (handoff["attempts"], handoff["late"]["tokens"]) == (2, 14)
    again = make_job(prompt, ident=job.id, request=job.request, handoff=handoff)
    decode.answer(again, replay_of(decode.events[job.id]))
    assert decode.said(job) == decode.oracle(job)
    decode.settle()
    assert decode.memory.used == 0


def test_a_state_without_its_log_is_not_used(prefill: Engine, decode: DecodeKit) -> None:
    """Redis lost what was said: the state is ahead of the log, and the answer is made again."""
    job = make_job(ids(), request=asking(20))
    run = decode.execution(job)
    stay = until(lambda: len(decode.said(job)), 12)
    handoff = dict(prefill.begin(run, job, lambda _: False, stay)())
    said = decode.said(job)
    del decode.events[job.id][5:]
    again = make_job(ids(), ident=job.id, request=job.request, handoff=handoff)
    finished = decode.answer(again, replay_of(decode.events[job.id]))
    assert finished.result is not None
    assert finished.result.path["path"] == "recomputed"
    assert decode.said(job)[: len(said)] == said
    assert decode.said(job) == decode.oracle(again)


def test_a_cancel_while_decoding_here_parks_nothing(prefill: Engine, decode: DecodeKit) -> None:
    job = make_job(ids(), request=asking(20))
    run = decode.execution(job)

    def check() -> None:
        if len(decode.said(job)) == 3:
            raise Cancelled

    stay = Staying(check, lambda: 0, lambda w: Choice(True, ""), lambda: None)
    with pytest.raises(Cancelled):
        prefill.begin(run, job, lambda _: False, stay)
    assert len(prefill._parked) == 0
    assert decode.inbox.take(job.id) is None
    eventually(lambda: decode.memory.used == 0, "memory stays promised")


def test_a_step_that_fails_here_is_made_there(
    prefill: Engine, decode: DecodeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(ids(), request=asking(12))
    run = decode.execution(job)
    assert prefill._late is not None

    def broken(*_: Any) -> None:
        raise ModelError("out of memory")

    monkeypatch.setattr(prefill._late, "decode", broken)
    tail = prefill.begin(run, job, lambda _: False, until(lambda: 0, 10**9))
    with pytest.raises(ModelError, match="out of memory"):
        tail()
    again = make_job(
        ids(), ident=job.id, request=job.request, handoff={"path": "none", "error": "x"}
    )
    decode.answer(again)
    assert decode.said(job) == decode.oracle(again)


def test_what_the_decode_node_refuses_is_handed_off_at_once(
    prefill: Engine, decode: DecodeKit
) -> None:
    job = make_job(ids(), request=asking(4, params={"max_output_tokens": 4, "temperature": -1.0}))
    run = decode.execution(job)
    facts = dict(prefill.begin(run, job, lambda _: False, until(lambda: 0, 10**9))())
    assert facts["path"] == "tcp"
    assert decode.events[job.id] == []
    assert decode.inbox.take(job.id) is not None
