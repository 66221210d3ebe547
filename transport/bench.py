"""`tandem bench link`: what the verified hand-off costs beside moving the same bytes barely."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from store.taken import taken

if TYPE_CHECKING:
    from store.codec.header import Piece
    from transport.bench_pair import Pair
    from transport.bench_state import State

SIZES_MB = (1, 16, 128, 358)
REPEATS = {1: 20, 16: 12}
CHUNKS = 8
CHUNK_SECONDS = 0.15
SIZE_SECONDS = 6.0
"""After this a size gets no more repeats: the whole must end in under 50 s on a busy machine."""
COPY = 64 << 20


def register(subparsers: Any) -> None:
    """Add the `link` benchmark to an argparse subparsers object."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "link", help="verified hand-off against a bare stream, files and a bare group"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES_MB), help="megabytes (10^6 bytes)"
    )
    parser.add_argument("--no-rdma", action="store_true", help="leave the group out")
    parser.set_defaults(run=run, quick=["--sizes", "16", "128"])


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; raises RuntimeError if a path to be measured was not taken."""
    result = measure(sorted(set(arguments.sizes)), with_rdma=not arguments.no_rdma)
    print(json.dumps(result) if arguments.json else _table(result))
    return 0


def measure(sizes: list[int], *, with_rdma: bool = True) -> dict[str, Any]:
    """Rates in MB/s for every size, the ratios of the largest, and the overlap of chunks.

    A ratio is the median over pairs measured one after the other, so that other work on the
    machine disturbs both alike.
    """
    from transport.bench_pair import Pair
    from transport.bench_state import State

    states = [State.of(size * 1_000_000) for size in sizes]
    with Pair(max(sizes) * 1_000_000, with_rdma=with_rdma) as pair:
        expected, found = {"tcp": "tcp"}, {"tcp": pair.tcp.path}
        if with_rdma:
            expected["rdma"] = "rdma"
            found["rdma"] = pair.rdma.path if pair.rdma is not None else pair.rdma_reason
        path = taken("link", expected, found)
        rows = [_measure_size(pair, size, state) for size, state in zip(sizes, states, strict=True)]
        overlap = _overlap(pair, states[-1])
        rdma: dict[str, Any] = {"measured": pair.rdma is not None, "reason": pair.rdma_reason}
        if pair.rdma is not None:
            rdma["steps"] = _steps(states[-1].nbytes, rows[-1])
    ratios: dict[str, float] = {
        name: rows[-1][name]
        for name in ("tcp_vs_raw", "rdma_vs_bare", "tcp_vs_safetensors")
        if name in rows[-1]
    }
    ratios |= {name: overlap[name] for name in ("tail_vs_share", "prefill_slowdown")}
    return {
        "bench": "link",
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "path": path,
        "ratios": ratios,
        "sizes": rows,
        "overlap": overlap,
        "rdma": rdma,
    }


def _measure_size(pair: Pair, size: int, state: State) -> dict[str, Any]:
    ways: list[tuple[str, Callable[[], float]]] = [
        ("raw", lambda: _timed(lambda: pair.move_raw(state))),
        ("tcp", lambda: _timed(lambda: pair.move(pair.tcp, state))),
    ]
    sender = pair.rdma
    if sender is not None:
        ways.append(("bare", lambda: pair.move_bare(state)))
        ways.append(("rdma", lambda: _timed(lambda: pair.move(sender, state))))
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    limit = time.monotonic() + SIZE_SECONDS
    for repeat in range(REPEATS.get(size, 7) + 1):
        if repeat > 2 and time.monotonic() > limit:
            break
        for name, work in ways:
            seconds = work()
            if repeat:  # the first warms buffers and connections
                times[name].append(seconds)
    if size <= max(REPEATS):
        pair.move_file(state)  # imports and first pages are not what is measured
    times["safetensors"] = [_timed(lambda: pair.move_file(state))]
    if time.monotonic() < limit:
        times["safetensors"].append(_timed(lambda: pair.move_file(state)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    row: dict[str, Any] = {"mb": size}
    for name, value in medians.items():
        row[f"{name}_mb_per_s"] = round(state.nbytes / 1e6 / value, 1)
    row["tcp_vs_raw"] = _ratio(times["raw"], times["tcp"])
    row["tcp_vs_safetensors"] = round(medians["safetensors"] / medians["tcp"], 3)
    if sender is not None:
        row["rdma_vs_bare"] = _ratio(times["bare"], times["rdma"])
    return row


def _ratio(before: list[float], after: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(before, after, strict=True)), 3)


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _overlap(pair: Pair, state: State) -> dict[str, Any]:
    """Eight chunks of fixed time, their rows leaving meanwhile.

    The chunk is a wait, as the processor's is while a GPU computes; packing (the digests) is part
    of the loop with and without a link.
    """
    tails, loops, alone, fulls = [], [], [], []
    for _ in range(3):
        full = _timed(lambda: pair.move(pair.tcp, state))
        bare_loop = sum(_chunk_loop(state, lambda pieces: [*pieces]))
        transfer = pair.offer(pair.tcp, state)
        loop = sum(_chunk_loop(state, transfer.send))
        ended = time.perf_counter()
        pair.check(pair.tcp, transfer.finish(state.snapshot()))
        tails.append(time.perf_counter() - ended)
        loops.append(loop)
        alone.append(bare_loop)
        fulls.append(full)
    share = (state.chunk_bytes(CHUNKS - 1, CHUNKS) + state.nbytes - state.rows) / state.nbytes
    return {
        "chunks": CHUNKS,
        "chunk_seconds": CHUNK_SECONDS,
        "tail_seconds": round(statistics.median(tails), 4),
        "tail_share_of_bytes": round(share, 3),
        "full_seconds": round(statistics.median(fulls), 4),
        "tail_vs_share": _ratio(tails, [share * each for each in fulls]),
        "prefill_slowdown": _ratio(loops, alone),
    }


def _chunk_loop(state: State, send: Callable[[Iterator[Piece]], object]) -> Iterator[float]:
    for index in range(CHUNKS):
        begun = time.perf_counter()
        time.sleep(CHUNK_SECONDS)
        send(state.chunk(index, CHUNKS))
        yield time.perf_counter() - begun


def _steps(nbytes: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Where an rdma hand-off's time goes, each step measured by itself on one core.

    `beside` tells what the step runs beside where every process has cores of its own.
    """
    import xxhash

    source, target = memoryview(bytearray(b"x") * COPY), memoryview(bytearray(COPY))

    def copy() -> None:
        target[:] = source

    copy()
    scale = nbytes / COPY
    once = min(_timed(copy) for _ in range(3)) * scale
    digest = min(_timed(lambda: _none(xxhash.xxh3_64_intdigest(source))) for _ in range(3)) * scale
    wire = nbytes / 1e6 / row["bare_mb_per_s"]
    steps = [
        ("digest of every piece", digest, "the next chunk's computation"),
        ("copy into shared memory", once, "the wire"),
        ("copy into the group's buffer", once, "nothing: one operation is in flight"),
        ("group send and receive", wire, "nothing: this is the wire"),
        ("copy out of the group's buffer", once, "nothing: one operation is in flight"),
        ("copy into the state's buffer", once, "the wire"),
        ("verification", digest, "the wire"),
    ]
    return [{"step": name, "seconds": round(s, 4), "beside": what} for name, s, what in steps]


def _none(_: object) -> None:
    return None


def _table(result: dict[str, Any]) -> str:
    ways = ("raw", "tcp", "safetensors", "bare", "rdma")
    names = [name for name in ways if f"{name}_mb_per_s" in result["sizes"][0]]
    lines = [f"link benchmark on {result['host']} at load {result['load']}, rates in MB/s", ""]
    lines.append("".join(f"{name:>13}" for name in ["MB", *names]))
    for row in result["sizes"]:
        values = [row["mb"], *(row[f"{name}_mb_per_s"] for name in names)]
        lines.append("".join(f"{value:>13}" for value in values))
    lines += ["", *(f"{name} = {value}" for name, value in result["ratios"].items())]
    if steps := result["rdma"].get("steps"):
        lines += ["", "where an rdma hand-off's time goes, each step on one core:"]
        lines += [f"{s['seconds']:8.3f} s  {s['step']:<32} beside {s['beside']}" for s in steps]
    elif result["rdma"]["reason"]:
        lines += ["", f"rdma not measured: {result['rdma']['reason']}"]
    return "\n".join(lines)
