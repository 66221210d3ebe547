"""`tandem bench link`: what the verified hand-off costs beside moving the same bytes barely."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZES_MB = (1, 16, 128, 358)
REPEATS = {1: 20, 16: 12, 128: 7, 358: 7}
CHUNKS = 8
CHUNK_SECONDS = 0.2


def register(subparsers: Any) -> None:
    """Add the `link` benchmark to an argparse subparsers object."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "link", help="verified hand-off against a bare stream, files and a bare group"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES_MB), help="megabytes (10^6 bytes)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if a path that was to be measured was not taken."""
    result = measure(sorted(set(arguments.sizes)))
    print(json.dumps(result) if arguments.json else _table(result))
    return 0


def measure(sizes: list[int]) -> dict[str, Any]:
    """Rates in MB/s for every size, the ratios of the largest, and the overlap of chunks."""
    from transport.bench_state import State

    states = {size: State.of(size * 1_000_000) for size in sizes}
    rows = []
    with _Pair(max(sizes) * 1_000_000) as pair:
        for size, state in states.items():
            rows.append(_measure_size(pair, size, state))
        overlap = _overlap(pair, states[max(sizes)])
    last = rows[-1]
    ratios = {
        "tcp_vs_raw": last["tcp_vs_raw"],
        "tcp_vs_safetensors": last["tcp_vs_safetensors"],
        "tail_vs_share": overlap["tail_vs_share"],
        "prefill_slowdown": overlap["prefill_slowdown"],
    }
    return {
        "bench": "link",
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "path": "tcp",
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "sizes": rows,
        "overlap": overlap,
    }


class _Pair:
    """This process and the receiving one, joined by a raw connection and by a link."""

    def __init__(self, nbytes: int) -> None:
        from transport.sender import Sender

        secret = secrets.token_bytes(32)
        shared = Path("/dev/shm")
        self._directory = tempfile.TemporaryDirectory(
            prefix="tandem-bench-", dir=shared if shared.is_dir() else None
        )
        self.file = str(Path(self._directory.name) / "state.safetensors")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "transport.bench_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        setting = {"secret": secret.hex(), "nbytes": nbytes, "file": self.file}
        self._process.stdin.write(json.dumps(setting) + "\n")
        self._process.stdin.flush()
        ports = json.loads(self._process.stdout.readline())
        self.raw = socket.create_connection(("127.0.0.1", ports["raw"]), timeout=60)
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sender = Sender.connect(("127.0.0.1", ports["link"]), secret, 20.0)
        self._count = 0

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.raw.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._directory.cleanup()

    def name(self) -> str:
        """A fresh transfer id."""
        self._count += 1
        return f"bench-{self._count}"


def _measure_size(pair: _Pair, size: int, state: Any) -> dict[str, Any]:
    times: dict[str, list[float]] = {"raw": [], "tcp": [], "safetensors": []}
    repeats = REPEATS.get(size, 7)
    for repeat in range(repeats + 1):
        for name, work in (("raw", _raw), ("tcp", _tcp)):
            seconds = _timed(work, pair, state)
            if repeat:
                times[name].append(seconds)
    for repeat in range(3):
        seconds = _timed(_safetensors, pair, state)
        if repeat:
            times["safetensors"].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    megabytes = state.nbytes / 1e6
    return {
        "mb": size,
        **{f"{name}_mb_per_s": round(megabytes / value, 1) for name, value in medians.items()},
        "tcp_vs_raw": _ratio(times["raw"], times["tcp"]),
        "tcp_vs_safetensors": round(medians["safetensors"] / medians["tcp"], 3),
    }


def _ratio(before: list[float], after: list[float]) -> float:
    """Median over neighbours in time, which other work on the machine disturbs alike."""
    return round(statistics.median(a / b for a, b in zip(before, after, strict=True)), 3)


def _timed(work: Callable[[_Pair, Any], None], pair: _Pair, state: Any) -> float:
    begun = time.perf_counter()
    work(pair, state)
    return time.perf_counter() - begun


def _raw(pair: _Pair, state: Any) -> None:
    from transport.bench_peer import ORDER, RAW

    pair.raw.sendall(ORDER.pack(RAW, state.nbytes))
    pair.raw.sendall(state.memory)
    _answer(pair)


def _answer(pair: _Pair) -> None:
    if pair.raw.recv(1) != b"k":
        raise RuntimeError("the receiving process of the benchmark has ended")


def _tcp(pair: _Pair, state: Any) -> None:
    transfer = _offer(pair, state)
    transfer.send(state.chunk(0, 1))
    _check(transfer.finish(state.snapshot()))


def _offer(pair: _Pair, state: Any) -> Any:
    return pair.sender.offer(
        pair.name(), fingerprint=bytes(16), tokens=1, nbytes=state.nbytes, block_tokens=64
    )


def _check(report: Any) -> None:
    if report.path != "tcp" or report.duplicate:
        raise RuntimeError(f"the benchmark meant to measure tcp and took {report}")


def _safetensors(pair: _Pair, state: Any) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from transport.bench_peer import FILE, ORDER

    whole = np.frombuffer(state.memory, dtype=np.uint8)
    layers = {f"layer.{i}": part for i, part in enumerate(np.array_split(whole, 48))}
    save_file(layers, pair.file)
    pair.raw.sendall(ORDER.pack(FILE, 0))
    _answer(pair)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pair.file)


def _overlap(pair: _Pair, state: Any) -> dict[str, Any]:
    """Eight chunks of fixed time, their rows leaving meanwhile.

    The chunk is a wait, as the processor's is while a GPU computes; packing (the digests) is part
    of the loop with and without a link.
    """
    tails, slowdowns, fulls = [], [], []
    for repeat in range(4):
        full = _timed(_tcp, pair, state)
        alone = sum(_chunk_loop(state, lambda pieces: [*pieces]))
        transfer = _offer(pair, state)
        loop = sum(_chunk_loop(state, transfer.send))
        ended = time.perf_counter()
        _check(transfer.finish(state.snapshot()))
        if repeat:
            tails.append(time.perf_counter() - ended)
            slowdowns.append(loop / alone)
            fulls.append(full)
    tail_bytes = state.chunk_bytes(CHUNKS - 1, CHUNKS) + state.nbytes - state.rows
    share = tail_bytes / state.nbytes
    tail, full = statistics.median(tails), statistics.median(fulls)
    return {
        "chunks": CHUNKS,
        "chunk_seconds": CHUNK_SECONDS,
        "tail_seconds": round(tail, 4),
        "tail_share_of_bytes": round(share, 3),
        "full_seconds": round(full, 4),
        "tail_vs_share": _ratio(tails, [share * each for each in fulls]),
        "prefill_slowdown": round(statistics.median(slowdowns), 4),
    }


def _chunk_loop(state: Any, send: Callable[[Iterator[Any]], object]) -> Iterator[float]:
    for index in range(CHUNKS):
        begun = time.perf_counter()
        time.sleep(CHUNK_SECONDS)
        send(state.chunk(index, CHUNKS))
        yield time.perf_counter() - begun


def _table(result: dict[str, Any]) -> str:
    lines = [f"link benchmark on {result['host']}", ""]
    lines.append(f"{'MB':>5} {'raw MB/s':>10} {'tcp MB/s':>10} {'files MB/s':>11} {'tcp/raw':>8}")
    for row in result["sizes"]:
        lines.append(
            f"{row['mb']:>5} {row['raw_mb_per_s']:>10} {row['tcp_mb_per_s']:>10} "
            f"{row['safetensors_mb_per_s']:>11} {row['tcp_vs_raw']:>8}"
        )
    lines.append("")
    lines += [f"{name} = {value}" for name, value in result["ratios"].items()]
    return "\n".join(lines)
