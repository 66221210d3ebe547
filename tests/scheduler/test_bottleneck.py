"""The bottleneck is named where it is known to be, and only what helps is recommended."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import redis

from scheduler.cli import main
from scheduler.command.bottleneck import seconds
from scheduler.jobs import Jobs
from scheduler.record import JobError, NewJob, Result, response_id
from scheduler.runs import Runs
from scheduler.serializer import pack
from scheduler.simulation import bottleneck, history
from scheduler.simulation.bottleneck import Stage, Window, analyse, estimate
from scheduler.simulation.cluster import Cluster, Link, Machine, Turn
from scheduler.simulation.history import Past
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import Profile

#: Larger chunks are faster; rows do not slow each other down.
RATES = Profile(
    "rates",
    ((256, 2000, 1000.0), (1024, 2000, 1600.0)),
    ((1, 1000, 25.0), (2, 1000, 50.0), (8, 1000, 200.0)),
    state=(1e6, 1e4),
)


def load(count: int = 150, every: float = 2.0, prompt: int = 1000, output: int = 40) -> list[Turn]:
    chance = random.Random(8)
    at, turns = 0.0, list[Turn]()
    for number in range(count):
        at += chance.expovariate(1 / every)
        tokens = int(prompt * chance.uniform(0.3, 1.7))
        turns.append(Turn(number, at, tokens, max(1, int(output * chance.uniform(0.3, 1.7)))))
    return turns


def served(
    turns: Sequence[Turn], *, slots: int = 8, link: float = 1e9, rates: Profile = RATES
) -> Window:
    """The records of a stack whose slow part is known."""
    found = Cluster((Machine("p0", rates, 256),), (Machine("d0", rates, slots=slots),))
    found = replace(found, link=Link(link, 0.001))
    sim = Pipeline(found, turns)
    sim.run()
    pasts = [past(turn, link) for turn in turns]
    return Window(
        pasts,
        max(turn.ended for turn in turns),
        slots=slots,
        chunk=256,
        prefill=rates,
        decode=rates,
    )


def past(turn: Turn, link: float) -> Past:
    begun = turn.begun - turn.at
    times = {"prefilling": begun, "first_token": turn.ttft, "ended": turn.ended - turn.at}
    moved = {}
    if turn.stage == "prefill":
        times["handing_off"] = turn.prefilled - turn.at
        times["decoding"] = turn.admitted - turn.at
        moved = {
            "bytes": int(turn.moved),
            "wire_s": turn.moved / link,
            "exposed_s": turn.handed - turn.prefilled,
        }
    return Past(
        turn.number, turn.at, turn.prompt, turn.prompt - turn.held, turn.output, turn.held,
        previous=turn.previous, stage=turn.stage, path=turn.path, prefill_node="a",
        decode_node="b", times=times, **moved,
    )  # fmt: skip


def gains(report: dict[str, object]) -> dict[str, float]:
    rows = [*report["speed_ups"], *report["topology"]]  # type: ignore[misc]  # lists of rows
    return {row["change"]: row["gain"] for row in rows}


def test_too_many_prompts() -> None:
    report = analyse(served(load(every=1.02)))
    assert report["bottleneck"] == "prefill queue"
    assert set(report["do"]) == {"chunks of 1024 tokens", "one more prefill node"}
    assert [row["change"] for row in report["topology"]] == [
        "one more decode node",
        "one more prefill node",
    ]
    stage = report["stages"][0]
    assert stage["utilisation"] > 0.85
    assert stage["estimated_wait_s"] is None or stage["estimated_wait_s"] > 1
    assert any(line.startswith("a link twice as fast") for line in report["do_not"])
    assert report["model"]["ratio"] == pytest.approx(1, abs=0.02)


def test_too_few_rows() -> None:
    report = analyse(served(load(every=1.8, prompt=400, output=42), slots=1))
    assert report["bottleneck"] == "decode queue"
    assert report["do"] == ["one more decode node"]
    assert gains(report)["one more prefill node"] < 0.05


def test_rows_that_slow_each_other_down() -> None:
    turns = load(every=1.1, prompt=300, output=42)
    sharing = replace(RATES, decode=((1, 1000, 40.0), (2, 1000, 41.0), (8, 1000, 44.0)))
    report = analyse(served(turns, rates=sharing))
    assert report["bottleneck"] == "decode batch"
    assert report["do"] == ["one more decode node"]


def test_a_slow_link() -> None:
    report = analyse(served(load(every=4.0), link=4e6))
    assert report["bottleneck"] == "link"
    assert "a link twice as fast" in report["do"]
    assert "one more prefill node" not in report["do"]
    assert gains(report)["a link twice as fast"] > 0.2


def test_a_store_that_lost_what_was_asked_for() -> None:
    turns = load(every=9.0, prompt=3000)
    for turn in turns[60:]:
        before = turns[turn.number - 40]
        turn.previous, turn.stage, turn.cached = before.number, "decode", 0
        turn.prompt = before.prompt + before.output + 40
    window = served(turns)
    assert sum(bottleneck.recomputed(p) for p in window.pasts) == 90
    report = analyse(window)
    assert report["bottleneck"] == "store"
    assert report["do"][0] == "a store that loses nothing"
    assert "one more prefill node" not in report["do"]
    row = next(r for r in report["speed_ups"] if r["change"] == bottleneck.STORE)
    assert row["by_formula"]["wait_s"] > 1
    assert row["by_formula"]["then_s"] == 0


def test_every_purchase_has_the_wait_that_the_formula_gives() -> None:
    report = analyse(served(load(every=1.4)))
    rows = {r["change"]: r for r in (*report["speed_ups"], *report["topology"])}
    queue = report["stages"][0]["estimated_wait_s"]
    for change in ("chunks of 1024 tokens", bottleneck.MORE_PREFILL):
        found = rows[change]["by_formula"]
        assert found["stage"] == "prefill queue"
        assert found["wait_s"] == queue
        assert 0 <= found["then_s"] < 0.7 * queue
    assert rows[bottleneck.STORE]["by_formula"] == {"stage": "store", "wait_s": 0, "then_s": 0}
    assert rows[bottleneck.STORE]["gain"] == 0, "nothing was lost"
    assert f"{bottleneck.STORE}: +0.0%" in report["do_not"]
    assert rows[bottleneck.FASTER_LINK]["by_formula"]["stage"] == "link"
    assert rows[bottleneck.MORE_DECODE]["by_formula"]["stage"] == "decode queue"


def test_nothing_is_sold_to_who_does_not_wait() -> None:
    report = analyse(served(load(every=30.0, prompt=300)))
    assert report["bottleneck"] is None
    assert "hardly wait" in report["why"]
    assert not [change for change in report["do"] if "node" in change]
    assert len(report["do_not"]) >= 2


def test_without_profiles_the_window_shows_the_rates() -> None:
    window = replace(served(load(every=1.3)), prefill=None, decode=None)
    report = analyse(window)
    assert report["model"]["rates"] == "taken from the window"
    assert report["model"]["ratio"] == pytest.approx(1, abs=0.15)
    assert "one more prefill node" in report["do"]
    assert not [change for change in gains(report) if "chunk" in change], "not known"


def test_the_estimate_is_erlangs_where_all_is_random() -> None:
    chance = random.Random(3)
    at, times = 0.0, []
    for _ in range(20_000):
        at += chance.expovariate(1.0)
        times.append(at)
    for servers, service, wait in ((1, 0.5, 0.5), (2, 1.0, 1 / 3), (1, 0.7, 0.7 * 0.7 / 0.3)):
        drawn = [chance.expovariate(1 / service) for _ in times]
        stage = Stage("s", servers, times, [], drawn)
        assert estimate(stage, at) == pytest.approx(wait, rel=0.12)
    even = Stage("s", 1, times, [], [0.5] * len(times))
    assert estimate(even, at) == pytest.approx(0.25, rel=0.1), "half of it with equal services"
    assert math.isinf(estimate(Stage("s", 1, times, [], [1.1] * len(times)), at))
    assert estimate(Stage("s", 1, [], [], []), 1.0) == 0


def test_too_little_is_said_to_be_too_little() -> None:
    window = replace(served(load(count=3)), named="the last 1 h")
    with pytest.raises(JobError, match=r"3 requests .* the last 1 h, .* serve more first"):
        analyse(window)


def test_times_on_the_command_line() -> None:
    assert [seconds(text) for text in ("90s", "10m", "1.5h", "7d", "5")] == [
        90, 600, 5400, 604_800, 5,
    ]  # fmt: skip
    for text in ("", "0s", "h", "-1h", "1y"):
        with pytest.raises(Exception, match="not a time"):
            seconds(text)


def test_the_command_reads_a_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "history.jsonl"
    history.write(file, served(load(every=1.02)).pasts)
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["bottleneck", "--history", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bottleneck"] == "prefill queue"
    assert main(["bottleneck", "--history", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "one more prefill node" in shown
    assert "do not buy" in shown
    file.write_text("{}\n")
    assert main(["bottleneck", "--history", str(file)]) == 1
    assert "line 1" in capsys.readouterr().err


def test_what_was_served_is_collected_from_its_records(client: redis.Redis, tmp_path: Path) -> None:
    client.flushdb()
    jobs, runs = Jobs(client), Runs(client)
    ids = [response_id() for _ in range(3)]
    secret = "what was said"
    said = [{"role": "user", "content": secret}]
    for number, resp in enumerate(ids):
        jobs.accept(
            NewJob(
                resp, "m", {"input": said}, list(range(100 + number)), owner="somebody",
                conversation="conv_" + "0" * 32, previous=ids[number - 1] if number else None,
                stage="decode" if number == 2 else "prefill", held_tokens=90 if number == 2 else 0,
            )
        )  # fmt: skip
    for _ in range(2):
        job = runs.take("prefill", "prefill-one-12-abcdef", "prefill:one")
        assert job is not None
        runs.handing_off(job, job.prompt_tokens - 1)
        facts = {"bytes": 5000, "seconds": 0.5, "exposed_seconds": 0.25, "path": "tcp"}
        runs.finish_prefill(job, facts, "decode", job.prompt_tokens - 1)
    for _ in range(3):
        job = runs.take("decode", "decode-local-13-abcdef", "decode:local")
        assert job is not None
        usage = {"output_tokens": 7, "cached_tokens": job.held_tokens}
        runs.finish(job, Result(usage=usage, path={"path": "cold"}))
    pasts = history.collect(client)
    assert [p.prompt_tokens for p in pasts] == [100, 101, 102]
    assert [p.new_tokens for p in pasts] == [100, 101, 12]
    assert [p.previous for p in pasts] == [None, 0, 1]
    assert [p.stage for p in pasts] == ["prefill", "prefill", "decode"]
    assert [p.prefill_node for p in pasts] == ["one", "one", ""]
    assert {(p.bytes, p.exposed_s, p.link) for p in pasts[:2]} == {(5000, 0.25, "tcp")}
    assert all(set(p.times) >= {"prefilling", "ended"} for p in pasts)
    assert all(set(p.times) >= {"handing_off", "decoding"} for p in pasts[:2])
    assert all(0 <= value < 60 for p in pasts for value in p.times.values())
    file = tmp_path / "h.jsonl"
    assert history.write(file, pasts) == 3
    assert [asdict(p) for p in history.read(file)] == [asdict(p) for p in pasts]
    for word in (secret, "somebody", "conv_", "resp_"):
        assert word not in file.read_text()
    client.flushdb()
    with pytest.raises(JobError, match="no request"):
        history.collect(client, 60)


def test_the_commands_read_the_running_stack(
    client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("TANDEM_CONFIG", "TANDEM_RESOLVED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("TANDEM_DATA", str(tmp_path))
    monkeypatch.setenv("TANDEM_DECODE_SLOTS", "3")
    jobs, runs = Jobs(client), Runs(client)
    for number in range(8):
        jobs.accept(NewJob(response_id(), "m", {}, list(range(50 + number))))
    for _ in range(8):
        job = runs.take("prefill", "prefill-one-12-abcdef", "prefill:one")
        assert job is not None
        runs.handing_off(job, job.prompt_tokens - 1)
        facts = {"bytes": 5000, "seconds": 0.1, "exposed_seconds": 0.01, "path": "tcp"}
        runs.finish_prefill(job, facts, "decode", job.prompt_tokens - 1)
    while (job := runs.take("decode", "decode-local-13-abcdef", "decode:local")) is not None:
        runs.append(job, job.events, [pack({"type": "response.output_text.delta"})], tokens=True)
        runs.finish(job, Result(usage={"output_tokens": 4, "cached_tokens": 0}))
    file = tmp_path / "history.jsonl"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("REDIS_URL", "unix:///nowhere/redis.sock")
        for words in (["bottleneck"], ["history", "export", str(file)]):
            assert main(words) == 2
            assert "is `tandem up` running" in capsys.readouterr().err
    assert main(["history", "export", str(file), "--window", "10m"]) == 0
    assert "8 requests" in capsys.readouterr().out
    assert len(history.read(file)) == 8
    assert main(["bottleneck", "--window", "10m", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 8
    assert [stage["servers"] for stage in report["stages"]] == [1, 1, 3, 3, 1]
    assert report["model"]["rates"] == "taken from the window"
