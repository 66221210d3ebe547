"""What a probe has found is kept beside the model, for the same files and device only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from model_dirs import make_tiny_model

import engine.model
from engine.device import Device
from engine.model import Model, load
from engine.probe import PROBES, Batching


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("probed") / "tiny")


def refuse(_: Model) -> Batching:
    raise AssertionError("it was measured before")


def test_a_restart_measures_nothing_again(
    folder: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder, device)
    found = [first.batching, first.verifying, first.verifying_rows]
    assert all(each.ok for each in found)
    kept = json.loads((folder / PROBES).read_text())["found"]
    assert sorted(kept) == ["batching", "verifying", "verifying_rows"]
    monkeypatch.setattr(engine.model, "probe", refuse)
    monkeypatch.setattr("engine.speculate.probe_verify", lambda model, rows: refuse(model))
    again = load(folder, device)
    assert [again.batching, again.verifying, again.verifying_rows] == found
    assert sorted(path.name for path in folder.glob(f"{PROBES}*")) == [PROBES]

    other = load(folder, dataclasses.replace(device, name="another"))
    with pytest.raises(AssertionError, match="measured before"):
        _ = other.batching
    (folder / PROBES).write_text("damaged")
    with pytest.raises(AssertionError, match="measured before"):
        _ = load(folder, device).batching


def test_a_directory_that_cannot_be_written_is_no_error(folder: Path, device: Device) -> None:
    (folder / PROBES).unlink(missing_ok=True)
    (folder / PROBES).mkdir()
    assert load(folder, device).batching.ok
    (folder / PROBES).rmdir()
    assert not list(folder.glob(f"{PROBES}*"))
