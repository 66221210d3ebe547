"""Where models lie is one rule, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.config import Config
from store import paths
from store.codec import fingerprint

PLACES = {"darwin": Path("Library/Application Support"), "linux": Path(".cache")}


@pytest.mark.parametrize("platform", PLACES)
@pytest.mark.parametrize("way", ["default", "environment", "xdg"])
def test_models_lie_in_one_place_for_all_rooms(
    platform: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TANDEM_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(paths.sys, "platform", platform)
    expected = tmp_path / PLACES[platform] / "tandem" / "models"
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


def test_models_of_an_earlier_version_on_a_mac_are_found_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    old = tmp_path / "Library/Caches/tandem/models"
    new = tmp_path / "Library/Application Support/tandem/models"
    (old / "fingerprints").mkdir(parents=True)
    monkeypatch.setattr(paths.sys, "platform", "darwin")
    assert paths.models_dir() == new, "there is no model in the old place"
    (old / "glm").mkdir()
    (old / "glm" / "config.json").write_text("{}")
    assert paths.models_dir() == old
    monkeypatch.setattr(paths.sys, "platform", "linux")
    assert paths.models_dir() == tmp_path / ".cache/tandem/models"
    monkeypatch.setattr(paths.sys, "platform", "darwin")
    (new / "qwen").mkdir(parents=True)
    assert paths.models_dir() == old, "a directory that is being filled is no model"
    (new / "qwen" / "config.json").write_text("{}")
    assert paths.models_dir() == new
