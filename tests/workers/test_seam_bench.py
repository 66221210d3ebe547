"""The benchmark of the seam moves real answers, and fails where one stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir
from worker_prefill import bench

TOKENS = 128
#: On a machine that stalls an answer may be over before it is told to move.
TRIES = 3


@pytest.mark.rotate(5)
def test_the_gap_is_set_against_two_steps_and_the_wire(tmp_path: Path) -> None:
    model = resolve(DEFAULT_MODEL, models_dir())
    for number in range(TRIES):
        (folder := tmp_path / str(number)).mkdir()
        try:
            found = bench.run(model, folder, rounds=1, tokens=TOKENS)
            break
        except ModelError as error:
            print(error)
    else:
        raise AssertionError("no answer moved")
    (each,) = found["rounds"]
    assert bench.BEFORE <= each["said_there"] < TOKENS
    expected = each["gap_s"] / (2 * each["step_s"] + each["wire_s"])
    assert found["ratios"]["gap_vs_bound"] == pytest.approx(expected, abs=1e-3)
    assert min(each["parts_s"].values()) >= 0
    assert each["parts_s"]["first step"] < sum(each["parts_s"].values())


@pytest.mark.rotate(5)
def test_an_answer_that_does_not_move_measures_nothing(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did not move"):
        bench.run(model_path, tmp_path, rounds=1, tokens=bench.BEFORE + 2)
