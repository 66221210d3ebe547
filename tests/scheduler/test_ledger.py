"""The parts of the ledger: clocks, meters, notes, the account of the time, the picture."""

from __future__ import annotations

import dataclasses
import html.parser
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from jobs_kit import Server, new_job
from rich.console import Console

from scheduler import scripts
from scheduler.command import explain
from scheduler.jobs import Jobs
from scheduler.ledger import clock as module
from scheduler.ledger.account import ledger_of
from scheduler.ledger.clock import DRIFT, Clock
from scheduler.ledger.drawing import cells, svg
from scheduler.ledger.keeping import freeze, thaw
from scheduler.ledger.notes import PARTS, Notes, Piece
from scheduler.record import Job, NewJob, Result, parse, response_id
from scheduler.redis_client import connect
from scheduler.runs import Runs
from store import meter
from store.saving import SaveReport
from store.store import Store
from store.turns import Turn
from worker_decode.ledgers import Ledgers
from worker_decode.saver import Saved


def test_the_shortest_round_trip_tells_the_time() -> None:
    clock = Clock()
    now = time.monotonic()
    clock.sample(now - 2.0, 1000.0, now)  # read somewhere in two seconds
    assert clock.error >= 1.0
    clock.sample(now - 0.002, 5000.0, now)
    assert clock.redis(now - 0.001) == pytest.approx(5000.0)
    assert 0.001 <= clock.error < 0.5
    clock.sample(now - 2.0, 9000.0, now)
    assert clock.redis(now - 0.001) == pytest.approx(5000.0), "a worse sample changes nothing"
    for _ in range(40):  # the good one ages out of what is kept
        clock.sample(now - 0.004, 7000.0, now)
    assert clock.redis(now - 0.002) == pytest.approx(7000.0)
    assert DRIFT > 0


def test_a_clock_that_knows_the_time_asks_no_more(
    quiet_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRIFT", 0.0)  # however long this test is held up
    client, clock = connect(quiet_url), Clock()
    assert clock.error == float("inf")
    clock.ask(client, 3)
    seconds, micros = client.time()
    assert abs(clock.redis(time.monotonic()) - seconds - micros / 1e6) < 60.0
    for error, asks in ((1e-6, False), (1.0, True)):
        now = time.monotonic()
        known = Clock()
        known.sample(now - error, seconds, now + error)
        before = client.info("commandstats")["cmdstat_time"]["calls"]
        known.settle(client)
        after = client.info("commandstats")["cmdstat_time"]["calls"]
        assert (after > before) is asks
    client.close()


@pytest.fixture
def quiet_url() -> Iterator[str]:
    """A server that nobody else asks anything, not even what an earlier test has left."""
    with Server() as server:
        yield server.url


def test_every_byte_is_counted_as_the_server_counts_it(quiet_url: str) -> None:
    watcher = connect(quiet_url)
    watcher.ping()

    def seen() -> dict[str, int]:
        return {name: int(value) for name, value in watcher.info("stats").items()
                if name in ("total_net_input_bytes", "total_commands_processed")}  # fmt: skip

    payer = meter.Meter()
    with connect(quiet_url) as counted:
        counted.ping()
        first = seen()
        own = seen()
        with meter.charge(payer):
            counted.set("k", b"x" * 5000)
            pipe = counted.pipeline(transaction=False)
            for number in range(7):
                pipe.set(f"k{number}", b"y" * 100)
            pipe.execute()
            assert counted.get("k") == b"x" * 5000
        last = seen()
    per_look = own["total_net_input_bytes"] - first["total_net_input_bytes"]
    sent = last["total_net_input_bytes"] - own["total_net_input_bytes"] - per_look
    commands = last["total_commands_processed"] - own["total_commands_processed"] - 1
    assert payer.control() == {
        "commands": commands, "round_trips": 3, "sent": sent, "received": payer.received,
    }  # fmt: skip
    assert commands == 9
    assert payer.received == len(b"+OK\r\n") * 8 + len(b"$5000\r\n\r\n") + 5000
    watcher.close()


def test_who_is_not_charged_pays_nothing_and_the_process_has_it_all() -> None:
    before = meter.totals()["work"].get("things", 0)
    inner, outer = meter.Meter(), meter.Meter()
    with meter.charge(outer):
        meter.work("things")
        with meter.charge(inner):
            meter.work("things", 2)
    meter.work("things", 4)
    assert (outer.work["things"], inner.work["things"]) == (1, 2)
    assert meter.totals()["work"]["things"] - before == 7
    half = meter.Meter()
    part = meter.Meter()
    part.trips, part.sent = 1, 100
    half.take(part, 0.5)
    assert (half.trips, half.sent) == (0.5, 50)


def test_chunks_of_a_long_prompt_are_merged_and_nothing_is_lost() -> None:
    notes = Notes()
    began = time.monotonic()
    for number in range(5000):
        notes.chunk(began + number, (0.25, 0.5, 0.125, 0.125), 64)
    packed = notes.packed(Clock(), lane="prefill")
    assert len(packed) < 40_000
    piece = Piece.read("run", packed)
    assert piece is not None
    spans = piece.spans()
    for part, seconds in zip(PARTS, (0.25, 0.5, 0.125, 0.125), strict=True):
        found = [span for span in spans if span.stage == part]
        assert sum(span.seconds for span in found) == pytest.approx(5000 * seconds)
    told = [span.facts for span in spans if span.stage == "prefill"]
    assert sum(facts["tokens"] for facts in told) == 5000 * 64 == told[-1]["to"]
    assert sum(facts["forwards"] for facts in told) == 5000


def test_notes_that_are_off_keep_nothing() -> None:
    notes = Notes(on=False)
    with notes.stage("work"):
        notes.chunk(0.0, (1.0,), 5)
    notes.fork("way", "this")
    assert notes.packed(Clock()) == b""


def job_with(pieces: dict[str, bytes], **fields: Any) -> Job:
    raw = {
        b"status": b"completed", b"stage": b"decode", b"created_at": b"100.0",
        b"t_completed": b"104.0", b"run": b"r2", b"prompt_tokens": b"100",
        **{f"l:{name}".encode(): data for name, data in pieces.items()},
        **{name.encode(): str(value).encode() for name, value in fields.items()},
    }  # fmt: skip
    return parse(response_id(), raw)


def piece_of(base: float, spans: list[tuple[str, float, float]], **about: Any) -> bytes:
    """A piece that begins at `base` of Redis TIME, by a clock that agrees with it."""
    clock, notes = Clock(), Notes()
    now = time.monotonic()
    clock.sample(now, base + 2.0, now)  # now is two seconds after the base
    for stage, start, seconds in spans:
        notes.add(stage, now - 2.0 + start, now - 2.0 + start + seconds)
    return notes.packed(clock, **about)


def whole_job() -> Job:
    return job_with(
        {
            "api": piece_of(98.0, [("tokenise", 0.0, 1.9)], lane="api", node="a"),
            "r1": piece_of(
                100.5, [("prefill", 0.0, 1.0)], lane="prefill", node="p", queue="prefill",
                enqueued=100.0, taken=100.4, outcome="handed off",
            ),
            "r2": piece_of(
                102.6, [("decode", 0.0, 1.0)], lane="decode", node="d", queue="decode",
                enqueued=102.5, taken=102.6, outcome="completed",
            ),
        }
    )  # fmt: skip


def test_shares_and_remainder_add_up_to_the_whole_and_gaps_are_named() -> None:
    ledger = ledger_of(whole_job())
    assert ledger["seconds"] == pytest.approx(6.0, abs=1e-3)
    own = {row["stage"]: row["own_seconds"] for row in ledger["stages"]}
    assert own["tokenise"] == pytest.approx(1.9, abs=1e-3)
    assert own["wait"] == pytest.approx(0.5, abs=1e-3)
    taken = [row["own_seconds"] for row in ledger["stages"] if row["stage"] == "admit"]
    assert sum(taken) == pytest.approx(0.1, abs=1e-3)
    left = ledger["remainder"]
    # Between tokenising and telling; after the forward until Redis is told; after decoding.
    assert left["seconds"] == pytest.approx(0.1 + 1.0 + 0.4, abs=1e-3)
    assert not left["within"]
    assert left["gaps"][0]["after"] == "prefill prefill"
    assert sum(row["own_seconds"] for row in ledger["stages"]) + left["seconds"] == pytest.approx(
        ledger["seconds"], abs=1e-3
    )
    assert ledger["nodes"] == {"api": "a", "prefill": "p", "decode": "d"}
    assert ledger["whole"]


def test_what_is_beside_gives_way_to_work_and_waiting() -> None:
    job = job_with(
        {
            "r2": piece_of(
                100.0, [("prefill", 0.0, 1.0), ("prefill", 1.5, 0.5)], lane="prefill",
                enqueued=100.0, taken=100.0,
            ),
            "x": piece_of(100.0, [("wire", 0.0, 2.0)], lane="link"),
        },
        t_completed=102.0,
    )  # fmt: skip
    own = {row["stage"]: row["own_seconds"] for row in ledger_of(job)["stages"]}
    assert own["prefill"] == pytest.approx(1.5, abs=1e-3)
    assert own["wire"] == pytest.approx(0.5, abs=1e-3)


def test_damaged_pieces_are_part_of_what_is_not_explained() -> None:
    job = whole_job()
    damaged = {**job.ledger, "r2": b"\xc1", "r3": b"\x01"}
    ledger = ledger_of(dataclasses.replace(job, ledger=damaged))
    assert ledger["remainder"]["seconds"] > 1.0
    assert "decode" not in ledger["nodes"]


def test_a_run_that_died_is_told_by_whoever_took_its_job_back(client: redis.Redis) -> None:
    jobs, runs = Jobs(client), Runs(client)
    new = new_job()
    jobs.accept(new)
    lost = runs.take("prefill", "prefill-one", "prefill:m5")
    assert lost is not None
    assert runs.reclaim(lost, dead=True) == "requeued"
    again = runs.take("prefill", "prefill-two", "prefill:m5")
    assert again is not None
    found = ledger_of(jobs.get(new.id), time.time())
    assert [span["stage"] for span in found["spans"]] == ["wait", "lost run", "wait", "running"]
    assert found["runs"][0]["outcome"].startswith("lost")
    assert found["runs"][0]["node"] == "m5"
    assert not found["whole"]


def test_a_wait_for_no_prefill_node_is_explained(client: redis.Redis) -> None:
    """It ends without a run: the decode node takes the job over, here for the second time."""
    jobs, runs = Jobs(client), Runs(client)
    new = new_job()
    jobs.accept(new)
    early = str(jobs.get(new.id).created_at - 8.0)  # as if it had come so much earlier
    client.hset(f"tandem:job:{new.id}", mapping={"created_at": early, "enqueued_at": early})
    assert runs.take_over("local", 1) == 1
    live = jobs.get(new.id)
    assert [span["stage"] for span in ledger_of(live, live.enqueued_at + 1.0)["spans"]] == [
        "no prefill node", "wait",
    ]  # fmt: skip
    job = runs.take("decode", "decode-one", "decode:m4")
    assert job is not None
    found = ledger_of(jobs.get(new.id), job.taken_at)
    assert found["remainder"]["within"], found["remainder"]
    row = next(row for row in found["stages"] if row["stage"] == "no prefill node")
    assert row["lane"] == "queue"
    assert row["own_seconds"] == pytest.approx(job.enqueued_at - job.created_at, abs=1e-3)
    assert row["own_seconds"] > 8.0
    assert "queue" not in found["bytes"]["control"]["round_trips_by_lane"]

    runs.clock.ask(client, 3)
    notes = Notes().packed(
        runs.clock, lane="decode", node="m4", queue="decode", outcome="sent back",
        enqueued=job.enqueued_at, taken=job.taken_at,
    )  # fmt: skip
    assert runs.send_back(job, ledger=notes) == "requeued"
    before = jobs.get(new.id).enqueued_at
    assert runs.take_over("local", 1) == 1
    after = jobs.get(new.id)
    spans = ledger_of(after, after.enqueued_at)["spans"]
    assert [span["stage"] for span in spans].count("no prefill node") == 2
    tell = [span for span in spans if span["stage"] == "tell"]
    end = ledger_of(after)["arrived_at"] + sum(tell[0][part] for part in ("start", "seconds"))
    assert end == pytest.approx(before, abs=1e-3), "the second wait is none of the telling"


def test_notes_of_an_acceptance_travel_with_it(client: redis.Redis) -> None:
    jobs = Jobs(client)
    notes = Notes()
    notes.fork("way", "this", "because")
    jobs.clock.ask(client, 3)
    new = new_job()
    packed = notes.packed(jobs.clock, lane="api", node="n")
    jobs.accept(dataclasses.replace(new, ledger=packed))
    job = jobs.get(new.id)
    assert job.ledger == {"api": packed}
    assert job.enqueued_at == pytest.approx(job.created_at)
    found = ledger_of(job, job.created_at + 3.0)
    assert found["forks"] == [
        {"fork": "way", "took": "this", "why": "because", "lane": "api", "node": "n"}
    ]
    assert found["stages"][-1]["stage"] == "wait"
    assert found["stages"][-1]["seconds"] == pytest.approx(3.0, abs=1e-3)
    assert isinstance(new, NewJob)


def test_a_ledger_is_the_same_from_the_store() -> None:
    job = whole_job()
    run = job.ledger["r2"]
    taken = dataclasses.replace(job, ledger={k: v for k, v in job.ledger.items() if k != "r2"})
    kept = freeze(taken, Result(path={"path": "cold"}), run, 104.0, {"save": run})
    bare = job_with({})
    again = thaw(bare, kept)
    assert set(again.ledger) == {"api", "r1", "r2", "save"}
    before, after = ledger_of(job), ledger_of(again)
    assert after["path"] == "cold"
    for part in ("seconds", "nodes", "runs"):
        if part != "runs":
            assert after[part] == before[part]
    assert thaw(bare, b"\xc1") == bare
    assert thaw(bare, b"\x80") == bare


def test_a_save_that_is_over_before_its_turns_end_is_told_is_kept(
    client: redis.Redis, tmp_path: Path
) -> None:
    """A turn is durable, and may be saved, before Redis knows that its job has ended."""
    job, clock = whole_job(), Clock()
    clock.ask(client, 1)
    store = Store.open(tmp_path / "store", 1 << 26)
    store.put_turn(Turn(job.id, "conv_" + "1" * 32, prompt_ids=[1], output_ids=[2]))
    ledgers = Ledgers(store, clock, "n")
    ledgers.saved(Saved(job.id, 2, SaveReport(77, 1, 0, 0, 0.1), None, time.monotonic()))
    ledgers.ended(job, Result(path={"path": "cold"}), job.ledger["r2"], 104.0)
    ledgers.write(ledgers.waiting())
    turn = store.get_turn(job.id)
    store.close()
    assert turn is not None
    assert ledger_of(thaw(job_with({}), turn.ledger))["bytes"]["store_written"] == 77


@pytest.mark.parametrize(
    ("trips", "late", "within"),
    [
        (16 + 2 * 4, None, True),
        (16 + 2 * 4 + 1, None, False),
        (16 + 2 * 4 + 3, {"stayed": True, "tokens": 2, "seconds": 60.0}, True),
        (16 + 2 * 4 + 4, {"stayed": True, "tokens": 2, "seconds": 60.0}, False),
        (16 + 2 * 4 + 3, {"stayed": True, "tokens": 50, "seconds": 0.05}, True),
        (16 + 2 * 4 + 4, {"stayed": True, "tokens": 50, "seconds": 0.05}, False),
    ],
)
def test_a_budget_is_made_of_what_a_request_needs(
    trips: int, late: dict[str, Any] | None, within: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, clock = Notes(), Clock()
    now = time.monotonic()
    clock.sample(now, 101.0, now)
    notes.add("decode", now - 0.5, now)
    notes.meter.work["redis_connections"] = 2
    notes.meter.trips = trips - 1  # and the step that carries the notes
    piece = notes.packed(clock, lane="decode", enqueued=100.0, taken=100.2)
    job = dataclasses.replace(job_with({"r2": piece}), handoff={"late": late} if late else None)
    ledger = ledger_of(job)
    control = ledger["bytes"]["control"]
    assert control["round_trips"] == trips
    assert control["budget"]["round_trips"] == trips - (not within)
    assert control["budget"]["within"] is within
    explain.show(Console(width=120), ledger)
    assert ("over budget" in capsys.readouterr().out) is not within


def test_scripts_are_with_the_server_before_they_are_called(quiet_url: str) -> None:
    with connect(quiet_url) as server:
        count = scripts.load(server)
        assert count > 15
        assert scripts.load(server) == 0
        payer = meter.Meter()
        with meter.charge(payer):
            Jobs(server).accept(new_job())
        assert payer.sent < len(scripts.source("accept")) / 2


class _Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or "href" in name]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_picture_holds_nothing_but_bars_whatever_the_names_are() -> None:
    evil = '"><script>alert(1)</script>&'
    ledger = ledger_of(whole_job())
    for span in ledger["spans"]:
        span["stage"], span["node"] = evil, evil
    ledger["id"] = evil
    for gap in ledger["remainder"]["gaps"]:
        gap["after"] = evil
    parser = _Parser()
    parser.feed(svg(ledger))
    assert set(parser.tags) == {"svg", "title", "line", "text", "rect"}
    assert any(evil in text for text in parser.text)


@pytest.mark.parametrize("seconds", [0.0, 1e-5, 86_400.0])
def test_any_length_can_be_drawn(seconds: float) -> None:
    ledger = ledger_of(whole_job())
    ledger["seconds"] = seconds
    assert svg(ledger, 300).count("<svg") == 1
    for lane in ("api", "decode"):
        assert len(cells(ledger, lane, 40)) == 40


def test_cells_name_the_stage_that_fills_them() -> None:
    ledger = ledger_of(whole_job())
    row = cells(ledger, "prefill", 60)
    assert row[:23] == [None] * 23
    assert {"prefill"} <= set(row)
