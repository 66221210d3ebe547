"""Measured profiles: what they choose, where they count."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from model_dirs import make_tiny_model

from engine.calibrate import Spread, measure
from engine.decode import Batch
from engine.device import Device
from engine.errors import ModelError
from engine.model import Model, load
from engine.neighbour import beside
from engine.profile import NAME, Profile, find, record
from engine.profile_command import rates
from engine.rows import Row


def profile_of(
    device: Device, rates: dict[int, float], decode: dict[tuple[int, int], float]
) -> Profile:
    return Profile(
        device.name,
        device.mlx,
        device.dtype,
        [{"chunk": chunk, "context": 512, "rate": rate} for chunk, rate in rates.items()],
        [{"width": w, "context": c, "rate": rate} for (w, c), rate in decode.items()],
    )


def test_the_smallest_chunk_that_is_as_fast_is_chosen(device: Device) -> None:
    assert profile_of(device, {64: 80.0, 128: 98.0, 256: 100.0, 512: 99.0}, {}).chunk == 128
    assert profile_of(device, {}, {}).chunk == 0


def test_rows_are_merged_where_that_is_faster(device: Device) -> None:
    decode = {
        (1, 64): 10.0,
        (2, 64): 9.0,
        (4, 64): 20.0,
        (1, 512): 8.0,
        (2, 512): 9.0,
        (4, 512): 15.0,
    }
    assert profile_of(device, {}, decode).merge_from == 4
    slow = {(1, 64): 10.0, (2, 64): 9.0, (4, 64): 9.5}
    assert profile_of(device, {}, slow).merge_from == 5
    assert profile_of(device, {}, {}).merge_from == 2


def test_what_was_measured_is_told_as_a_table(device: Device) -> None:
    profile = profile_of(device, {128: 98.04, 256: 1100.0}, {(1, 64): 10.0, (4, 64): 25.5})
    forwards = [{"tokens": 16, "context": 0, "seconds": 0.0125}]
    told = rates("tiny", dataclasses.replace(profile, forwards=forwards, prompt_s=0.002))
    lines = [line.split() for line in told.splitlines()]
    for row in ("128 512 98.0", "256 512 1,100.0", "1 64 10.0", "4 64 25.5", "16 12.50"):
        assert row.split() in lines
    assert "a prompt costs 2.00 ms besides its chunks" in told
    assert "chunks of 256 tokens, rows merged from 4" in told
    assert "quiet" not in told
    assert "quiet" in rates("tiny", dataclasses.replace(profile, spread=0.5))


def test_what_one_row_of_several_gets(device: Device) -> None:
    decode = {(1, 64): 10.0, (2, 64): 16.0, (4, 64): 20.0, (1, 2048): 8.0}
    profile = profile_of(device, {}, decode)
    assert profile.row_rate(1, 100) == pytest.approx(10.0)
    assert profile.row_rate(2, 100) == pytest.approx(8.0)
    assert profile.row_rate(3, 100) == pytest.approx(1 / ((0.125 + 0.2) / 2))
    assert profile.row_rate(9, 100) == pytest.approx(5.0)  # beyond what was measured
    assert profile.row_rate(1, 9000) == pytest.approx(8.0)
    assert profile_of(device, {}, {}).row_rate(1, 64) == 0


def test_a_profile_counts_only_where_it_was_measured(tmp_path: Path, device: Device) -> None:
    assert find(tmp_path, device) is None
    profile = profile_of(device, {64: 1.0}, {})
    assert record(tmp_path, profile) == tmp_path / NAME
    assert find(tmp_path, device) == profile
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert find(tmp_path, dataclasses.replace(device, mlx="0.0")) is None
    assert find(tmp_path, dataclasses.replace(device, name="other")) is None
    for damage in ("", "[]", "{}", json.dumps({"version": 1, "device": device.name})):
        (tmp_path / NAME).write_text(damage)
        assert find(tmp_path, device) is None


def test_an_unwritable_directory_is_one_line(tmp_path: Path, device: Device) -> None:
    with pytest.raises(ModelError, match="cannot be written"):
        record(tmp_path / "missing", profile_of(device, {}, {}))


def test_what_is_measured_is_what_is_used(small: Model, tmp_path: Path) -> None:
    began = time.perf_counter()
    profile = measure(small, [32, 64], 128, [1, 2, 4], [32], [9, 16])
    took = time.perf_counter() - began
    assert {point["chunk"] for point in profile.prefill} == {32, 64}
    assert sorted(point["context"] for point in profile.prefill)[-2:] == [128, 512]
    assert {point["width"] for point in profile.decode} == {1, 2, 4}
    assert [point["tokens"] for point in profile.forwards] == [9, 16]
    assert all(point["seconds"] > 0 for point in profile.forwards)
    assert 0 < profile.prompt_s < took
    assert profile.spread >= 0
    layout = small.layout
    expected = profile.state["fixed"] + 1000 * profile.state["per_token"]
    assert layout.state_bytes(1000) == pytest.approx(expected, rel=0.01)
    assert all(point["rate"] > 0 for point in profile.prefill + profile.decode)
    record(tmp_path, dataclasses.replace(profile, decode=[]))
    model = Model(tmp_path, small.model, small.config, small.device, b"0" * 16)
    assert model.chunk == profile.chunk
    model.merge_from = 3
    batch = Batch(model, 3)
    for seed in range(3):
        batch.add(Row(model.fresh_cache(), [], [5 + seed]))
        batch.step()
    assert batch.facts["widths"] == {1: 3, 3: 1}


def test_medians_count_and_what_disturbs_is_told() -> None:
    spread = Spread()
    assert spread.median([1.0, 1.0, 9.0]) == 1.0
    assert spread.most == 8.0
    assert spread.median([2.0, 2.2, 2.1]) == 2.1
    assert spread.most == 8.0


def test_what_the_roles_cost_each_other(tmp_path: Path, device: Device) -> None:
    model = load(make_tiny_model(tmp_path / "tiny"), device)
    lines: list[str] = []
    found = beside(model, 32, roles=["decode"], say=lines.append)
    assert list(found) == ["decode"]
    assert found["decode"] >= 1
    assert "decode beside prefill" in lines[0]
    with pytest.raises(ModelError, match="did not start"):
        beside(model, 32, roles=["prefill"], prefix=["false"])
