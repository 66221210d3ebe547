"""The queue's benchmark measures what it says, with few jobs."""

from __future__ import annotations

import pytest

from scheduler.bench.queue import run


@pytest.mark.rotate(5)
def test_the_benchmark_measures_every_path() -> None:
    report = run(jobs=20, waiting=300)
    assert report["submissions_per_s"] > 0
    assert 0 < report["start_latency_ms_p50"] <= report["start_latency_ms_p95"]
    assert 0 < report["idle_gap_ms_p50"] <= report["idle_gap_ms_p95"]
    # Counts, not times: a stage costs about a quarter of what a stock worker asks of Redis.
    assert 15 < report["rq_round_trips"] < 40
    assert report["ratios"]["round_trips_vs_rq"] < 0.6
    waiting = report["waiting"]
    assert waiting["jobs"] == 300
    for name in ("pick", "list", "cancel", "forecast"):
        assert waiting[f"{name}_ms_p50"] > 0
    assert waiting["bytes_per_job"] > waiting["prompt_bytes_per_job"] > 1000
