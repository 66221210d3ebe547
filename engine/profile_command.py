"""`tandem profile`: what a prefill chunk and a decode step are made of on this machine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.calibrate import UNQUIET
from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir

if TYPE_CHECKING:
    from engine.model import Model
    from engine.profile import Profile

ROUNDS = 3
Factors = Mapping[int, float] | None
_TEXT = """\
Say where a prefill chunk and a decode step spend their time: the modules of the model are timed one
by one, with evaluation between, and set beside the undivided step. Matrix units can speed up only
what multiplies matrices; the share of that is told.

  tandem profile --components
  tandem profile --components --model ~/models/NAME --context 16384 --json
  tandem profile --components --shapes config.json

With --shapes no weights are needed: one layer of each kind is made of random numbers in the shapes
of a config.json, and the others are counted. Without --components the rates are shown that tandem
calibrate has measured, as a table.
"""


def register(subparsers: Any) -> None:
    """Add `tandem profile`; loads no MLX."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profile",
        help="say where a model's time goes",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--components", action="store_true", help="time the parts of a forward")
    parser.add_argument("--model", help="model directory or name (the configured one)")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="a config.json, no weights")
    parser.add_argument(
        "--chunk", type=int, default=0, help="tokens of a prefill chunk (as served)"
    )
    parser.add_argument("--context", type=int, default=0, help="tokens before it (one chunk)")
    parser.add_argument("--width", type=int, default=1, help="rows of a decode step (1)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"medians of so many ({ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, measures_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    from engine.device import prepare

    try:
        device = prepare()
        if not arguments.components:
            return _recorded(
                resolve(arguments.model or DEFAULT_MODEL, models_dir()), device, arguments.json
            )
        shaped: dict[str, Any] = {}
        factors: dict[int, float] = {}
        if arguments.shapes is not None:
            from engine import shapes

            made = shapes.build(arguments.shapes, device)
            model, name, factors = made.model, str(arguments.shapes), made.factors
            shaped = {"layers": made.layers, "kept": made.kept, "kinds": made.counts}
        else:
            from engine.model import load

            path = resolve(arguments.model or DEFAULT_MODEL, models_dir())
            model, name = load(path, device), path.name
        found = measure(
            model, arguments.chunk, arguments.context, arguments.width,
            max(1, arguments.rounds), factors, lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    except ModelError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 1
    found = {"model": name, **({"shapes": shaped} if shaped else {}), **found}
    found["device"] = device.facts()
    print(json.dumps(found) if arguments.json else table(found))
    return 0


def measure(
    model: Model,
    chunk: int,
    context: int,
    width: int,
    rounds: int,
    factors: Factors = None,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """The parts of one prefill chunk after `context` tokens and of one decode step after those.

    `seconds` are medians over `rounds` rounds. `undivided`: the same forward without evaluation
    between its parts; `loop`: what our own loop adds to that; `left`: the divided sum's excess.
    With `factors` (see `components.Probe`) the parts are those of the whole model, and the times of
    whole steps those of the layers that are here. `say` gets a line before every round.
    Raises ModelError where the model's context is too short.
    """
    from engine.probe import token_ids

    chunk = chunk or min(model.chunk, model.context_length // 4)
    context = context or chunk
    if chunk < 1 or width < 1 or context + chunk + 8 > model.context_length:
        raise ModelError(
            f"{context} + {chunk} tokens do not fit into the model's context of "
            f"{model.context_length}: give a smaller --context or --chunk"
        )
    ids = token_ids(model, context + chunk + 2, 1)
    return {
        "chunk": chunk,
        "context": context,
        "width": width,
        "prefill": _prefill(
            model, ids, context, chunk, rounds, factors, _counted(say, "prefill", rounds)
        ),
        "decode": _decode(
            model, ids[: context + 1], width, rounds, factors, _counted(say, "decode", rounds)
        ),
    }


def _counted(say: Callable[[str], object], what: str, rounds: int) -> Callable[[int], object]:
    """Tells that a round begins; the first, number 0, only warms up."""
    return lambda number: say(
        f"{what}: round {number} of {rounds}" if number else f"{what}: warming up"
    )


def _prefill(
    model: Model,
    ids: list[int],
    context: int,
    chunk: int,
    rounds: int,
    factors: Factors,
    begins: Callable[[int], object],
) -> dict[str, Any]:
    import mlx.core as mx

    from engine.model import evaluate
    from engine.prefill import Prefill

    def held() -> Any:
        return Prefill(model, ids[: context + 1]).run()

    tokens = mx.array([ids[context : context + chunk]], dtype=mx.int32)

    def forward(caches: Any) -> Callable[[], Any]:
        def run() -> Any:
            model.forward(tokens, caches, [0], logits=False)
            evaluate(caches)

        return run

    def ours(caches: Any) -> Callable[[], Any]:
        prefill = Prefill(model, ids[: context + chunk + 1], context, caches, chunk)
        return lambda: prefill.step()

    return _divide(model, held, forward, ours, rounds, factors, begins, sampling=None)


def _decode(
    model: Model,
    ids: list[int],
    width: int,
    rounds: int,
    factors: Factors,
    begins: Callable[[int], object],
) -> dict[str, Any]:
    import mlx.core as mx

    from engine.decode import Batch
    from engine.merged import merge
    from engine.model import evaluate
    from engine.prefill import Prefill
    from engine.rows import Row
    from engine.sampling import SamplingParams

    tokens = mx.array([[ids[-1]]] * width, dtype=mx.int32)

    def rows() -> list[Any]:
        return [Prefill(model, ids).run() for _ in range(width)]

    def held() -> Any:
        made = rows()
        return merge(made, [len(ids) - 1] * width) if width > 1 else made[0]

    def forward(caches: Any) -> Callable[[], Any]:
        def run() -> Any:
            logits = model.forward(tokens, caches, [0] * width)[:, -1]
            mx.eval(logits)
            evaluate(caches)
            return logits

        return run

    def ours(_: Any) -> Callable[[], Any]:
        batch = Batch(model, width)
        for caches in rows():
            batch.add(Row(caches, ids[:-1], ids[-1:], SamplingParams(max_tokens=1000)))
        batch.step()  # joins the rows
        return lambda: batch.step()

    def sampling() -> float:
        logits = mx.random.normal((width, model.vocab_size))
        mx.eval(logits)
        began = time.perf_counter()
        chosen: Any = mx.argmax(logits, axis=-1)
        chosen.tolist()
        return time.perf_counter() - began

    return _divide(model, held, forward, ours, rounds, factors, begins, sampling)


def _divide(
    model: Model,
    held: Callable[[], Any],
    forward: Callable[[Any], Callable[[], Any]],
    ours: Callable[[Any], Callable[[], Any]],
    rounds: int,
    factors: Factors,
    begins: Callable[[int], object],
    sampling: Callable[[], float] | None,
) -> dict[str, Any]:
    from engine.components import Probe

    undivided: list[float] = []
    loops: list[float] = []
    divided: list[float] = []
    usable: list[float] = []
    parts: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for number in range(rounds + 1):
        begins(number)
        seconds = _timed(forward(held()))
        looped = _timed(ours(held()))
        probe = Probe(model.lm, factors)
        step = forward(held())
        with probe.watching():
            whole = probe.run(step)
        if not number:
            continue  # the first of each warms up
        undivided.append(seconds)
        loops.append(looped)
        divided.append(whole)
        usable.append(probe.usable / sum(probe.seconds.values()))
        calls = dict(probe.calls)
        for name, part in probe.seconds.items():
            parts.setdefault(name, [0.0] * (number - 1)).append(part)
    sums = {name: statistics.median(values) for name, values in parts.items()}
    whole, bare = statistics.median(divided), statistics.median(undivided)
    chosen = statistics.median([sampling() for _ in range(5)]) if sampling else 0.0
    loop = max(0.0, statistics.median(loops) - bare - chosen)
    return {
        "parts": {
            name: {
                "seconds": seconds, "share": seconds / sum(sums.values()),
                "calls": calls.get(name, 1),
            }
            for name, seconds in sorted(sums.items(), key=lambda item: -item[1])
        },
        "sampling_s": chosen,
        "loop_s": loop,
        "ours_s": statistics.median(loops),
        "undivided_s": bare,
        "divided_s": whole,
        "left_s": whole - bare,
        "matrix_share": statistics.median(usable),
    }  # fmt: skip


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table(found: dict[str, Any]) -> str:
    """The division for people."""
    lines = [f"{found['model']} on {found['device'].get('name') or found['device'].get('kind')}"]
    if shaped := found.get("shapes"):
        kinds = ", ".join(f"{count} x {kind}" for kind, count in shaped["kinds"].items())
        lines.append(f"{shaped['kept']} of {shaped['layers']} layers, random: {kinds}")
    for name, title in (
        ("prefill", f"a prefill chunk of {found['chunk']} tokens after {found['context']}"),
        ("decode", f"a decode step of width {found['width']} after {found['context']} tokens"),
    ):
        part = found[name]
        lines += ["", f"{title}: {1000 * part['ours_s']:.2f} ms"]
        for kind, row in part["parts"].items():
            lines.append(
                f"  {kind:<20}{row['share']:>7.1%}{1000 * row['seconds']:>11.3f} ms"
                f"{row['calls']:>6} calls"
            )
        if part["sampling_s"]:
            lines.append(f"  {'sampling':<20}{'':>7}{1000 * part['sampling_s']:>11.3f} ms")
        lines.append(f"  {'our own loop':<20}{'':>7}{1000 * part['loop_s']:>11.3f} ms")
        lines.append(
            f"  divided {1000 * part['divided_s']:.2f} ms, undivided "
            f"{1000 * part['undivided_s']:.2f} ms: {_difference(part)}"
        )
        lines.append(f"  matrix units can speed up {part['matrix_share']:.1%} of it")
    return "\n".join(lines)


def _difference(part: Mapping[str, Any]) -> str:
    """What the divided time is beside the undivided one, which it can exceed but not undercut."""
    if part["left_s"] < -UNQUIET * part["undivided_s"]:
        return "other programs ran meanwhile; run it again when the machine is quiet"
    return "the difference is evaluation between parts"


def _recorded(path: Path, device: Any, as_json: bool) -> int:
    from engine.profile import find

    profile = find(path, device)
    if profile is None:
        raise ModelError(
            f"{path.name} has not been measured here: run tandem calibrate, or give --components"
        )
    print(json.dumps(asdict(profile), default=str) if as_json else rates(path.name, profile))
    return 0


def rates(name: str, profile: Profile) -> str:
    """What `tandem calibrate` measured, for people; contexts, chunks and forwards in tokens."""
    lines = [
        f"{name} on {profile.device} ({profile.dtype}, mlx {profile.mlx}), by tandem calibrate"
    ]
    lines += ["", f"{'prefill: chunk':>16}{'prompt':>9}{'tokens/s':>12}"]
    lines += [
        f"{p['chunk']:>16,.0f}{p['context']:>9,.0f}{p['rate']:>12,.1f}" for p in profile.prefill
    ]
    if profile.forwards:
        lines += ["", f"{'one forward of':>16}{'':>9}{'ms':>12}"]
        lines += [
            f"{p['tokens']:>16,.0f}{'':>9}{1000 * p['seconds']:>12,.2f}" for p in profile.forwards
        ]
    lines += ["", f"{'decode: rows':>16}{'context':>9}{'tokens/s':>12}"]
    lines += [
        f"{p['width']:>16,.0f}{p['context']:>9,.0f}{p['rate']:>12,.1f}"
        for p in sorted(profile.decode, key=lambda p: (p["context"], p["width"]))
    ]
    lines += ["", f"a prompt costs {1000 * profile.prompt_s:.2f} ms besides its chunks"]
    if profile.beside:
        both = ", ".join(f"{role} {times:.2f}" for role, times in profile.beside.items())
        lines.append(f"times as long while the other role works on this machine: {both}")
    if profile.state:
        lines.append(
            f"a state has {profile.state.get('fixed', 0):,.0f} bytes and "
            f"{profile.state.get('per_token', 0):,.0f} for each token"
        )
    merged = profile.merge_from
    lines.append(f"used: chunks of {profile.chunk:,} tokens, rows merged from {merged}")
    if profile.spread > UNQUIET:
        lines.append(
            f"rounds differed by up to {profile.spread:.0%}: other programs ran meanwhile; "
            "calibrate again when the machine is quiet"
        )
    return "\n".join(lines)
