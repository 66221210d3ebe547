"""Recorded runs come out of the simulator again, from the rates measured beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.cli import main
from scheduler.record import JobError
from scheduler.simulation import compare, history, workload
from scheduler.simulation.cluster import Turn

RECORDED = Path(__file__).parents[1] / "data" / "recorded"
RUNS = sorted(path.parent for path in RECORDED.glob("*/history.jsonl"))


def replay(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    words = ["simulate", "--history", str(run / "history.jsonl"), "--compare", "--json"]
    words += ["--prefill", str(run / "prefill.json"), "--decode", str(run / "decode.json")]
    words += json.loads((run / "flags.json").read_text())
    assert main(words) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["against"]
    return found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_recorded_run_comes_out_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replay(run, capsys)
    assert found["requests"] >= 60  # type: ignore[operator]  # a count
    assert found["ttft_mean_ratio"] == pytest.approx(1, abs=0.15)
    assert found["ttft_p95_ratio"] == pytest.approx(1, abs=0.15)
    assert found["completion_order"] >= 0.9  # type: ignore[operator]  # a number
    assert replay(run, capsys) == found, "a replay repeats exactly"


def test_what_is_recorded_says_nothing_of_what_was_said() -> None:
    assert RUNS
    for run in RUNS:
        for file in run.iterdir():
            text = file.read_text()
            assert not [word for word in ("resp_", "conv_", "/root", "/home") if word in text]


def test_a_wrong_order_and_wrong_times_are_seen() -> None:
    pasts = [
        history.Past(k, float(k), 100, 100, 5, times={"first_token": 1.0, "ended": 2.0})
        for k in range(10)
    ]
    turns = workload.from_history(pasts)

    def after(seconds: float, turn: Turn) -> None:
        turn.first, turn.ended = turn.at + seconds / 2, turn.at + seconds

    for turn in turns:
        after(2.0, turn)
    same = compare.against(pasts, turns)
    assert same["ttft_mean_ratio"] == same["ttft_p95_ratio"] == same["completion_order"] == 1
    for turn in turns:
        after(100.0 - 5 * turn.number, turn)
    other = compare.against(pasts, turns)
    assert other["completion_order"] == -1
    assert other["ttft_mean_ratio"] > 10
    with pytest.raises(JobError, match="fewer than two"):
        compare.against(pasts[:1], turns[:1])


def test_equal_values_share_a_rank() -> None:
    assert compare.rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert compare.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert compare.rank_correlation([1, 1, 1], [1, 2, 3]) == 0
