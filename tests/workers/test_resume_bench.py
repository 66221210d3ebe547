from __future__ import annotations

from pathlib import Path

from decode_kit import tiny

from worker_decode.bench import measure


def test_a_short_run_takes_every_path(tmp_path: Path) -> None:
    """Rates are for quiet machines; each path, and what it computes, is certain."""
    found = measure(tiny("llama"), tmp_path, tokens=300, new=20, rounds=1)
    assert found["tokens"] == 300
    assert found["ratios"]["computed_over_new_tokens"] == 1
    assert set(found["ratios"]) == {
        "restored_vs_floor",
        "hot_vs_floor",
        "ttft_resumed_vs_cold",
        "computed_over_new_tokens",
    }
    assert min(found["seconds"].values()) > 0
