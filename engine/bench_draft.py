"""`tandem bench draft`: decoding with proposed tokens against one token a step, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir
from store.taken import taken

if TYPE_CHECKING:
    from engine.model import Model

TOKENS, ROUNDS = 48, 3
_PHRASE, _TIMES = 24, 6


def register(subparsers: Any) -> None:
    """Add the benchmark to the parsers of `tandem bench`; loads no MLX."""
    text = "decoding a text that repeats itself, with a drafter and without"
    parser: argparse.ArgumentParser = subparsers.add_parser("draft", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model directory or name")
    parser.add_argument("--drafter", default="ngram", help="as decode.drafter (ngram)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer ({TOKENS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"({ROUNDS})")
    parser.set_defaults(run=run, quick=["--rounds", "1", "--tokens", "24"])


def run(arguments: argparse.Namespace) -> int:
    """Measure `ratios.drafted_vs_plain`, tokens per second; returns the exit status.

    A drafter that is off, or proposes nothing, was not measured: that is an error. One that is
    given up because plain steps are faster was tried, and its ratio says so.
    """
    from engine.device import prepare

    try:
        device = prepare()
        from engine.model import load

        path = resolve(arguments.model, models_dir())
        found = measure(
            load(path, device), arguments.drafter, max(8, arguments.tokens), arguments.rounds
        )
    except ModelError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    found = {"model": path.name, **found, "device": device.facts()}
    if arguments.json:
        print(json.dumps(found))
        return 0
    for name, value in (*found["ratios"].items(), *found["tokens_per_second"].items()):
        print(f"{name:<20} {value:.3f}")
    print(f"{'accepted':<20} {found['accepted']} of {found['drafted']}")
    return 0


def measure(model: Model, drafter: str, tokens: int, rounds: int) -> dict[str, Any]:
    """The figures for answers of `tokens` tokens. Raises WrongPath without a drafter at work."""
    from engine.drafters import find_drafter
    from engine.probe import token_ids

    found, why = find_drafter(model, drafter)
    ids = token_ids(model, _PHRASE, 5) * _TIMES
    plain: list[float] = []
    drafted: list[float] = []
    proposed = accepted = 0
    said: list[list[int]] = []
    for number in range(max(1, rounds) + 1):
        seconds, tokens_said, _ = _answer(model, None, ids, tokens)
        with_drafter, again, facts = _answer(model, found, ids, tokens)
        said += [tokens_said, again]
        proposed += int(facts.get("drafted") or 0)
        accepted += int(facts.get("accepted") or 0)
        if number:  # the first of each warms up
            plain.append(seconds)
            drafted.append(with_drafter)
    path = taken(
        "draft",
        {"drafter": "at work", "answer": "the same"},
        {
            "drafter": "at work" if proposed else f"none ({why if found is None else 'no guess'})",
            "answer": "the same" if all(each == said[0] for each in said) else "another",
        },
    )
    return {
        "bench": "draft",
        "drafter": "none" if found is None else found.name,
        "drafted": proposed,
        "accepted": accepted,
        "path": path,
        "ratios": {
            "drafted_vs_plain": statistics.median(
                a / b for a, b in zip(plain, drafted, strict=True)
            ),
            "accepted_of_drafted": accepted / proposed,
        },
        "tokens_per_second": {
            "drafted": tokens / statistics.median(drafted),
            "plain": tokens / statistics.median(plain),
        },
    }


def _answer(
    model: Model, drafter: Any, ids: list[int], tokens: int
) -> tuple[float, list[int], dict[str, Any]]:
    """Seconds of decoding `tokens` tokens after `ids`, the tokens, and what the drafter did."""
    from engine.decode import Batch
    from engine.prefill import Prefill
    from engine.rows import Row
    from engine.sampling import SamplingParams

    caches = Prefill(model, ids).run()
    batch = Batch(model, 1, drafter=None if drafter is None else drafter.fresh())
    batch.add(Row(caches, ids[:-1], ids[-1:], SamplingParams(max_tokens=tokens)))
    said: list[int] = []
    began = time.perf_counter()
    while len(batch):
        said += [event.token for event in batch.step() if event.token is not None]
    return time.perf_counter() - began, said, batch.facts.get("speculation", {})
