"""The link's benchmark measures what it says and prints one JSON object."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from transport import bench


def test_registration_imports_nothing_heavy() -> None:
    code = (
        "import sys, argparse, transport.bench as b;"
        "b.register(argparse.ArgumentParser().add_subparsers());"
        "assert not {'numpy', 'mlx', 'redis'} & set(sys.modules), sys.modules"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


def test_small_sizes_give_all_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CHUNK_SECONDS", 0.01)
    parser = argparse.ArgumentParser()
    bench.register(parser.add_subparsers())
    arguments = parser.parse_args(["link", "--json", "--sizes", "1", "9"])
    assert arguments.run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["mb"] for row in result["sizes"]] == [1, 9]
    assert result["rdma"]["measured"]
    assert set(result["ratios"]) == {
        "tcp_vs_raw",
        "tcp_vs_safetensors",
        "rdma_vs_bare",
        "tail_vs_share",
        "prefill_slowdown",
    }
    assert all(value > 0 for value in result["ratios"].values())
