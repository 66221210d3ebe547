"""Benchmarks that are made to take another path than they mean to measure refuse their figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))
from decode_kit import tiny

from engine import bench, bench_draft, prefill
from store.taken import WrongPath
from transport import bench as link_bench
from transport.bench_pair import Pair


def test_a_drafter_that_is_off_is_not_measured() -> None:
    model = tiny("llama")
    found = bench_draft.measure(model, "ngram", tokens=40, rounds=1)
    assert found["path"]["taken"]["drafter"] == "at work"
    assert found["drafted"] > 0
    with pytest.raises(WrongPath, match=r"drafter was none \(switched off\)"):
        bench_draft.measure(model, "off", tokens=8, rounds=1)


def test_smaller_chunks_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    chunk = min(model.device.chunk, 2048)
    assert bench._measure_prefill(model, 0.0)["path"]["taken"] == {"chunk": chunk}
    monkeypatch.setattr(prefill, "fit_chunk", lambda model, length, position: min(length, 64))
    with pytest.raises(WrongPath, match=f"chunk was .* and not {chunk}"):
        bench._measure_prefill(model, 0.0)


def test_tcp_in_place_of_rdma_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups(pair: Pair, *_: object) -> None:
        pair.rdma = pair.tcp

    monkeypatch.setattr(Pair, "_groups", groups)
    with pytest.raises(WrongPath, match="rdma was tcp and not rdma"):
        link_bench.measure([1])
