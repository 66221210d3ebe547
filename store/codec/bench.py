"""`tandem bench codec`: packing and unpacking a state against one memcpy of the same bytes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from store.taken import taken

TOKENS = 17_500
POOL = 16
ROUNDS = 12
_CACHE_BYTES = 2 << 30


def register(subparsers: Any) -> None:
    """Add the benchmark to the parsers of `tandem bench`; loads no MLX."""
    text = "pack and unpack a GLM-5.3-Flash state of 348 MB against one memcpy"
    parser: argparse.ArgumentParser = subparsers.add_parser("codec", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"length of the state (default {TOKENS})"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"measured rounds (default {ROUNDS})"
    )
    parser.set_defaults(run=run, quick=["--rounds", "3"])


def run(arguments: argparse.Namespace) -> int:
    """Measure `ratios.pack_vs_memcpy` and `ratios.unpack_vs_memcpy`; returns the exit status.

    The sides take turns. A ratio is memcpy's best time to our best time for the same bytes,
    so 1 is memcpy's rate; the best of all rounds is the time that other load disturbed least,
    and the medians are told beside it. Packing covers every copy, every checksum and every
    header as bytes; unpacking covers reading the headers, checksums, copies and the restoring
    into the cache list, into memory that the importer took before the bytes came, as it does
    when a transfer is admitted. `allocate_and_unpack_vs_memcpy` has that allocation in it.
    Buffers of earlier rounds are used again, as in a server that runs for long; the memcpy
    goes into memory already touched. The state unpacked is compared with the one packed, and
    a difference is an error.
    """
    from store.codec.header import CodecError

    try:
        found = measure(arguments.tokens, max(1, arguments.rounds))
    except CodecError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found))
        return 0
    copies = found["path"]["taken"]["copies"]
    print(f"{found['bytes'] / 1e6:.1f} MB in {found['pieces']} pieces ({copies})")
    for name, value in found["ratios"].items():
        print(f"{name:<30} {value:.3f}")
    for name, value in found["gb_per_second"].items():
        print(f"{name:<30} {value:.2f} GB/s")
    return 0


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """The figures for a state of `tokens` tokens over `rounds` rounds after one to warm up."""
    import mlx.core as mx
    import numpy as np

    from store.codec import memory, reference
    from store.codec.header import CodecError, Piece, parse
    from store.codec.layout import Layout
    from store.codec.pack import Exporter, build
    from store.codec.unpack import Importer

    before = mx.set_cache_limit(_CACHE_BYTES)
    try:
        fingerprint = b"\0" * 16
        caches = reference.fresh(POOL)
        reference.fill(caches, tokens)
        layout = Layout.of(caches, reference.MODEL_TYPE, fingerprint)
        ids = list(range(tokens))

        def pack() -> list[tuple[bytes, memoryview]]:
            exporter = Exporter(layout, ids)
            pieces = [*exporter.rows(caches, tokens, last=True), exporter.snapshot(caches)]
            return [(piece.header.pack(), piece.payload) for piece in pieces]

        packed = pack()
        heads, payloads = zip(*packed, strict=True)
        total = sum(map(len, payloads))
        blank = [reference.fresh(POOL) for _ in range(2 * rounds + 4)]

        def prepared() -> Importer:
            return Importer(layout, blank.pop(), fingerprint, tokens)

        def unpack(importer: Importer) -> Any:
            importer.add_all([Piece(parse(head), payload) for head, payload in packed[:-1]])
            return importer.finish(Piece(parse(heads[-1]), payloads[-1]))

        exporter = Exporter(layout, ids)
        restored = unpack(prepared())
        again = [*exporter.rows(restored, tokens, last=True), exporter.snapshot(restored)]
        if [piece.header.pack() for piece in again] != list(heads):
            raise CodecError("the state unpacked is not the state packed: this is a defect")
        del again, restored

        source = np.random.default_rng(0).integers(0, 256, total, np.uint8)
        target = np.ones(total, np.uint8)
        sides: dict[str, Callable[[], Callable[[], Any]]] = {
            "memcpy": lambda: lambda: np.copyto(target, source),
            "pack": lambda: pack,
            "unpack": lambda: partial(unpack, prepared()),
            "allocate_and_unpack": lambda: lambda: unpack(prepared()),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds + 1):
            for name, side in sides.items():
                seconds = _timed(side())
                if index:
                    times[name].append(seconds)
    finally:
        mx.set_cache_limit(before)
    best = {name: min(taken) for name, taken in times.items()}
    ratios = {f"{name}_vs_memcpy": best["memcpy"] / best[name] for name in best if name != "memcpy"}
    return {
        "bench": "codec",
        "tokens": tokens,
        "bytes": total,
        "header_bytes": sum(map(len, heads)),
        "pieces": len(packed),
        "block_tokens": layout.block_tokens,
        "path": taken(
            "codec",
            {"copies": "device" if mx.metal.is_available() else "host"},
            {"copies": "device" if memory.packs_on_device() else "host"},
        ),
        "build": build(),
        "rounds": rounds,
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "seconds": {name: round(taken, 5) for name, taken in best.items()},
        "median_seconds": {
            name: round(statistics.median(taken), 5) for name, taken in times.items()
        },
        "gb_per_second": {name: round(total / taken / 1e9, 3) for name, taken in best.items()},
    }


def _timed(side: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = side()
    seconds = time.perf_counter() - start
    # Let go before the next side runs, outside the time measured.
    del result
    return seconds
