"""`tandem bench ledger`: what writing down where the time goes costs the decode loop.

Two decode nodes of one process take turns, with the same model and rows: one keeps the ledger, the
other's step, outbox and connection are the same without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from scheduler.host.redis_server import RedisUnavailable
from store.paths import models_dir

SECONDS = 10.0


def register(subparsers: Any) -> None:
    """Add the benchmark to the parsers of `tandem bench`; loads no MLX."""
    text = "what the ledger costs the decode loop, in turns with the loop without it"
    parser: argparse.ArgumentParser = subparsers.add_parser("ledger", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model directory or name")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for each width ({SECONDS:g})"
    )
    parser.set_defaults(run=run, quick=["--seconds", "4"])


def run(arguments: argparse.Namespace) -> int:
    """Measure `ratios.width1_vs_off` and `width8_vs_off`; returns the exit status.

    A ratio is the median over pairs of blocks of steps of the throughput with the ledger to that
    without: 0.99 means that it costs one per cent.
    """
    from engine.device import prepare

    try:
        device = prepare()
        from engine.model import load
        from engine.text import load_tokenizer
        from worker_decode.bench_sides import measure

        path = resolve(arguments.model, models_dir())
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as work:
            found = measure(load(path, device), load_tokenizer(path), Path(work), arguments.seconds)
    except (ModelError, RedisUnavailable) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    found = {"bench": "ledger", "model": path.name, **found, "device": device.facts()}
    if arguments.json:
        print(json.dumps(found))
        return 0
    for name, value in found["ratios"].items():
        print(f"{name:<16} {value:.4f}")
    return 0
