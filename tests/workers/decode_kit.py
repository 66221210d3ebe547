"""A decode node without its process: a real model, store, memory and inbox, and jobs for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redis_kit import eventually
from tiny_models import TINY, VOCAB

from engine.device import prepare
from engine.model import Model, widen
from engine.prefill import Prefill, append_schedule, ends_of, expand_schedule
from engine.sampling import SamplingParams
from engine.solo import Answer, answer
from scheduler.config import Config
from scheduler.events import Replay
from scheduler.execution import Execution, Finished, Pending
from scheduler.record import Job, pack_ids, parse, response_id
from scheduler.serializer import pack, unpack
from store.codec.header import Piece
from store.codec.pack import Exporter
from store.store import Store
from transport.protocol import Offer
from worker_decode.engine import Engine
from worker_decode.hot import Held, Hot
from worker_decode.inbox import Inbox
from worker_decode.lending import Lending
from worker_decode.memory import Memory
from worker_decode.starts import Starts
from worker_decode.states import nbytes_of

STORE_BYTES = 64 << 20
LONG = 60.0
"""Deadlines and signs of life (seconds) of what is sound: a machine that stalls is no fault."""


def tiny(name: str) -> Model:
    """A tiny random model of one architecture, widened as the engine widens models on a CPU."""
    entry = TINY[name]
    lm = entry.build()
    if prepare().dtype == "float32":
        widen(lm, prepare())
    source = vars(getattr(lm, "config", None) or lm.args)
    config = {k: v for k, v in source.items() if isinstance(v, (int, str, dict, list))}
    config |= {"model_type": str(lm.model_type), "vocab_size": VOCAB}
    config["max_position_embeddings"] = 4096
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return Model(Path(name), lm, config, prepare(), digest, entry.caches)


def make_job(ids: Sequence[int], *, ident: str | None = None, **fields: Any) -> Job:
    """A job as it is read from Redis, with the given fields of its record."""
    raw: dict[bytes, bytes] = {
        b"status": b"decoding",
        b"stage": b"decode",
        b"created_at": b"1.0",
        b"model": b"tiny",
        b"node": b"local",
        b"run": b"0123456789abcdef",
        b"prompt_tokens": str(len(ids)).encode(),
        b"request": pack(fields.pop("request", {"input": [{"role": "user", "content": "?"}]})),
    }
    for name in ("handoff",):
        if fields.get(name) is not None:
            raw[name.encode()] = pack(fields.pop(name))
    raw |= {name.encode(): str(value).encode() for name, value in fields.items() if value}
    return parse(ident or response_id(), raw, pack_ids(ids))


def contents(pieces: Sequence[Piece]) -> list[tuple[bytes, bytes]]:
    """What two equal states have in common: headers and payloads."""
    return [(piece.header.pack(), bytes(piece.payload)) for piece in pieces]


def state_of(model: Model, ids: Sequence[int], chunk: int = 64) -> list[Piece]:
    """The state of all but the last of `ids`, as a prefill node sends it."""
    prefill = Prefill(model, ids, chunk=chunk)
    prefill.run()
    schedule: list[list[int]] = []
    for length in prefill.schedule:
        append_schedule(schedule, length)
    exporter = Exporter(model.layout, ids)
    ends = ends_of(schedule)
    rows = exporter.rows(prefill.caches, len(ids) - 1, last=True, ends=ends)
    return [*rows, exporter.snapshot(prefill.caches, {"schedule": schedule, "rope_delta": 0})]


def held_after(model: Model, ids: Sequence[int], tokens: int, turn: str) -> tuple[Held, Answer]:
    """A state as it is after an answer of `tokens` tokens to `ids`."""
    said = answer(model, ids, (), SamplingParams(max_tokens=tokens))
    held = Held(
        turn=turn,
        caches=said.caches,
        ids=said.ids,
        pending=said.pending,
        schedule=said.schedule,
        rope_delta=0,
        nbytes=nbytes_of(said.caches),
    )
    return held, said


def offer(model: Model, response: str, nbytes: int, *, transfer: str = "") -> Offer:
    return Offer(
        transfer=transfer or response,
        attempt=1,
        response=response,
        fingerprint=model.fingerprint,
        start=0,
        tokens=1,
        nbytes=nbytes,
        block_tokens=model.layout.block_tokens,
        purpose="handoff",
        number=0,
    )


def deliver(inbox: Inbox, model: Model, response: str, pieces: Sequence[Piece]) -> None:
    """Put a whole state into the inbox, as the receiver would."""
    total = sum(piece.payload.nbytes for piece in pieces)
    assert not hasattr(inbox.admit(offer(model, response, total + 1000)), "reason")
    for piece in pieces:
        buffer = inbox.buffer(response, piece.payload.nbytes)
        buffer[:] = piece.payload
        inbox.piece(response, Piece(piece.header, buffer))
    inbox.done(response)


class Parts:
    """What `Starts` looks through."""

    def __init__(self, model: Model, path: Path, limit: int = 1 << 30) -> None:
        self.model = model
        self.store = Store.open(path / "store", STORE_BYTES)
        self.memory = Memory(limit)
        self.inbox = Inbox(model.fingerprint, self.memory, 0.0)
        self.hot = Hot(self.memory)
        self.starts = Starts(model, self.store, self.hot, self.inbox, 10_000)

    def close(self) -> None:
        self.store.close()


class Node:
    """A decode node's engine; `answer` runs a job to its end."""

    def __init__(self, model: Model, tokenizer: Any, path: Path, **sections: Any) -> None:
        store = {"idle_seconds": 0.0, **sections.pop("store", {})}
        limit, size = sections.pop("limit", 1 << 30), sections.pop("size", STORE_BYTES)
        self.config = Config(data_dir=path, store=store, **sections)
        self.model = model
        self.store = Store.open(path / "store", size)
        self.memory = Memory(limit)
        self.inbox = Inbox(model.fingerprint, self.memory, 0.0)
        self.lending = Lending(model, self.store, self.memory, LONG)
        self.ended: set[str] = set()
        self.engine = Engine(
            self.config, model, tokenizer, self.store, self.memory, self.inbox,
            ended=self.ended.__contains__, lending=self.lending,
        )  # fmt: skip
        # A test machine may be short of memory for reasons of its own.
        self.engine.kept.hardship.pressed = lambda: False
        self.events: dict[str, list[dict[str, Any]]] = {}

    def execution(self, job: Job, replay: Replay | None = None) -> Execution:
        log = self.events.setdefault(job.id, [])

        def emit(_: Execution, pending: list[Pending]) -> None:
            log.extend(unpack(event.data) for event in pending)

        return Execution(job, replay or Replay(), _emit=emit)

    def run(self, execution: Execution) -> Finished:
        """Add a job and step until it has ended; it is not committed."""
        self.engine.add(execution, execution.job)
        while True:
            for finished in self.engine.step():
                assert finished.execution is execution
                return finished

    def answer(self, job: Job, replay: Replay | None = None) -> Finished:
        """Run a job and make its turn durable."""
        finished = self.run(self.execution(job, replay))
        assert finished.error is None, finished.error
        if finished.commit is not None:
            finished.commit()
        return finished

    def said(self, job: Job) -> list[int]:
        """Token ids of all deltas of a job."""
        return [token for event in self.events[job.id] for token in event.get("ids", ())]

    def settle(self) -> None:
        """Until every state is in the store and out of memory."""

        def quiet() -> bool:
            self.engine.idle()
            return self.engine.facts()["hot"] == 0

        eventually(quiet, "states stay in memory")

    def oracle(self, job: Job) -> list[int]:
        """What one process answers that runs the recorded forwards of the prompt alone."""
        ids = job.prompt_ids
        turn = self.store.get_turn(job.id)
        assert turn is not None
        lengths = expand_schedule(turn.schedule)
        total = count = 0
        while total < len(ids) - 1:
            total += lengths[count]
            count += 1
        assert total == len(ids) - 1, "a forward spans the prompt's end"
        limit = job.request["params"]["max_output_tokens"]
        params = SamplingParams(max_tokens=limit, stop_ids=self.model.eos_ids)
        return answer(self.model, ids, lengths[:count], params).tokens

    def close(self) -> None:
        self.engine.drain()
        self.store.close()


def asking(tokens: int, **more: Any) -> dict[str, Any]:
    """A request for so many tokens."""
    return {
        "input": [{"role": "user", "content": "?"}],
        "params": {"max_output_tokens": tokens},
        **more,
    }


def replay_of(events: Sequence[Mapping[str, Any]]) -> Replay:
    """What an earlier run has said."""
    return Replay.of(events)
