from __future__ import annotations

from pathlib import Path

from store.bench import measure


def test_a_short_run_measures_every_path(tmp_path: Path) -> None:
    """Rates are for quiet machines; what was written, and that every side ran, holds anywhere."""
    found = measure(tmp_path, tokens=2000, rounds=1)
    assert set(found["ratios"]) == {
        "save_vs_raw",
        "restore_vs_gather",
        "restore_vs_apc",
        "restore_vs_safetensors",
        "restore_vs_floor",
        "floor_vs_safetensors",
        "delta_bytes_vs_ideal",
    }
    assert 1.0 <= found["ratios"]["delta_bytes_vs_ideal"] <= 1.03
    assert min(found["seconds"].values()) > 0
