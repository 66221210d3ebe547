"""The pipeline's benchmark runs its real processes and counts every chunk."""

from __future__ import annotations

import pytest

from scheduler.bench.pipeline import run


@pytest.mark.rotate(5)
def test_the_benchmark_measures_what_it_says() -> None:
    report = run(jobs=2, scale=100.0, flights=(8,))
    assert 0 < report["prefill_busy"] <= 1
    assert set(report["throughput"]) == set(report["rival"]) == {"8"}
    assert all(value > 0 for value in report["throughput"].values())
    assert set(report["late"]) == {
        "lone_total_vs_m5",
        "interval_vs_split",
        "lone_vs_simulated",
        "interval_vs_simulated",
    }
    # Two jobs: 2 x (14.73 + 0.04 + 6.96) s one after another, 2 x 14.73 + 7.00 s overlapped.
    assert report["ideal"] == pytest.approx(43.46 / 36.46, abs=0.01)
