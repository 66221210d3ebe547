"""`tandem bench resume`: the first token of a resumed conversation against its lower bounds."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir
from store.taken import taken

if TYPE_CHECKING:
    from engine.model import Model
    from scheduler.record import Job
    from worker_decode.hot import Held
    from worker_decode.starts import Starts

TOKENS, NEW, ROUNDS, COLD_ROUNDS = 2000, 20, 7, 2
_TURN, _NEXT = "resp_" + "0" * 32, "resp_" + "1" * 32


def register(subparsers: Any) -> None:
    """Add the benchmark to the parsers of `tandem bench`; loads no MLX."""
    text = "the first token of a resumed conversation against its lower bounds"
    parser: argparse.ArgumentParser = subparsers.add_parser("resume", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model directory or name")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens stored")
    parser.add_argument("--new", type=int, default=NEW, help="tokens of the new turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.set_defaults(run=run, quick=["--tokens", "600", "--rounds", "3"])


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status.

    All sides take turns in one run, on one decode node's parts without queue and network; times
    are medians. `restored_vs_floor`: from finding the stored state to the first token, against a
    verified read of the state into plain memory plus the bare forwards of the new turn.
    `hot_vs_floor`: the same from memory, against the bare forwards alone; these are the forwards
    that the engine runs: all new tokens but the last, then the last. `ttft_resumed_vs_cold`:
    restored against the whole prompt from nothing. `computed_over_new_tokens` counts the tokens
    that passed through the model. All sides must say the same token.
    """
    from engine.device import prepare
    from store.errors import StoreError

    try:
        device = prepare()
        from engine.model import load

        path = resolve(arguments.model, models_dir())
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as work:
            found = measure(
                load(path, device), Path(work), arguments.tokens, max(2, arguments.new),
                max(1, arguments.rounds),
            )  # fmt: skip
    except (ModelError, StoreError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    found = {"bench": "resume", "model": path.name, **found, "device": device.facts()}
    if arguments.json:
        print(json.dumps(found))
        return 0
    for name, value in (*found["ratios"].items(), *found["seconds"].items()):
        print(f"{name:<26} {value:.4f}")
    return 0


def measure(model: Model, work: Path, tokens: int, new: int, rounds: int) -> dict[str, Any]:
    """The figures for `tokens` stored and `new` new tokens, after one round to warm up."""
    from store.store import Store
    from worker_decode.hot import Hot
    from worker_decode.inbox import Inbox
    from worker_decode.memory import Memory
    from worker_decode.starts import Starts
    from worker_decode.states import nbytes_of

    held = _first_turn(model, tokens)
    ids = [*held.ids, *held.pending, *_ids(model, new - len(held.pending), 7)]
    size = 4 * nbytes_of(held.caches) + (256 << 20)
    store = Store.open(work / "store", size)
    memory = Memory(size)
    hot = Hot(memory)
    starts = Starts(model, store, hot, Inbox(model.fingerprint, memory, 0.0), len(ids))
    times: dict[str, list[float]] = {
        name: [] for name in ("cold", "restored", "hot", "read", "compute")
    }
    computed = 0.0
    try:
        nbytes = _store(store, model, held)
        for number in range(rounds + 1):
            said: set[int] = set()
            if number <= COLD_ROUNDS:
                times["cold"].append(_first_token(model, starts, _job(ids, None), "cold", said)[0])
            seconds, passed = _first_token(
                model, starts, _job(ids, _TURN), "restored", said, len(held.ids)
            )
            times["restored"].append(seconds)
            computed = max(computed, passed / new)
            hot.put(_loaded(store, model, ids))
            seconds, _ = _first_token(model, starts, _job(ids, _TURN), "hot", said, len(held.ids))
            times["hot"].append(seconds)
            times["read"].append(_read(store, model))
            times["compute"].append(_bare(model, _loaded(store, model, ids), ids, said))
            if len(said) != 1:
                raise ModelError(f"the sides said different tokens {sorted(said)}: it is invalid")
    finally:
        store.close()
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "tokens": len(held.ids),
        "new": new,
        "bytes": nbytes,
        "rounds": rounds,
        # Every single round is refused where it took another path.
        "path": taken("resume", {"new": new}, {"new": round(computed * new)}),
        "ratios": {
            "restored_vs_floor": middle["restored"] / (middle["read"] + middle["compute"]),
            "hot_vs_floor": middle["hot"] / middle["compute"],
            "ttft_resumed_vs_cold": middle["restored"] / middle["cold"],
            "computed_over_new_tokens": computed,
        },
        "seconds": middle,
    }


def _ids(model: Model, count: int, seed: int) -> list[int]:
    from engine.probe import token_ids

    return token_ids(model, count, seed)


def _first_turn(model: Model, tokens: int) -> Held:
    """The state after a first turn, which holds `tokens` tokens."""
    from engine.sampling import SamplingParams
    from engine.solo import answer
    from worker_decode.hot import Held

    said = answer(model, _ids(model, tokens, 3), (), SamplingParams(max_tokens=1))
    return Held(_TURN, said.caches, said.ids, said.pending, said.schedule, 0, 0)


def _store(store: Any, model: Model, held: Held) -> int:
    from store.turns import Turn
    from worker_decode.states import export

    store.put_turn(
        Turn(
            _TURN, "conv_" + "0" * 32, model=model.path.name, fingerprint=model.fingerprint,
            prompt_ids=held.ids, output_ids=held.pending, schedule=held.schedule,
        )
    )  # fmt: skip
    store.save_state(_TURN, *export(model, held))
    return int(store.find_state(_TURN).nbytes)


def _job(ids: Sequence[int], previous: str | None) -> Job:
    from scheduler.record import pack_ids, parse

    raw = {b"status": b"decoding", b"stage": b"decode", b"created_at": b"1.0"}
    if previous:
        raw[b"previous"] = previous.encode()
    return parse(_NEXT, raw, pack_ids(ids))


def _first_token(
    model: Model, starts: Starts, job: Job, path: str, said: set[int], held: int = 0
) -> tuple[float, int]:
    """Seconds until the first token, and the tokens that passed through the model for it."""
    from engine.decode import Batch
    from engine.prefill import expand_schedule
    from engine.rows import Row
    from engine.sampling import SamplingParams

    batch = Batch(model, 1)
    began = time.perf_counter()
    start = starts.find(job)
    batch.add(
        Row(
            caches=start.caches,
            ids=start.ids,
            pending=job.prompt_ids[len(start.ids) :],
            params=SamplingParams(max_tokens=1),
            schedule=start.schedule,
            lengths=start.lengths,
        )
    )
    while not (events := [event for event in batch.step() if event.token is not None]):
        pass
    seconds = time.perf_counter() - began
    if start.path != path or len(start.ids) != held:
        raise ModelError(f"the path taken was {start.path} {start.notes}, not {path}: invalid")
    said.update(event.token for event in events if event.token is not None)
    return seconds, sum(expand_schedule(events[0].schedule)) - held


def _loaded(store: Any, model: Model, ids: Sequence[int]) -> Held:
    """The stored state in memory, as it is there between two turns."""
    from worker_decode.hot import Held
    from worker_decode.states import load

    state = load(model, store.load_state(_TURN, model.fingerprint), ids)
    assert state is not None
    return Held(_TURN, state.caches, state.ids, [], state.schedule, state.rope_delta, 0)


def _read(store: Any, model: Model) -> float:
    began = time.perf_counter()
    with store.load_state(_TURN, model.fingerprint) as reader:
        for _ in reader:
            pass
        if not reader.report.complete:
            raise ModelError("the stored state is damaged: the benchmark is invalid")
    return time.perf_counter() - began


def _bare(model: Model, held: Held, ids: list[int], said: set[int]) -> float:
    """Seconds of the forwards of the new turn and the choice of the first token."""
    import mlx.core as mx

    from engine.model import evaluate
    from engine.prefill import plan

    began = time.perf_counter()
    at = len(held.ids)
    for length in plan(at, len(ids) - 1, model.chunk):
        tokens = mx.array([ids[at : at + length]], dtype=mx.int32)
        model.forward(tokens, held.caches, [held.rope_delta], logits=False)
        evaluate(held.caches)
        at += length
    logits = model.forward(mx.array([ids[-1:]], dtype=mx.int32), held.caches, [held.rope_delta])
    chosen: Any = mx.argmax(logits[0, -1, :])
    said.add(int(chosen.item()))
    return time.perf_counter() - began
