"""The benchmark measures what it says: a small run of it, through the command's own parser."""

from __future__ import annotations

import argparse
import json

import pytest

from store.codec import bench, reference


def test_the_bench_reports_rates_against_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.register(parser.add_subparsers())
    arguments = parser.parse_args(["codec", "--json", "--tokens", "320", "--rounds", "1"])
    assert arguments.run(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == reference.law(320, bench.POOL)
    assert found["pieces"] == 5
    assert found["path"]["taken"]["copies"] in ("host", "device")
    assert found["path"]["taken"] == found["path"]["expected"]
    assert set(found["ratios"]) == {
        "pack_vs_memcpy",
        "unpack_vs_memcpy",
        "allocate_and_unpack_vs_memcpy",
    }
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert bench.TOKENS == 17_500
    assert reference.law(bench.TOKENS, bench.POOL) // 1_000_000 == 348


def test_the_bench_has_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.register(parser.add_subparsers())
    arguments = parser.parse_args(["codec", "--tokens", "160", "--rounds", "1"])
    assert arguments.run(arguments) == 0
    assert "pack_vs_memcpy" in capsys.readouterr().out
