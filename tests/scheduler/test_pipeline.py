"""The simulated pipeline: what is claimed and published comes out; every part has its effect."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.cli import main
from scheduler.record import JobError
from scheduler.simulation import plot, published, scenario, workload
from scheduler.simulation.cluster import Cluster, Link, Machine, Shelf, Turn
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import Profile, load, next_chunk
from scheduler.simulation.report import Goal, summarise

#: 1,000 tokens/s of prefill and 20 steps/s, whatever the width.
EVEN = Profile(
    "even",
    ((100, 1000, 1000.0),),
    ((1, 1000, 20.0), (2, 1000, 40.0), (8, 1000, 160.0)),
    state=(1e6, 1e4),
)


def cluster(prefill: int = 1, decode: int = 1, *, slots: int = 8, link: float = 1e9) -> Cluster:
    found = Cluster.of([EVEN] * prefill, [EVEN] * decode, slots)
    return replace(found, link=Link(link, 0.001))


def mixed(count: int = 200, every: float = 1.0, seed: int = 1) -> list[Turn]:
    chance = random.Random(seed)
    at, turns = 0.0, list[Turn]()
    for number in range(count):
        at += chance.expovariate(1 / every)
        turn = Turn(number, at, chance.randint(50, 1500), chance.randint(1, 60))
        ended = [t for t in turns if at - t.at > 20]
        if ended and chance.random() < 0.3:
            before = chance.choice(ended)
            turn.previous = before.number
            turn.prompt = before.prompt + before.output + 50
        turns.append(turn)
    return turns


def run(found: Cluster, turns: list[Turn]) -> tuple[Pipeline, list[Turn]]:
    mine = [replace(turn) for turn in turns]
    sim = Pipeline(found, mine)
    sim.run()
    return sim, mine


def mean(turns: list[Turn]) -> float:
    return sum(turn.ended - turn.at for turn in turns) / len(turns)


# --- what is claimed and published -------------------------------------------------------------


def test_the_seed_comes_out_of_its_own_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "seed", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    split, late = report["split"], report["late"]
    assert split["ttft_s"] == pytest.approx(18.5, rel=0.03)
    assert split["total_s"] == pytest.approx(25.4, rel=0.03)
    assert split["interval_s"] == pytest.approx(17.8, rel=0.03)
    assert split["prefill_free_s"] == pytest.approx(18, rel=0.03)
    assert split["bytes"] == pytest.approx(358e6, rel=0.01)
    assert report["m3_alone"]["ttft_s"] == pytest.approx(41, rel=0.03)
    assert report["m5_alone"]["total_s"] == pytest.approx(22.2, rel=0.02)
    assert late["lone_total_vs_m5"] == pytest.approx(1, abs=0.02)
    assert late["interval_vs_split"] == pytest.approx(1, abs=0.02)
    assert {row["rows"] for row in late["mixed"]} == {"take turns", "cost nothing"}
    for row in late["mixed"]:
        means = row["mean_completion_s"]
        assert means["late"] < min(means["split"], means["m5_alone"]), row
    tokens = {line["tokens"]: line["million_tokens"] for line in report["capacity"]}
    assert tokens[4_000] == pytest.approx(6.1, rel=0.02)
    assert tokens[17_500] == pytest.approx(14.7, rel=0.02)
    assert tokens[100_000] == pytest.approx(22, rel=0.02)
    assert any("0.75 s" in line for line in report["assumptions"])
    assert all("claimed" in source for source in report["sources"].values())


def test_published_systems_come_out_of_their_own_rates() -> None:
    for system, figures in published.published().items():
        for figure, found in figures.items():
            assert found["ratio"] == pytest.approx(1, abs=0.15), (system, figure)


# --- the parts ---------------------------------------------------------------------------------


def test_a_lone_request_takes_what_its_parts_take() -> None:
    sim, (turn,) = run(cluster(link=1e7), [Turn(0, 5.0, 1001, 11)])
    assert turn.begun == 5.0
    assert turn.prefilled == pytest.approx(6.0)
    # Nine chunks of 1 MB left behind the computation; the last one and the snapshot remain.
    assert turn.handed - turn.prefilled == pytest.approx(0.1 + 0.1 + 0.001)
    assert turn.ttft == pytest.approx(1.0 + 0.201 + 0.05)
    assert turn.tpot == pytest.approx(0.05)
    assert turn.moved == pytest.approx(1e6 + 1000 * 1e4)
    whole = replace(cluster(link=1e7), link=Link(1e7, 0.001, overlap=False))
    assert run(whole, [Turn(0, 0.0, 1001, 11)])[1][0].ttft == pytest.approx(1 + 1.1 + 0.051)
    report = summarise(sim)
    assert report["requests"] == 1
    assert report["bytes"]["link"] == turn.moved
    assert report["utilisation"]["p0"] == pytest.approx(1 / report["span_s"], rel=0.01)
    assert report["itl_s"]["max"] == pytest.approx(0.05)


def test_runs_repeat_exactly_and_all_are_served() -> None:
    turns = mixed()
    first, second = (run(cluster(), turns) for _ in range(2))
    assert first[1] == second[1]
    assert summarise(first[0]) == summarise(second[0])
    for turn in first[1]:
        assert turn.at <= turn.begun < turn.first <= turn.ended
        assert turn.done == turn.output
    report = summarise(first[0])
    for part in report["utilisation"].values():
        assert 0 <= part <= 1
    assert sum(report["cache"]["paths"].values()) == len(turns)
    assert report["cache"]["hit_rate"] == 1
    assert all(node.room.rows == 0 for node in first[0].decode.values())
    assert not any(first[0].rules.waiting.values())


def test_more_of_what_is_short_helps_and_more_of_the_rest_does_not() -> None:
    turns = mixed(300, 0.55, seed=2)  # too much prefill for one node
    base = mean(run(cluster(), turns)[1])
    assert mean(run(cluster(prefill=2), turns)[1]) < 0.6 * base
    assert mean(run(cluster(decode=2), turns)[1]) > 0.9 * base
    narrow = mean(run(cluster(prefill=2, slots=1), turns)[1])
    assert mean(run(cluster(prefill=2, decode=2, slots=1), turns)[1]) < 0.7 * narrow
    slow = mean(run(cluster(prefill=2, link=6e6), turns)[1])
    assert mean(run(cluster(prefill=2, link=6e7), turns)[1]) < 0.7 * slow


def test_short_prompts_are_served_between_the_chunks_of_long_ones() -> None:
    turns = [Turn(0, 0.0, 20_000, 2), *(Turn(k, 1.0 + k, 200, 2) for k in range(1, 6))]
    _, served = run(cluster(), turns)
    assert served[0].parked >= 5
    assert max(turn.ttft for turn in served[1:]) < 0.6
    assert served[0].ttft == pytest.approx(20 + 5 * 0.2 + 0.1, abs=0.3)


def test_a_small_store_evicts_and_its_conversations_are_computed_again() -> None:
    turns = mixed(300, 1.5, seed=5)
    found = replace(cluster(), store=Shelf(size=2e8, hot_s=0.0))
    sim, served = run(found, turns)
    report = summarise(sim)
    assert report["evictions"] > 50
    assert sim.stock.used <= 2e8
    assert report["cache"]["hit_rate"] < 0.9
    again = [turn for turn in served if turn.path == "recomputed"]
    assert again
    assert all(turn.held == 0 for turn in again)
    whole, _ = run(replace(cluster(), store=Shelf(hot_s=0.0)), turns)
    assert summarise(whole)["cache"]["hit_rate"] == 1
    assert whole.stock.high > 2e8
    # What a reading costs is waited for.
    slow = replace(cluster(), store=Shelf(hot_s=0.0, read_rate=1e6))
    restored = [turn for turn in run(slow, turns)[1] if turn.path == "restored"]
    assert restored
    assert all(turn.first - turn.admitted > (1e6 + 1e4 * turn.held) / 1e6 for turn in restored)


def test_prefills_wait_for_memory_at_the_decode_node() -> None:
    machine = Machine("d0", EVEN, slots=1, memory=2.5e7)
    tight = replace(cluster(), decode=(machine,))
    turns = [Turn(k, 0.0, 1000, 100) for k in range(6)]
    _, served = run(tight, turns)
    # Two states of 11 MB fit; the third prompt waits until one of them is being decoded.
    begun = sorted(turn.begun for turn in served)
    admitted = sorted(turn.admitted for turn in served)
    assert begun[2] >= admitted[0]
    assert begun[3] >= admitted[1]
    assert sorted(t.begun for t in run(cluster(slots=1), turns)[1])[3] < admitted[1]


def test_an_answer_stays_until_a_prompt_waits() -> None:
    fast = replace(EVEN, name="fast", decode=((1, 1000, 40.0),))
    found = replace(Cluster.of([fast], [EVEN]), handoff="late", link=Link(1e9, 0.001))
    turns = [Turn(0, 0.0, 1001, 101), Turn(1, 2.0, 1001, 11), Turn(2, 50.0, 1001, 11)]
    _, (first, second, last) = run(found, turns)
    assert first.ttft == pytest.approx(1.025)
    # At 2 s it has 40 tokens and goes over; the other 61 come at the decode node's pace.
    assert first.admitted == pytest.approx(2.0, abs=0.03)
    assert first.ended == pytest.approx(2.0 + 61 * 0.05, abs=0.1)
    assert second.begun == pytest.approx(2.0, abs=0.03)
    assert last.admitted < 0
    assert last.ended == pytest.approx(50 + 1 + 11 * 0.025)
    slow = replace(EVEN, name="slow", decode=((1, 1000, 5.0),))
    found = replace(Cluster.of([slow], [EVEN]), handoff="late", link=Link(1e9, 0.001))
    moved = run(found, turns)[1][0]
    assert moved.admitted == pytest.approx(moved.prefilled, abs=0.02)


def test_a_turn_waits_for_the_one_it_continues() -> None:
    turns = [Turn(0, 0.0, 1000, 100), Turn(1, 0.5, 1200, 5, previous=0)]
    _, (first, second) = run(cluster(), turns)
    assert second.at == first.ended
    assert second.path == "hot"
    assert second.held == 1099
    assert second.stage == "decode"


def test_a_state_larger_than_all_memory_is_still_served() -> None:
    tight = replace(cluster(), decode=(Machine("d0", EVEN, memory=1e6),))
    assert run(tight, [Turn(0, 0.0, 1000, 5)])[1][0].ended > 0
    with pytest.raises(JobError, match="at least one decode node"):
        Pipeline(Cluster.of([EVEN], []), [])


# --- profiles ----------------------------------------------------------------------------------


def test_times_between_the_measured_points() -> None:
    raw = {
        "version": 1,
        "prefill": [
            {"chunk": 100, "context": 1000, "rate": 500.0},
            {"chunk": 400, "context": 1000, "rate": 800.0},
        ],
        "decode": [
            {"width": 1, "context": 100, "rate": 10.0},
            {"width": 4, "context": 100, "rate": 20.0},
            {"width": 1, "context": 300, "rate": 5.0},
            {"width": 4, "context": 300, "rate": 10.0},
        ],
    }
    profile = Profile.parse("p", raw)
    assert profile.prefill_s(0, 1000, 100) == pytest.approx(2.0)
    assert profile.chunk_s(0, 250) == pytest.approx((0.2 + 0.5) / 2)
    assert profile.chunk_s(0, 800) == pytest.approx(1.0)
    assert profile.chunk_s(0, 2) == pytest.approx(0.1), "as long as a step at least"
    assert profile.chunk == 400
    assert profile.step_s(1, 100) == pytest.approx(0.1)
    assert profile.step_s(4, 200) == pytest.approx(0.3)
    assert profile.step_s(2, 100) == pytest.approx(0.2), "merged from the least width measured"
    assert profile.step_s(7, 100) == pytest.approx(0.3)
    assert profile.step_s(1, 10) == pytest.approx(0.1), "never less than at the least context"
    raw["decode"][1]["rate"] = 5.0
    raw["decode"][3]["rate"] = 4.0
    assert Profile.parse("p", raw).step_s(4, 100) == pytest.approx(0.4), "merging does not pay"
    # Two contexts tell how the cost grows.
    raw["prefill"] += [{"chunk": 400, "context": 4000, "rate": 400.0}]
    grown = Profile.parse("p", raw)
    assert grown.prefill_s(0, 4000, 400) == pytest.approx(10.0, rel=0.01)
    assert grown.prefill_s(0, 800, 400) == pytest.approx(0.8 * 1.19, rel=0.03)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not a profile"),
        ("[]", "not a profile"),
        ('{"version": 1}', "not a profile"),
        ('{"version": 9}', "version 9"),
        ('{"version": 1, "prefill": [], "decode": []}', "no rates"),
    ],
)
def test_a_bad_profile_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(JobError, match=why):
        load(str(file))
    with pytest.raises(JobError, match="m3-ultra, m5-ultra"):
        load("m7")


def test_chunks_are_planned_as_the_engine_plans_them() -> None:
    from engine.prefill import plan

    for length in (1, 7, 64, 65, 72, 73, 300, 1000, 1029):
        at, lengths = 0, []
        while at < length:
            lengths.append(next_chunk(at, length, 64))
            at += lengths[-1]
        assert lengths == plan(0, length, 64)


# --- requests ----------------------------------------------------------------------------------


def test_tables_of_lengths_are_read(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens,previous\n"
        "2024-05-10 00:00:10,100,20,\n2024-05-10 00:00:00,50,2,-1\n2024-05-10 00:00:30,200,3,0\n"
    )
    turns = workload.load(file)
    assert [(t.number, t.at, t.prompt, t.output, t.previous) for t in turns] == [
        (0, 0.0, 50, 2, None),
        (1, 10.0, 100, 20, None),
        (2, 30.0, 200, 3, 1),
    ]
    for text, why in (
        ("at,prompt_tokens\n1,2\n", "output_tokens"),
        ("at,prompt_tokens,output_tokens\n1,x,2\n", "line 2"),
        ("at,prompt_tokens,output_tokens,previous\n1,9,2,5\n", "continues no earlier"),
        ("at,prompt_tokens,output_tokens\n", "no requests"),
    ):
        file.write_text(text)
        with pytest.raises(JobError, match=why):
            workload.load(file)


def test_conversations_of_a_trace_are_found(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1600, "output_length": 100, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 1000, "input_length": 1500, "output_length": 100, "hash_ids": [0, 7, 8]},
        {"timestamp": 9000, "input_length": 3000, "output_length": 9, "hash_ids": [0, 1, 2, 9, 5]},
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    turns = workload.load(file)
    assert [turn.previous for turn in turns] == [None, None, 0]
    found = set()
    for seed in range(20):
        try:
            kept = workload.load(file, 0.5, seed)
        except JobError:
            continue  # nothing is left
        assert kept == workload.load(file, 0.5, seed)
        found.add(tuple((turn.number, turn.prompt, turn.previous) for turn in kept))
    whole = ((0, 1600, None), (1, 1500, None), (2, 3000, 0))
    assert found == {whole, ((0, 1600, None), (1, 3000, 0)), ((0, 1500, None),)}


def test_the_command_runs_the_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.csv"
    rows = [f"{turn.at},{turn.prompt},{turn.output}" for turn in mixed(40, 20.0)]
    file.write_text("at,prompt_tokens,output_tokens\n" + "\n".join(rows))
    picture = tmp_path / "run.svg"
    base = ["simulate", "--trace", str(file), "--prefill", "m5-ultra", "--decode", "m3-ultra"]
    assert main([*base, "--plot", str(picture), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"ttft_s", "tpot_s", "itl_s", "goodput", "utilisation", "waits_s", "bytes"} <= set(
        report
    )
    assert report["cluster"]["prefill"] == ["m5-ultra"]
    text = picture.read_text()
    assert text.startswith("<svg")
    assert text.count("<polyline") >= 3
    assert main([*base, "--decode", "m3-ultra", "--handoff", "late"]) == 0
    assert "utilisation" in capsys.readouterr().out
    assert main([*base, "--plot", str(tmp_path / "run.pdf")]) == 1
    assert ".svg or .png" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(file), "--prefill", "m5-ultra"]) == 1
    assert "add --decode" in capsys.readouterr().err


def test_a_picture_of_a_run_is_well_formed(tmp_path: Path) -> None:
    from xml.etree import ElementTree

    sim, _ = run(cluster(prefill=2, decode=2), mixed(60))
    root = ElementTree.fromstring(plot.picture(sim))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"prefill", "p0", "p1", "d0", "d1", "busy", "waiting requests"} <= set(texts)


def test_goals_are_counted() -> None:
    sim, served = run(cluster(), mixed(50))
    every = summarise(sim, Goal(ttft=1000.0, tpot=10.0))["goodput"]
    assert every["share"] == 1
    none = summarise(sim, Goal(ttft=0.001, tpot=10.0))["goodput"]
    assert none["share"] == 0
    half = sorted(turn.ttft for turn in served)[len(served) // 2]
    some = summarise(sim, Goal(ttft=half, tpot=10.0))["goodput"]
    assert 0.4 < some["share"] < 0.6


def test_capacity_follows_the_size_law() -> None:
    line = scenario.capacity(17_500, load("m3-ultra"))
    assert line["bytes"] == pytest.approx(357.3e6, rel=0.001)
    assert line["conversations"] == 839
    assert line["stored_conversations"] < line["conversations"]


def test_what_is_new_is_computed_where_that_is_sooner() -> None:
    slow = replace(EVEN, name="slow", prefill=((100, 1000, 100.0),))
    found = replace(Cluster.of([EVEN], [slow]), link=Link(1e9, 0.001))
    turns = [
        Turn(0, 0.0, 1000, 10),
        Turn(1, 20.0, 1059, 10, previous=0),
        Turn(2, 40.0, 3000, 10, previous=1),
    ]
    _, (first, few, many) = run(found, turns)
    assert (first.stage, few.stage, many.stage) == ("prefill", "decode", "prefill")
    assert (first.held, few.held, many.held) == (0, 1009, 1068)
    # The state went there, and only what is new and the snapshot came back.
    assert many.moved == pytest.approx(1e6 + 1068 * 1e4 + 1e6 + (2999 - 1068) * 1e4)
    # Nineteen chunks, a short one that takes a step's time, the way there and back, the first step.
    assert many.ttft == pytest.approx(1.9 + 0.05 + 0.0117 + 0.0033 + 0.05, abs=0.001)
    busy = [*turns, Turn(3, 39.0, 30_000, 1)]
    assert run(found, busy)[1][2].stage == "decode", "the prefill node is at work for longer"
    small = [*turns, *(Turn(k, 39.0, 8000, 1) for k in range(3, 6))]
    assert run(found, small)[1][2].stage == "prefill", "it would go before what waits"


def test_the_benchmark_says_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    from scheduler.bench import simulation

    report = simulation.run(600)
    assert report["requests_per_cpu_s"] > 0
    assert report["simulated_s"] > 600
    assert report["parked"] > 0


def test_a_state_from_before_the_run_is_found_at_either_stage() -> None:
    turns = [Turn(0, 0.0, 1000, 5, cached=900), Turn(1, 50.0, 1000, 5, cached=900)]
    turns[0].stage, turns[1].stage = "prefill", "decode"
    _, (lent, local) = run(cluster(), turns)
    assert lent.held == local.held == 900
    assert lent.prefilled < 0.2
    assert local.first - local.at == pytest.approx(0.099 + 0.05)
