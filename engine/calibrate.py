"""`tandem calibrate`: measure prefill by chunk size and decode by batch width and context."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, models_dir, resolve

if TYPE_CHECKING:
    from engine.model import Model
    from engine.profile import Profile

# (chunk sizes, tokens to prefill, batch widths, contexts)
PLANS: dict[str, tuple[list[int], int, list[int], list[int]]] = {
    "metal": ([512, 1024, 2048, 4096, 8192], 8192, [1, 2, 4, 8, 16], [256, 4096, 16384]),
    "cpu": ([64, 128, 256, 512], 512, [1, 2, 4, 8], [64, 512]),
}
LONGER = 4  # times as long a prompt is measured once
_SPAN = 4096  # tokens over which the size of a state is told
STEPS = 8  # decode steps per measurement
ROUNDS = 3  # every measurement is made so often, in turn, and the least disturbed one counts


def register(subparsers: Any) -> None:
    """Add `tandem calibrate`; loads no MLX."""
    text = "measure this machine's rates and choose chunk size and decode path by them"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate", help=text, description=text
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model directory or name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, record beside the model, print; returns the exit status."""
    from engine.device import prepare

    try:
        device = prepare()
        from engine.model import load
        from engine.profile import record

        model = load(resolve(arguments.model, models_dir()), device)
        show = (lambda line: None) if arguments.json else print
        profile = measure(model, *PLANS[device.kind], say=show)
        path = record(model.path, profile)
    except ModelError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({**profile.facts(), "path": str(path)}))
    else:
        print(f"chunk {profile.chunk}, rows merged from {profile.merge_from}; written to {path}")
    return 0


def measure(
    model: Model,
    chunks: list[int],
    tokens: int,
    widths: list[int],
    contexts: list[int],
    say: Callable[[str], object] = lambda line: None,
) -> Profile:
    """The profile of `model`; `say` gets a line for every measurement."""
    import mlx.core as mx

    from engine.compiled import compare
    from engine.merged import merge
    from engine.prefill import Prefill
    from engine.probe import token_ids
    from engine.profile import Profile

    prefills: list[dict[str, float]] = []
    tokens = min(tokens, model.context_length - 1)
    Prefill(model, token_ids(model, 65, 1)).run()  # the first forward compiles
    chunks = [chunk for chunk in chunks if chunk <= tokens]
    best = dict.fromkeys(chunks, 0.0)
    for _ in range(ROUNDS):
        for chunk in chunks:
            begin = time.perf_counter()
            Prefill(model, token_ids(model, tokens + 1, 1), chunk=chunk).run()
            best[chunk] = max(best[chunk], tokens / (time.perf_counter() - begin))
    for chunk, rate in best.items():
        prefills.append({"chunk": chunk, "context": tokens, "rate": rate})
        say(f"prefill, chunk {chunk:>5}: {rate:9.1f} tokens/s")
    # A longer prompt, once and with the best chunk: how attention's part grows with the length.
    longer = min(LONGER * tokens, model.context_length - 1)
    if best and longer > tokens:
        chunk = max(best, key=lambda size: best[size])
        begin = time.perf_counter()
        Prefill(model, token_ids(model, longer + 1, 1), chunk=chunk).run()
        rate = longer / (time.perf_counter() - begin)
        prefills.append({"chunk": chunk, "context": longer, "rate": rate})
        say(f"prefill of {longer} tokens: {rate:9.1f} tokens/s")
    decodes: list[dict[str, float]] = []
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
            rate = 0.0
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                for _ in range(STEPS):
                    mx.eval(mx.argmax(model.forward(fed, caches, [0] * width)[:, -1], axis=-1))
                rate = max(rate, width * STEPS / (time.perf_counter() - begin))
            decodes.append({"width": width, "context": context, "rate": rate})
            say(f"decode, {width:>2} rows at {context:>5} tokens: {rate:9.1f} tokens/s")
    compiled = compare(model)
    say(f"a compiled decode step is not used: {compiled['reason']}")
    device = model.device
    fixed = model.layout.state_bytes(0)
    per_token = (model.layout.state_bytes(_SPAN) - fixed) / _SPAN
    state = {"fixed": float(fixed), "per_token": per_token}
    return Profile(device.name, device.mlx, device.dtype, prefills, decodes, compiled, state)
