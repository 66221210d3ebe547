"""Where models lie is one rule, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.config import Config
from store import paths
from store.codec import fingerprint

CACHES = {"darwin": Path("Library/Caches"), "linux": Path(".cache")}


@pytest.mark.parametrize("platform", CACHES)
@pytest.mark.parametrize("way", ["default", "environment", "xdg"])
def test_models_lie_in_one_place_for_all_rooms(
    platform: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TANDEM_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(paths.sys, "platform", platform)
    expected = tmp_path / CACHES[platform] / "tandem" / "models"
    if way == "environment":
        monkeypatch.setenv("TANDEM_MODELS", "~/other")
        expected = tmp_path / "other"
    if way == "xdg":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        if platform == "linux":
            expected = tmp_path / "xdg" / "tandem" / "models"
    assert paths.models_dir() == expected
    assert Config().models_dir == expected
    assert fingerprint._fallback(tmp_path, None).parent == expected / "fingerprints"
