"""The simulator: traces, thinning, and the rule in use against first come first served."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from scheduler import cli
from scheduler.config import JobsConfig
from scheduler.record import JobError
from scheduler.simulation import agents, command, simulate, trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Conversations of many lengths, one in seven very long, over twenty minutes."""
    chance = random.Random(1)
    lines = []
    for number in range(300):
        length = 60_000 if number % 7 == 0 else chance.randint(500, 4000)
        blocks = [0, *(number * 1000 + k for k in range(1, length // 512 + 1))]
        at = chance.uniform(0, 1200_000)
        for turn in range(2):
            lines.append(
                {
                    "timestamp": int(at + 20_000 * turn),
                    "input_length": length + 600 * turn,
                    "output_length": 100,
                    "hash_ids": blocks + [number * 1000 + 999] * turn,
                }
            )
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_only_what_is_new_counts(path: Path) -> None:
    requests = trace.read(path)
    work = trace.arrivals(requests)
    assert len(work) == 600
    assert [r.at for r in requests] == sorted(r.at for r in requests)
    first, second = (
        trace.arrivals([trace.Request(k, 2000, 1, blocks) for k, blocks in enumerate(pair)])
        for pair in ([(1, 2, 3), (1, 2, 3)], [(1, 2, 3), (1, 4, 3)])
    )
    assert [a.new for a in first] == [2000, 2000 - 3 * 512]
    assert [a.new for a in second] == [2000, 2000 - 512]
    assert [a.new for a in trace.arrivals([trace.Request(0, 10, 1, (1,))] * 2)] == [64, 64]


def test_thinning_keeps_whole_conversations(path: Path) -> None:
    requests = trace.read(path)
    some = trace.thin(requests, 0.3, seed=5)
    assert some == trace.thin(requests, 0.3, seed=5) != trace.thin(requests, 0.3, seed=6)
    assert 0 < len(some) < len(requests)
    kept = {request.lineage for request in some}
    assert some == [request for request in requests if request.lineage in kept]


def test_the_rule_serves_everyone_once_and_better(path: Path) -> None:
    report = simulate.simulate(path, load=0.7, seeds=range(2), settings=JobsConfig())
    plain = report["first_come_first_served"]
    assert report["requests"] == plain["requests"] > 100
    assert report["mean_ttft_s"] < 0.8 * plain["mean_ttft_s"]
    assert report["within_slo"] > plain["within_slo"]
    assert report["longest_wait_s"] < JobsConfig().horizon_seconds + 120
    again = simulate.simulate(path, load=0.7, seeds=range(2), settings=JobsConfig())
    assert again == report, "the same seeds give the same figures"


def test_the_command_prints_one_json_object(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(
        ["simulate", "--trace", str(path), "--load", "0.5", "--seeds", "1", "--json"]
    )
    assert args.run(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"mean_ttft_s", "within_slo", "longest_wait_s"} <= set(report)


def test_tiny_prompts_of_agents_go_between_the_chunks(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(4):
        text, rows = "You are an agent. " * 60, []
        for turn in range(6 + 6 * number):
            text += chance.choice("abc") * chance.randint(400, 9000)
            rows.append(json.dumps({"timestamp": 1e6 * (3 * turn), "input": text}))
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows))
    recorded = agents.sessions(tmp_path)
    assert len(recorded) == 4
    assert all(session.at[0] == 0 for session in recorded)
    report = simulate.simulate_agents(tmp_path, load=0.6, seeds=range(1), settings=JobsConfig())
    assert report["tiny"] > 50
    assert report["tiny_wait_p95_chunks"] < 1.5
    assert report["tiny_wait_p95_s"] < report["first_come_first_served"]["tiny_wait_p95_s"]
    (tmp_path / "9.jsonl").write_text("{}")
    with pytest.raises(JobError, match="not a recorded agent session"):
        agents.sessions(tmp_path)


@pytest.mark.parametrize("line", ["{", "{}", '{"timestamp": 1}', "[]", "7"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(JobError, match="line 1"):
        trace.read(file)
    with pytest.raises(JobError, match="cannot be read"):
        trace.read(tmp_path / "none")


def test_more_load_than_the_trace_has_is_refused(path: Path) -> None:
    with pytest.raises(JobError, match="choose a lower one"):
        simulate.simulate(path, load=50, seeds=range(1), settings=JobsConfig())


def test_help_of_the_rule_says_unit_default_and_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for flag, words in {
        "--horizon": ("seconds", "default 380", "longest"),
        "--gain": ("factor", "default 1.25", "parks less often"),
    }.items():
        part = told.split(f"{flag} N", 2)[-1].split(" --")[0]
        assert all(word in part for word in words), part
