"""`tandem bench stream`: it measures what it says, and says so when it could not."""

from __future__ import annotations

import argparse

import pytest

from scheduler.bench import stream as bench_stream
from scheduler.record import JobError


@pytest.mark.rotate(3)
def test_a_short_run_reports_both_servers() -> None:
    report = bench_stream.run(clients=3, rate=300.0, seconds=0.2, rounds=1)
    assert report["steps"] == 20
    for server in ("api", "bare"):
        assert 0 < report[f"{server}_p50_ms"] <= report[f"{server}_p99_ms"]
        assert report[f"{server}_core_share"] > 0
    assert set(report["ratios"]) == {"p99_vs_bare", "core_vs_bare"}


def test_nonsense_is_refused() -> None:
    parser = argparse.ArgumentParser()
    bench_stream.register(parser.add_subparsers())
    args = parser.parse_args(["stream", "--clients", "0"])
    with pytest.raises(JobError, match="above 0"):
        args.run(args)
