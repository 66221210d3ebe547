"""What a profile says besides rates: short forwards, costs in service, workers on one machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.cli import main
from scheduler.record import JobError
from scheduler.simulation import history, service, workload
from scheduler.simulation.cluster import Cluster, Link, Machine, Turn
from scheduler.simulation.history import Past
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import Profile, load
from scheduler.simulation.report import summarise

RAW: dict[str, Any] = {
    "version": 1,
    "prefill": [{"chunk": 100, "context": 100, "rate": 250.0}],
    "decode": [
        {"width": 1, "context": 100, "rate": 10.0},
        {"width": 2, "context": 100, "rate": 20.0},
        {"width": 8, "context": 100, "rate": 80.0},
    ],
    "forwards": [
        {"tokens": 20, "context": 0, "seconds": 0.2},
        {"tokens": 60, "context": 0, "seconds": 0.3},
    ],
}
RATES = Profile.parse("rates", RAW)


def profile(**more: Any) -> Profile:
    return Profile.parse("rates", {**RAW, **more})


def serve(cluster: Cluster, turns: list[Turn]) -> tuple[Pipeline, list[Turn]]:
    mine = [replace(turn) for turn in turns]
    sim = Pipeline(cluster, mine)
    sim.run()
    return sim, mine


# --- forwards ------------------------------------------------------------------------------------


def test_short_forwards_take_what_was_measured() -> None:
    for tokens, seconds in ((20, 0.2), (40, 0.25), (60, 0.3), (80, 0.35), (100, 0.4)):
        assert RATES.chunk_s(0, tokens) == pytest.approx(seconds)
    assert RATES.chunk_s(0, 1) == pytest.approx(0.1), "a step is the other end"
    assert RATES.chunk_s(0, 10) == pytest.approx(0.1 + 0.1 * 9 / 19)
    plain = Profile.parse("plain", {k: v for k, v in RAW.items() if k != "forwards"})
    assert plain.chunk_s(0, 50) == pytest.approx(0.2), "without them in proportion"
    assert (RATES.chunk, RATES.rate(100)) == (plain.chunk, plain.rate(100))


def test_short_forwards_far_in_a_prompt_cost_what_position_adds() -> None:
    grown = [*RAW["prefill"], {"chunk": 100, "context": 1100, "rate": 200.0}]
    found = profile(prefill=grown)
    assert found.chunk_s(0, 20) == pytest.approx(0.2)
    # A token costs 2 us more for every token before it: (1/200 - 1/250) / 1000 for half of them.
    assert found.chunk_s(1000, 20) == pytest.approx(0.2 + 20 * 1000 * 2e-6)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"forwards": [{"tokens": 0, "context": 0, "seconds": 1}]}, "no length"),
        ({"forwards": [{"tokens": 3, "context": 0, "seconds": float("nan")}]}, "no length"),
        ({"forwards": [{"tokens": 3}]}, "not a profile"),
        ({"beside": {"prefill": 0.5}}, "no less time than alone"),
        ({"beside": [1]}, "not a profile"),
        ({"prompt_s": -1}, "negative"),
        ({"start_s": "x"}, "not a profile"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        profile(**more)


def test_what_a_prompt_costs_besides_keeps_its_node() -> None:
    turns = [Turn(0, 0.0, 101, 1), Turn(1, 0.0, 101, 1)]
    plain = Cluster.of([RATES], [RATES])
    dear = replace(plain, prefill=(Machine("p0", profile(prompt_s=0.5)),))
    _, (first, second) = serve(dear, turns)
    _, (cheap, later) = serve(plain, turns)
    assert first.ttft == pytest.approx(cheap.ttft + 0.5)
    assert second.ttft == pytest.approx(later.ttft + 1.0)


# --- two workers on one machine ------------------------------------------------------------------


def machine(prefill: float, decode: float) -> Cluster:
    slow = profile(beside={"prefill": prefill, "decode": decode})
    return replace(Cluster.of([slow], [slow]), link=Link(1e9, 0.0), shared=True)


def test_work_beside_other_work_is_slower_while_there_is_some() -> None:
    # An answer of 20 steps of 0.1 s begins at 0.4 s; at 1 s a prompt of 1,000 tokens comes.
    turns = [Turn(0, 0.0, 101, 20), Turn(1, 1.0, 1001, 1)]
    _, (answer, prompt) = serve(machine(2.0, 1.5), turns)
    # 5 steps at full pace, the sixth is under way; then 0.15 s each: 14 of them.
    assert answer.ended == pytest.approx(0.4 + 6 * 0.1 + 14 * 0.15, abs=1e-6)
    # Until then the prompt gets half, afterwards all.
    half = answer.ended - 1.0
    assert prompt.prefilled == pytest.approx(answer.ended + (4.0 - half / 2), abs=1e-6)


def test_without_a_neighbour_nothing_is_slower() -> None:
    turns = [Turn(k, 0.7 * k, 150 + 30 * k, 1 + 5 * k) for k in range(12)]
    alone = replace(machine(3.0, 3.0), shared=False)
    _, apart = serve(alone, turns)
    _, free = serve(machine(1.0, 1.0), turns)
    _, slow = serve(machine(3.0, 3.0), turns)
    assert [t.ended for t in apart] == pytest.approx([t.ended for t in free])
    assert sum(t.ended for t in slow) > 1.2 * sum(t.ended for t in free)
    sim, again = serve(machine(3.0, 3.0), turns)
    assert [t.ended for t in again] == [t.ended for t in slow], "a run repeats exactly"
    used = summarise(sim)["utilisation"]
    assert 0 < used["p0"] <= 1
    assert 0 < used["d0"] <= 1


def test_only_machines_that_are_one_disturb_each_other() -> None:
    turns = [Turn(0, 0.0, 101, 20), Turn(1, 1.0, 1001, 1)]
    two = machine(2.0, 1.5).more("prefill")
    busy = [*turns, Turn(2, 1.0, 1001, 1)]
    _, (answer, one, other) = serve(two, busy)
    assert answer.ended > 2.4, "the first node's prompt disturbs it"
    assert min(one.prefilled, other.prefilled) == pytest.approx(5.0), "the second node has peace"


# --- costs in service ----------------------------------------------------------------------------


def lone(count: int = 8, prompt_s: float = 0.03, start_s: float = 0.02) -> list[Past]:
    """Requests that a stack served one after another."""
    costs = profile(prompt_s=prompt_s, start_s=start_s)
    turns = [Turn(k, 10.0 * k, 41 + 25 * k, 4) for k in range(count)]
    _, served = serve(replace(Cluster.of([costs], [costs]), link=Link(1e9, 0.0)), turns)
    return [
        Past(
            t.number, t.at, t.prompt, t.prompt, t.output, bytes=1, exposed_s=0.0,
            times={
                "prefilling": 0.0, "handing_off": t.prefilled - t.at, "decoding": t.admitted - t.at,
                "first_token": t.ttft, "ended": t.ended - t.at,
            },
        )
        for t in served
    ]  # fmt: skip


def test_costs_are_read_off_requests_that_were_alone() -> None:
    pasts = lone()
    found = service.learn(pasts, RATES, RATES)
    assert found.requests == 8
    assert found.prompt_s == pytest.approx(0.03, abs=1e-6)
    assert found.start_s == pytest.approx(0.02, abs=1e-6)
    assert found.forwards == pytest.approx(1, abs=1e-3)
    # What came while another was there counts for nothing, and it spoils that one too.
    crowd = [replace(p, id=90 + k, at=p.at + 0.01) for k, p in enumerate(pasts[:3])]
    assert service.learn([*pasts, *crowd], RATES, RATES).requests == 5
    with pytest.raises(JobError, match="at least 5 are needed"):
        service.learn([*pasts[:5], *crowd], RATES, RATES)
    faster = replace(RATES, prefill=((100, 100, 500.0),), forwards=())
    assert service.learn(pasts, faster, RATES).forwards > 1.5, "the profile was not honest"


def test_answers_that_begin_where_their_prompt_was_computed_are_no_cost_of_it() -> None:
    moved = lone()
    late = []
    for past in moved:
        over = past.times["handing_off"]
        first = over + RATES.step_s(1, past.prompt_tokens)
        times = {**past.times, "first_token": first, "handing_off": first + 0.5}
        late.append(replace(past, times={**times, "ended": first + 0.6}))
    found = service.learn(late, RATES, RATES)
    assert found.prompt_s == pytest.approx(0.03, abs=1e-6)
    assert found.start_s == 0.0
    assert service.learn([*moved[:4], *late[4:]], RATES, RATES).start_s == pytest.approx(0.02)


def test_the_command_writes_costs_into_the_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    past, one, other = (tmp_path / name for name in ("h.jsonl", "p.json", "d.json"))
    history.write(past, lone())
    for file in (one, other):
        file.write_text(json.dumps(RAW))
    words = ["history", "rates", str(past), "--prefill", str(one), "--decode", str(other)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "8 requests were served alone" in told
    assert "30.0 ms" in told
    assert "20.0 ms" in told
    assert load(str(one)).prompt_s == pytest.approx(0.03)
    assert load(str(other)).start_s == pytest.approx(0.02)
    assert load(str(other)).prompt_s == 0
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 8
    assert main(words[:3]) == 1
    assert "needs --prefill FILE" in capsys.readouterr().err
    fast = {**RAW, "prefill": [{"chunk": 100, "context": 100, "rate": 500.0}], "forwards": []}
    one.write_text(json.dumps(fast))
    assert main(words) == 0
    assert "times as long as calibrated" in capsys.readouterr().out


# --- what is wrong with a file is said -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("at,prompt_tokens,output_tokens\n0,-5,2\n", "line 2: not a request .-5 tokens"),
        ("at,prompt_tokens,output_tokens\n0,5,2\ninf,5,2\n", "line 3.*time inf"),
        ("at,prompt_tokens,output_tokens,priority\n0,5,2,urgent\n", "priority urgent"),
        ("at,prompt_tokens,output_tokens,cached_tokens\n0,5,2,9\n", "9 of 5 tokens held"),
        ("at,prompt_tokens,output_tokens\n0,5\n", "line 2: no output_tokens or"),
        ("at,output_tokens\n0,5\n", "no column prompt_tokens or"),
        ("at,prompt_tokens,output_tokens\n", "no requests"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(JobError, match=why):
        workload.load(file)


def test_tables_of_spreadsheets_are_read(tmp_path: Path) -> None:
    file = tmp_path / "t.CSV"
    file.write_bytes(b"\xef\xbb\xbfat;prompt_tokens;output_tokens\r\n3;50;2\r\n1;40;3\r\n")
    assert [(t.at, t.prompt, t.output) for t in workload.load(file)] == [(0, 40, 3), (2, 50, 2)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--trace", "t.csv"], "add --decode PROFILE"),
        (["--trace", "t.csv", "--decode", "m3-ultra", "--plot", "t.pdf"], ".svg or .png"),
        (["--trace", "t.csv", "--decode", "m3-ultra", "--plot", "no/t.svg"], "no directory no"),
        (["--trace", "t.csv", "--decode", "m3-ultra", "--shared"], "add --prefill"),
        (["--trace", "t.csv", "--decode", "m3-ultra", "--gain", "0.5"], "preempt_gain: input"),
        (["--trace", "t.csv", "--decode", "m3-ultra", "--link-gbps", "nan"], "--link-gbps"),
        (["--trace", "t.csv", "--decode", "m3-ultra", "--store-gb", "-1"], "cannot be negative"),
        (["--scenario", "seed", "--plot", "t.svg"], "has its own machines"),
        (["--trace", "no.csv", "--decode", "m3-ultra"], "No such file"),
    ],
)
def test_what_cannot_be_simulated_is_said_first(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("at,prompt_tokens,output_tokens\n0,50,2\n")
    assert main(["simulate", *words]) == 1
    told = capsys.readouterr().err
    assert why in told
    assert len(told.splitlines()) == 1
