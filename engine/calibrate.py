"""`tandem calibrate`: measure prefill by chunk size and decode by batch width and context."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir

if TYPE_CHECKING:
    from engine.model import Model
    from engine.profile import Profile

# (chunk sizes, tokens to prefill, batch widths, contexts, lengths of short forwards)
PLANS: dict[str, tuple[list[int], int, list[int], list[int], list[int]]] = {
    "metal": (
        [512, 1024, 2048, 4096, 8192],
        8192,
        [1, 2, 4, 8, 16],
        [256, 4096, 16384],
        [16, 64, 256],
    ),
    "cpu": ([64, 128, 256, 512], 512, [1, 2, 4, 8], [64, 512], [9, 16, 32]),
}
LONGER = 4  # times as long a prompt is measured once
_SPAN = 4096  # tokens over which the size of a state is told
STEPS = 8  # decode steps per measurement
ROUNDS = 3  # every measurement is made so often, in turn; medians count, as service goes on so
UNQUIET = 0.1  # rounds that differ by more from their median were disturbed
_TEXT = """\
Measure this machine's rates for a model and write them beside it: prefill by chunk size, forwards
of a few tokens, what a prompt costs besides its forwards, and decode by batch width and context.
Chunks are computed and packed as the prefill worker does it. Medians of %(rounds)d rounds are
kept; rounds that differ say that the machine was not quiet. Chunk size and decode path of the
workers follow, and tandem simulate and tandem bottleneck read the file.

  tandem calibrate
  tandem calibrate --model ~/models/NAME --out prefill.json    # a copy, to be carried elsewhere
  tandem calibrate --beside    # and what both roles cost each other where they run here together
"""


def register(subparsers: Any) -> None:
    """Add `tandem calibrate`; loads no MLX."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate",
        help="measure this machine's rates and choose chunk size and decode path by them",
        description=_TEXT % {"rounds": ROUNDS},
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="model directory or name (the configured one)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile there as well")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="how much prefill and decode slow each other down here, as well",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, measures_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure, record beside the model, print; returns the exit status."""
    from engine.device import prepare

    try:
        device = prepare()
        from engine.model import load
        from engine.profile import record, write

        model = load(resolve(arguments.model or DEFAULT_MODEL, models_dir()), device)
        show = (lambda line: None) if arguments.json else print
        profile = measure(model, *PLANS[device.kind], say=show)
        if arguments.beside:
            from engine.neighbour import beside

            profile = replace(profile, beside=beside(model, profile.chunk, say=show))
        path = record(model.path, profile)
        if arguments.out:
            write(arguments.out, profile)
    except ModelError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({**profile.facts(), "path": str(path)}))
        return 0
    print(f"chunk {profile.chunk}, rows merged from {profile.merge_from}; written to {path}")
    if profile.spread > UNQUIET:
        print(
            f"rounds differed by up to {profile.spread:.0%}: other programs ran meanwhile; "
            "calibrate again when the machine is quiet"
        )
    return 0


def measure(
    model: Model,
    chunks: list[int],
    tokens: int,
    widths: list[int],
    contexts: list[int],
    short: Sequence[int] = (),
    say: Callable[[str], object] = lambda line: None,
) -> Profile:
    """The profile of `model`; `say` gets a line for every measurement."""
    from engine.compiled import compare
    from engine.profile import Profile

    spread = Spread()
    tokens = min(tokens, model.context_length - 1)
    _prompt(model, min(64, tokens), 64)  # the first forward compiles
    prefills, prompt_s = _prefills(model, [c for c in chunks if c <= tokens], tokens, spread, say)
    forwards = _forwards(model, [n for n in short if n <= tokens], spread, say)
    decodes = _decodes(model, widths, contexts, spread, say)
    compiled = compare(model)
    say(f"a compiled decode step is not used: {compiled['reason']}")
    device = model.device
    fixed = model.layout.state_bytes(0)
    state = {
        "fixed": float(fixed),
        "per_token": (model.layout.state_bytes(_SPAN) - fixed) / _SPAN,
    }
    return Profile(
        device.name, device.mlx, device.dtype, prefills, decodes, compiled, state,
        forwards, prompt_s, round(spread.most, 3),
    )  # fmt: skip


class Spread:
    """How much rounds of one measurement differed at most, as a part of their median."""

    def __init__(self) -> None:
        self.most = 0.0

    def median(self, seconds: Sequence[float]) -> float:
        """The median of some rounds, which are taken into account."""
        middle = statistics.median(seconds)
        self.most = max(self.most, *(abs(each / middle - 1) for each in seconds))
        return middle


def _prompt(model: Model, tokens: int, chunk: int) -> tuple[float, float]:
    """Seconds of a prompt's chunks, and of what else it costs, as a prefill worker goes about it.

    Behind each chunk its rows are packed, with checksums; before the first one and after the last
    there are the token ids and the snapshot.
    """
    from engine.prefill import MIN_CHUNK, Prefill
    from engine.probe import token_ids
    from store.codec.pack import Exporter

    ids = token_ids(model, tokens + 1, 1)
    moments = [time.perf_counter()]
    run = Prefill(model, ids, chunk=max(chunk, MIN_CHUNK))
    exporter = Exporter(model.layout, ids)
    moments.append(time.perf_counter())
    while run.remaining:
        run.step()
        exporter.rows(run.caches, run.position, last=not run.remaining)
    moments.append(time.perf_counter())
    exporter.snapshot(run.caches)
    moments.append(time.perf_counter())
    return moments[2] - moments[1], moments[1] - moments[0] + moments[3] - moments[2]


def _prefills(
    model: Model, chunks: list[int], tokens: int, spread: Spread, say: Callable[[str], object]
) -> tuple[list[dict[str, float]], float]:
    """Rates by chunk size, and seconds that a prompt costs besides its chunks."""
    if not chunks:
        return [], 0.0
    found: list[dict[str, float]] = []
    took: dict[int, list[float]] = {chunk: [] for chunk in chunks}
    besides: list[float] = []
    for _ in range(ROUNDS):  # in turn, so that what disturbs one round disturbs all sizes alike
        for chunk in chunks:
            seconds, more = _prompt(model, tokens, chunk)
            took[chunk].append(seconds)
            besides.append(more)
    for chunk, rounds in took.items():
        rate = tokens / spread.median(rounds)
        found.append({"chunk": chunk, "context": tokens, "rate": rate})
        say(f"prefill, chunk {chunk:>5}: {rate:9.1f} tokens/s")
    # A longer prompt, once and with the best chunk: how attention's part grows with the length.
    longer = min(LONGER * tokens, model.context_length - 1)
    if longer > tokens:
        chunk = int(max(found, key=lambda point: point["rate"])["chunk"])
        rate = longer / _prompt(model, longer, chunk)[0]
        found.append({"chunk": chunk, "context": longer, "rate": rate})
        say(f"prefill of {longer} tokens: {rate:9.1f} tokens/s")
    prompt_s = statistics.median(besides)
    say(f"a prompt besides its chunks: {prompt_s * 1000:9.2f} ms")
    return found, prompt_s


def _forwards(
    model: Model, lengths: list[int], spread: Spread, say: Callable[[str], object]
) -> list[dict[str, float]]:
    """Seconds of single short forwards at position 0: these cost more than their part of a chunk,
    since every forward reads all weights."""
    found: list[dict[str, float]] = []
    for length in lengths:
        rounds = [_prompt(model, length, length)[0] for _ in range(ROUNDS)]
        seconds = spread.median(rounds)
        found.append({"tokens": length, "context": 0, "seconds": seconds})
        say(f"a forward of {length:>5} tokens: {seconds * 1000:9.1f} ms")
    return found


def _decodes(
    model: Model,
    widths: list[int],
    contexts: list[int],
    spread: Spread,
    say: Callable[[str], object],
) -> list[dict[str, float]]:
    """Tokens per second of all rows, by width of a merged batch and context."""
    import mlx.core as mx

    from engine.merged import merge
    from engine.prefill import Prefill
    from engine.probe import token_ids

    found: list[dict[str, float]] = []
    for context in contexts:
        if context + ROUNDS * STEPS >= model.context_length:
            continue
        row = Prefill(model, token_ids(model, context + 1, 1)).run()
        for width in sorted(widths, reverse=True):  # the row itself is used up by width 1
            if width > 1 and not model.batching.ok:
                continue
            caches = merge([row] * width, [context] * width) if width > 1 else row
            fed = mx.full((width, 1), 1, dtype=mx.int32)
            mx.eval(model.forward(fed, caches, [0] * width)[:, -1])
            rounds = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                for _ in range(STEPS):
                    mx.eval(mx.argmax(model.forward(fed, caches, [0] * width)[:, -1], axis=-1))
                rounds.append(time.perf_counter() - begin)
            rate = width * STEPS / spread.median(rounds)
            found.append({"width": width, "context": context, "rate": rate})
            say(f"decode, {width:>2} rows at {context:>5} tokens: {rate:9.1f} tokens/s")
    return found
