from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.model import Model
from scheduler.ledger.notes import Notes
from store.taken import WrongPath
from worker_decode import bench_sides


def test_one_side_keeps_notes_and_the_other_nothing(
    tmp_path: Path, loaded: Model, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs is for quiet machines; that both sides are what they should be is certain."""

    found = bench_sides.measure(loaded, words, tmp_path / "a", 0.0, widths=(2,))
    assert set(found["ratios"]) == {"width2_vs_off"}
    assert found["ratios"]["width2_vs_off"] > 0
    assert found["path"]["taken"] == {"on, width2": "notes", "off, width2": "nothing"}
    monkeypatch.setattr(bench_sides, "Notes", lambda on: Notes(on=False))
    with pytest.raises(WrongPath, match="on, width2 was a part and not notes"):
        bench_sides.measure(loaded, words, tmp_path / "b", 0.0, widths=(2,))
