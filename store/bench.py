"""`tandem bench store`: saving and restoring a large state against what the machine can do."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.codec.scatter import scatter
from store.errors import StoreError
from store.parts import PART_BYTES
from store.paths import data_dir
from store.store import Store
from store.taken import taken
from store.turns import Turn

if TYPE_CHECKING:
    from store.codec.header import Piece

TOKENS, DELTA, POOL, ROUNDS = 17_500, 500, 16, 5
_CACHE_BYTES = 2 << 30
_FINGERPRINT = b"\0" * 16


def register(subparsers: Any) -> None:
    """Add the benchmark to the parsers of `tandem bench`; loads no MLX."""
    text = "save and restore a GLM-5.3-Flash state of 348 MB and a turn of 500 tokens"
    parser: argparse.ArgumentParser = subparsers.add_parser("store", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--data", help="where to measure: the disk of this data directory")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.set_defaults(run=run, quick=["--rounds", "2"])


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status.

    All sides take turns in one run; a ratio is the median over rounds, larger is better but for
    `delta_bytes_vs_ideal`. `save_vs_raw`: a durable save against pwrite and fsync of the same
    bytes into a new file. `restore_vs_gather`: a warm, verified restore into a fresh cache list
    against one thread that copies every leaf of every piece from plain memory to its place in
    fresh MLX arrays, without verifying. `restore_vs_apc`, `restore_vs_safetensors`: against
    mlx-vlm's own disk store and against loading one safetensors file, neither of which verifies.
    `restore_vs_floor`: against nothing but checking the same bytes in plain memory and copying
    them, value by value, into fresh MLX arrays on as many threads as a restore uses;
    `floor_vs_safetensors` is what `restore_vs_safetensors` would be if a restore cost no more.
    All but the save and the raw write run twice in a row and the second run counts, with nothing
    but the memory that its first run let go in MLX's cache: all sides use memory again alike, as
    in a server that runs for long.
    """
    base = data_dir(arguments.data)
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="bench-store-", dir=base))
    try:
        found = measure(work, arguments.tokens, max(1, arguments.rounds))
    except StoreError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(f"{found['bytes'] / 1e6:.1f} MB, {found['tokens']} tokens, on {base}")
    for name, value in found["ratios"].items():
        print(f"{name:<24} {value:.3f}")
    for name, value in found["seconds"].items():
        print(f"{name:<24} {value * 1000:.1f} ms")
    return 0


def measure(work: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """All figures for a state of `tokens` tokens, `rounds` rounds after one to warm up."""
    import mlx.core as mx

    from store.codec import reference
    from store.codec.layout import Layout
    from store.codec.pack import Exporter

    caches = reference.fresh(POOL)
    reference.fill(caches, tokens)
    layout = Layout.of(caches, reference.MODEL_TYPE, _FINGERPRINT)
    ids = list(range(tokens + 1))
    exporter = Exporter(layout, ids)
    rows, snapshot = exporter.rows(caches, tokens, last=True), exporter.snapshot(caches)
    total = sum(piece.header.nbytes for piece in (*rows, snapshot))
    store = Store.open(work / "store", 8 * total + (256 << 20))
    others = _Others(work, caches, tokens)
    if others.nbytes < 0.98 * total:
        raise StoreError("the safetensors file lacks a part of the state: the benchmark is invalid")
    blank = [reference.fresh(POOL) for _ in range(2 * rounds + 2)]
    before = mx.set_cache_limit(_CACHE_BYTES)
    try:
        sides: dict[str, Callable[[int], Any]] = {
            "save": lambda number: _save(store, number, ids, rows, snapshot),
            "raw": lambda number: _raw(work / f"raw{number}", [*rows, snapshot]),
            "gather": lambda number: _gather(rows, snapshot, tokens),
            "restore": lambda number: _restore(store, number, layout, blank.pop()),
            "apc": lambda number: others.apc(),
            "safetensors": lambda number: others.safetensors(),
            "floor": lambda number: _floor([*rows, snapshot], threads=True),
            "floor_one_thread": lambda number: _floor([*rows, snapshot], threads=False),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            store.drop_state(f"resp_{number - 1}")  # equal blocks would not be written again
            store.environment.heartbeat()
            for name, side in sides.items():
                if name not in ("save", "raw"):
                    mx.clear_cache()
                    side(number)
                began = time.perf_counter()
                kept = side(number)
                seconds = time.perf_counter() - began
                if number:
                    times[name].append(seconds)
                del kept
            (work / f"raw{number}").unlink()
        found = store.load_state(f"resp_{rounds}", _FINGERPRINT)
        store_pieces = 0 if found is None else len(found.objects)
        if found is not None:
            found.close()
        delta = _delta(store, rounds, reference.fresh(POOL), tokens)
    finally:
        mx.set_cache_limit(before)
        store.close()
    pairs = {
        "save_vs_raw": ("raw", "save"),
        "restore_vs_gather": ("gather", "restore"),
        "restore_vs_apc": ("apc", "restore"),
        "restore_vs_safetensors": ("safetensors", "restore"),
        "restore_vs_floor": ("floor", "restore"),
        "floor_vs_safetensors": ("safetensors", "floor"),
    }
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[other], times[ours], strict=True))
        for name, (other, ours) in pairs.items()
    }
    return {
        "bench": "store",
        "tokens": tokens,
        "bytes": total,
        "pieces": len(rows) + 1,
        "rounds": rounds,
        # That a save wrote all of it, and a restore gave all of it, is checked in every round.
        "path": taken(
            "store",
            {"saved": len(rows) + 1, "safetensors": "whole"},
            {
                "saved": store_pieces,
                "safetensors": "whole" if others.nbytes >= 0.98 * total else "a part",
            },
        ),
        "ratios": {**ratios, "delta_bytes_vs_ideal": delta},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
    }


def _save(store: Store, number: int, ids: list[int], rows: list[Piece], snapshot: Piece) -> Any:
    name = f"resp_{number}"
    turn = Turn(name, f"conv_{number}", fingerprint=_FINGERPRINT, prompt_ids=ids)
    store.put_turn(turn)
    report = store.save_state(name, rows, snapshot)
    if report.blocks_new != len(rows):
        raise StoreError("the save wrote less than the whole state: the benchmark is invalid")
    return report


def _raw(path: Path, pieces: list[Piece]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        offset = 0
        for piece in pieces:
            view = piece.payload
            while view:
                count = os.pwrite(fd, view, offset)
                offset += count
                view = view[count:]
        os.fsync(fd)
    finally:
        os.close(fd)


def _restore(store: Store, number: int, layout: Any, blank: list[Any]) -> Any:
    from store.codec.unpack import Importer

    reader = store.load_state(f"resp_{number}", _FINGERPRINT)
    if reader is None:
        raise StoreError("the state just saved is not found: the benchmark is invalid")
    importer = Importer(layout, blank, _FINGERPRINT, reader.ref.tokens)
    restored = reader.feed(
        lambda rows, snapshot: None if snapshot is None else importer.restore(rows, snapshot)
    )
    if restored is None:
        raise StoreError("the state just saved is damaged: the benchmark is invalid")
    return restored


def _gather(rows: list[Piece], snapshot: Piece, tokens: int) -> Any:
    """Copy every leaf of every block to its place in arrays of the final shape, by one thread.

    Into memory that is not cleared first, taken as the restore takes it.
    """
    import numpy as np

    from store.codec import memory
    from store.codec.header import offsets_of

    first = rows[0].header
    blocks = -(-tokens // (first.stop - first.start)) + 1
    sizes = [leaf.nbytes * blocks for leaf in first.leaves]
    *made, last = memory.allocate(*sizes, snapshot.header.nbytes)
    keys = [(leaf.path, leaf.name) for leaf in first.leaves]
    targets = {key: block.view for key, block in zip(keys, made, strict=True)}
    filled = dict.fromkeys(keys, 0)
    for piece in rows:
        payload = np.frombuffer(piece.payload, np.uint8)
        header = piece.header
        for leaf, offset in zip(header.leaves, offsets_of(header.leaves), strict=True):
            key = (leaf.path, leaf.name)
            at = filled[key]
            targets[key][at : at + leaf.nbytes] = payload[offset : offset + leaf.nbytes]
            filled[key] = at + leaf.nbytes
    size = snapshot.header.nbytes
    np.copyto(last.view[:size], np.frombuffer(snapshot.payload, np.uint8))
    return [*made, last]


def _floor(pieces: list[Piece], *, threads: bool) -> Any:
    """Check all bytes and copy them into fresh MLX arrays, in the store's values, not scattered."""
    from store.codec import memory

    values = [
        piece.payload[at : at + PART_BYTES]
        for piece in pieces
        for at in range(0, piece.header.nbytes, PART_BYTES)
    ]
    together = 16  # as large as the large ones of a state, whose number costs as well
    groups = [values[at : at + together] for at in range(0, len(values), together)]
    made = memory.allocate(*[sum(value.nbytes for value in group) for group in groups])
    tasks = []
    for block, group in zip(made, groups, strict=True):
        at = 0
        for value in group:
            into = block.view[at : at + value.nbytes].data
            tasks.append(partial(scatter, [(value, [into], 0)]))
            at += value.nbytes
    if threads:
        memory.run_all(tasks, sum(value.nbytes for value in values))
    else:
        for task in tasks:
            task()
    return made


def _delta(store: Store, number: int, caches: list[Any], tokens: int) -> float:
    """Bytes written for a turn of DELTA tokens to its new rows and snapshot."""
    from store.codec import reference
    from store.codec.layout import Layout
    from store.codec.pack import Exporter

    stop = tokens + DELTA
    reference.fill(caches, stop)
    layout = Layout.of(caches, reference.MODEL_TYPE, _FINGERPRINT)
    parent, ids = f"resp_{number}", list(range(stop + 1))
    own = ids[tokens + 1 :]
    turn = Turn("resp_d", f"conv_{number}", parent, fingerprint=_FINGERPRINT, prompt_ids=own)
    store.put_turn(turn)
    exporter = Exporter(layout, ids, tokens - tokens % layout.block_tokens)
    rows, snapshot = exporter.rows(caches, stop, last=True), exporter.snapshot(caches)
    report = store.save_state("resp_d", rows, snapshot)
    ideal = layout.rows_bytes(tokens, stop) + snapshot.header.nbytes
    return report.bytes_written / ideal


class _Others:
    """The same cache list in mlx-vlm's disk store and in one safetensors file."""

    def __init__(self, work: Path, caches: list[Any], tokens: int) -> None:
        import mlx.core as mx
        from mlx_vlm.apc import DiskBlockStore

        from store.codec.layout import arrays_of

        self._file = str(work / "state.safetensors")
        arrays = {
            f"{index}.{name}": array
            for index, cache in enumerate(caches)
            for name, array in arrays_of(cache.state)
        }
        self.nbytes = sum(array.nbytes for array in arrays.values())
        mx.save_safetensors(self._file, arrays)
        self._apc = DiskBlockStore(work / "apc")
        if not self._apc.save_exact_cache(7, range(tokens), 0, caches, synchronous=True):
            raise StoreError("mlx-vlm's disk store refused the state: the benchmark is invalid")

    def apc(self) -> Any:
        """Load from mlx-vlm's disk store and evaluate."""
        import mlx.core as mx

        found = self._apc.load_exact_cache(7, wait_in_flight_ms=60_000)
        if found is None:
            raise StoreError("mlx-vlm's disk store lost the state: the benchmark is invalid")
        mx.eval([cache.state for cache in found[2]])
        return found

    def safetensors(self) -> Any:
        """Load the safetensors file and evaluate."""
        import mlx.core as mx

        loaded: Any = mx.load(self._file)
        mx.eval(loaded)
        return loaded
