"""`tandem bench decode` and `tandem bench prefill`: our loops against the bare model steps."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir
from store.taken import taken

if TYPE_CHECKING:
    from engine.model import Model

BLOCK = 5  # steps of one side before the other has its turn
CONTEXT = 48  # tokens of each row before the first step


def register(subparsers: Any) -> None:
    """Add the two benchmarks to the parsers of `tandem bench`; loads no MLX."""
    for name, run, seconds, text in (
        ("decode", decode, 12, "the decode loop against bare model steps, at batch 1 and 8"),
        ("prefill", prefill, 30, "chunked prefill against the bare chunk loop"),
    ):
        parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--model", default=DEFAULT_MODEL, help="model directory or name")
        parser.add_argument(
            "--seconds",
            type=float,
            default=seconds,
            help=f"time for each measurement (default {seconds})",
        )
        parser.set_defaults(run=run, quick=["--seconds", "5"])


def decode(arguments: argparse.Namespace) -> int:
    """Measure `ratios.batch1_vs_bare` and `ratios.batch8_vs_bare`; returns the exit status.

    Both sides decode the same rows in the same run, taking turns every 5 steps; a ratio is the
    median over these pairs of our tokens per second to the bare loop's.
    """
    return _run(arguments, _measure_decode)


def prefill(arguments: argparse.Namespace) -> int:
    """Measure `ratios.chunked_vs_bare` the same way, taking turns at every chunk."""
    return _run(arguments, _measure_prefill)


def _run(arguments: argparse.Namespace, measure: Callable[[Model, float], dict[str, Any]]) -> int:
    from engine.device import prepare

    try:
        device = prepare()
        from engine.model import load

        path = resolve(arguments.model, models_dir())
        found = measure(load(path, device), arguments.seconds)
    except ModelError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    found = {"model": path.name, **found, "device": device.facts()}
    if arguments.json:
        print(json.dumps(found))
        return 0
    for name, value in found["ratios"].items():
        print(f"{name:<16} {value:.3f}")
    for name, value in found["tokens_per_second"].items():
        print(f"{name:<16} {value:.1f} tokens/s")
    return 0


def _measure_decode(model: Model, seconds: float) -> dict[str, Any]:
    ratios: dict[str, float] = {}
    rates: dict[str, float] = {}
    pairs: dict[str, int] = {}
    widths: dict[str, Any] = {}
    for width in (1, 8):
        ours, bare, steps = _decode_pairs(model, width, seconds)
        name = f"batch{width}"
        ratios[f"{name}_vs_bare"] = _median_ratio(ours, bare)
        rates[f"{name}_ours"] = BLOCK * width / statistics.median(ours)
        rates[f"{name}_bare"] = BLOCK * width / statistics.median(bare)
        pairs[name] = len(ours)
        widths[name] = steps
    expected = {"batch1": "width 1", "batch8": "width 8"}
    found = {name: "width " + ", ".join(map(str, sorted(steps))) for name, steps in widths.items()}
    return {
        "ratios": ratios, "tokens_per_second": rates, "pairs": pairs, "widths": widths,
        "path": taken("decode", expected, found),
    }  # fmt: skip


def _decode_pairs(
    model: Model, width: int, seconds: float
) -> tuple[list[float], list[float], dict[int, int]]:
    """Seconds of each block of steps: ours, bare; and the widths that our loop ran at."""
    import mlx.core as mx

    from engine.decode import Batch
    from engine.merged import merge
    from engine.prefill import Prefill
    from engine.probe import token_ids
    from engine.rows import Row
    from engine.sampling import SamplingParams
    from engine.text import TextStream, load_tokenizer

    tokenizer = load_tokenizer(model.path)
    ids = token_ids(model, CONTEXT + 1, 1)
    held = ids[:-1]
    if model.batching.ok:  # one prefill and copies of it, so that the time goes to decoding
        copies = merge([Prefill(model, ids).run()] * (2 * width), [CONTEXT] * (2 * width))
        rows = [[entry.extract(i) for entry in copies] for i in range(2 * width)]
    else:
        rows = [Prefill(model, ids).run() for _ in range(2 * width)]
    params = SamplingParams(max_tokens=1 << 20)
    batch = Batch(model, width)
    for i in range(width):
        batch.add(Row(rows[i], held, [100 + i], params, text=TextStream(tokenizer)))
    merged = merge(rows[width:], [CONTEXT] * width) if width > 1 else rows[width]
    tokens = mx.array([100 + i for i in range(width)], dtype=mx.int32)
    deltas = [0] * width

    def ours() -> None:
        for _ in range(BLOCK):
            batch.step()

    def bare() -> None:
        nonlocal tokens
        for _ in range(BLOCK):
            logits = model.forward(tokens[:, None], merged, deltas)
            tokens = mx.argmax(logits[:, -1], axis=-1)
            mx.eval(tokens)

    pairs = _alternate(ours, bare, seconds, 1 << 20)
    return *pairs, dict(batch.facts["widths"])


def _measure_prefill(model: Model, seconds: float) -> dict[str, Any]:
    import mlx.core as mx

    from engine.prefill import Prefill
    from engine.probe import token_ids

    chunk = min(model.device.chunk, 2048)
    ours_times: list[float] = []
    bare_times: list[float] = []
    lengths: set[int] = set()
    deadline = time.perf_counter() + seconds
    while not ours_times or time.perf_counter() < deadline:
        ids = token_ids(model, min(8 * chunk + 1, model.context_length), 1)
        run = Prefill(model, ids, chunk=chunk)
        caches = model.fresh_cache()
        starts = iter(range(0, len(ids) - 1, chunk))

        def ours(run: Prefill = run) -> None:
            start, stop = run.step()
            lengths.add(stop - start)

        def bare(ids: list[int] = ids, caches: Any = caches, starts: Any = starts) -> None:
            start = next(starts)
            tokens = mx.array([ids[start : min(start + chunk, len(ids) - 1)]], dtype=mx.int32)
            model.lm(tokens, cache=caches)
            mx.eval([cache.state for cache in caches])

        limit = (len(ids) - 1) // chunk
        left = deadline - time.perf_counter()
        a, b = _alternate(ours, bare, left if ours_times else max(left, 1.0), limit, warm=False)
        if not ours_times and len(a) > 2:  # the first pair of all warms up
            a, b = a[1:], b[1:]
        ours_times += a
        bare_times += b
    return {
        "ratios": {"chunked_vs_bare": _median_ratio(ours_times, bare_times)},
        "tokens_per_second": {
            "ours": chunk / statistics.median(ours_times),
            "bare": chunk / statistics.median(bare_times),
        },
        "pairs": len(ours_times),
        "chunk": chunk,
        # The end of a prompt may be shorter.
        "path": taken("prefill", {"chunk": chunk}, {"chunk": max(lengths)}),
    }


def _alternate(
    ours: Callable[[], None],
    bare: Callable[[], None],
    seconds: float,
    limit: int,
    warm: bool = True,
) -> tuple[list[float], list[float]]:
    """Time both in turn, each first in every other pair, until `seconds` or `limit` pairs."""
    if warm:
        ours()
        bare()
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + seconds
    while len(times[0]) < limit and (not times[0] or time.perf_counter() < deadline):
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        for side in order:
            begin = time.perf_counter()
            (ours, bare)[side]()
            times[side].append(time.perf_counter() - begin)
    return times


def _median_ratio(ours: list[float], bare: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(ours, bare, strict=True))
