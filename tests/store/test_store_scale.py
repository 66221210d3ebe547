"""Filling a store over and over, and looking things up among very many."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_states import MODEL, conversation_id, make_state, make_turn

from store.store import Store

SOAK = bool(os.environ.get("TANDEM_SOAK"))
SIZE = (1024 if SOAK else 96) << 20
FILLS = 10 if SOAK else 3
CONVERSATIONS = 1_000_000 if SOAK else 20_000


def test_filled_to_its_cap_again_and_again(tmp_path: Path) -> None:
    """States of random sizes: never a full map, and (soak) saves do not become slower."""
    store = Store.open(tmp_path / "store", SIZE)
    chance = random.Random(3)
    written = 0
    rates: list[list[float]] = [[] for _ in range(FILLS)]
    while written < FILLS * SIZE:
        conversation, parent, held = conversation_id(), None, 0
        for _ in range(chance.randint(1, 4)):
            count = chance.randint(20, 120)
            ids = range(held, held + count)
            turn = make_turn(ids[:-1], ids[-1:], conversation=conversation, parent=parent)
            store.put_turn(turn)
            start = max(0, held - 1) // 16 * 16 if parent and store.find_state(parent) else 0
            state = make_state(
                range(held + count - 1),
                start=start,
                row_bytes=20_000,
                snapshot_bytes=chance.choice([500, 300_000, 4_000_000, 9_000_000]),
                seed=conversation.encode(),
            )
            report = store.save_state(turn.id, *state)
            if report.bytes_written:
                fill = min(FILLS - 1, written // SIZE)
                rates[fill].append(report.seconds / report.bytes_written)
            written += report.bytes_written
            held, parent = held + count, turn.id
            assert store.stats()["live_share"] <= 0.88
    assert store.evictor.evicted > 0
    report = store.check()
    assert report.clean, report.problems
    medians = [statistics.median(fill) for fill in rates]
    print("seconds per GB by fill:", [round(one * 1e9, 2) for one in medians])
    if SOAK:
        assert medians[-1] <= 1.5 * medians[1]
    store.close()


@pytest.mark.skipif(sys.platform != "linux", reason="holes are made by fallocate")
def test_as_many_pages_as_a_large_store_has(tmp_path: Path) -> None:
    """300 GB turned over (soak), on a file of holes: never a full map, and saves as fast as before.

    What is compared is the CPU that a value takes, in which no other process has a part.
    """
    gigabytes, turnovers = (300, 2.2) if SOAK else (3, 1.5)
    script = Path(__file__).with_name("scaled_fill.py")
    run = subprocess.run(
        [sys.executable, "-P", str(script), str(tmp_path), str(gigabytes), str(turnovers)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert run.returncode == 0, run.stderr
    *parts, end = [json.loads(line) for line in run.stdout.splitlines()]
    print(run.stdout)
    assert end["clean"]
    assert parts[-1]["evicted"] > 0
    assert all(part["map_full"] == 0 for part in parts)
    assert max(part["live_share"] for part in parts) <= 0.88
    assert parts[-1]["live_share"] > 0.8
    turned = [part for part in parts if part["turned"] > 1]
    fifth = len(turned) // 5
    if SOAK:
        first = statistics.median(part["cpu_ms"] for part in turned[:fifth])
        assert statistics.median(part["cpu_ms"] for part in turned[-fifth:]) <= 1.5 * first


def test_looking_up_among_very_many(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 4 << 30)

    def some(txn: Any, first: int, last: int) -> None:
        for number in range(first, last):
            store.conversations.create(
                txn, f"conv_{number:032x}", f"owner{number % 1000}", 1e9 + number, {"n": "1"}, ()
            )
            turn = make_turn([number], [1], conversation=f"conv_{number:032x}")
            turn.id = f"resp_{number:032x}"
            assert store.turns.put(txn, turn)
            store.conversations.add_turn(txn, turn)

    for first in range(0, CONVERSATIONS, 10_000):
        store.environment.write(lambda txn, first=first: some(txn, first, first + 10_000))
    chance = random.Random(1)
    for _ in range(200):
        number = chance.randrange(CONVERSATIONS)
        store.save_state(
            f"resp_{number:032x}", *make_state([number], row_bytes=100, snapshot_bytes=400)
        )
    times = []
    for _ in range(2000):
        number = chance.randrange(CONVERSATIONS)
        began = time.perf_counter()
        record = store.get_conversation(f"conv_{number:032x}")
        store.find_state(f"resp_{number:032x}")
        times.append(time.perf_counter() - began)
        assert record is not None
        assert record["head"] == f"resp_{number:032x}"
    p99 = sorted(times)[int(len(times) * 0.99)]
    print(f"{CONVERSATIONS} conversations: lookup p99 {p99 * 1000:.3f} ms, {store.stats()}")
    page = store.list_conversations("owner7", limit=50)
    assert len(page) == min(50, CONVERSATIONS // 1000)
    assert {record["owner"] for record in page} == {"owner7"}
    assert store.load_state("resp_" + "f" * 32, MODEL) is None
    if SOAK:
        assert p99 < 0.001
    store.close()


@pytest.mark.skipif(not SOAK, reason="minutes: part of make soak")
def test_opening_a_large_store_takes_no_time(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 4 << 30)
    for number in range(200):
        turn = make_turn(range(400), [1], conversation=f"conv_{number}")
        store.put_turn(turn)
        state = make_state(range(400), row_bytes=20_000, seed=bytes([number]))
        store.save_state(turn.id, *state)
    store.close()
    began = time.perf_counter()
    store = Store.open(tmp_path / "store", 4 << 30)
    seconds = time.perf_counter() - began
    print(f"opened in {seconds:.3f} s")
    assert seconds < 1
    store.close()
