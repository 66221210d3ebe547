"""A full disk, a machine without memory: answers go on, the store stays whole, it is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import LONG, Node, asking, make_job
from small_disk import Disk, small_disk

from engine.model import Model
from engine.sampling import SamplingParams
from engine.solo import answer
from scheduler.record import Job
from worker_decode.pressure import linux_pressed


@pytest.fixture
def disk() -> Iterator[Disk]:
    with small_disk(40) as made:
        yield made


def job(number: int, **fields: Any) -> Job:
    ids = [20 + (number * 53 + i * 17 + i * i) % 380 for i in range(40)]
    return make_job(ids, request=asking(4), **fields)


def alone(node: Node, asked: Job) -> list[int]:
    """What one process says that has no store at all."""
    params = SamplingParams(max_tokens=4, stop_ids=node.model.eos_ids)
    return answer(node.model, asked.prompt_ids, (), params).tokens


def test_a_full_disk_costs_records_and_states_and_no_answer(
    loaded: Model, words: Any, disk: Disk
) -> None:
    node = Node(loaded, words, disk.path)
    try:
        before = job(1)
        node.answer(before)
        node.settle()
        assert node.engine.facts()["trouble"] == ""
        disk.fill()
        during = job(2)
        finished = node.run(node.execution(during))
        assert finished.commit is not None
        assert finished.commit() == {"recorded": False}
        assert node.said(during) == alone(node, during)
        assert "disk is full" in node.engine.facts()["trouble"]
        node.settle()  # its state leaves memory: without a record nobody can ask for it
        assert node.store.get_turn(during.id) is None
        assert node.store.check().clean
        # What was stored before is continued, bit for bit.
        again = make_job(
            [*node.store.turn_ids(before.id), 31, 77], previous=before.id, request=asking(4)
        )
        continued = node.run(node.execution(again))
        assert continued.commit is not None
        assert continued.commit() == {"recorded": False}
        assert node.said(again) == alone(node, again)
        disk.free()
        after = job(3)
        assert node.answer(after).error is None
        node.settle()
        assert node.store.find_state(after.id) is not None
        assert node.engine.facts()["trouble"] == ""
        assert node.store.check().clean
    finally:
        node.close()


def test_below_the_reserve_states_wait_and_records_do_not(
    loaded: Model, words: Any, tmp_path: Path
) -> None:
    node = Node(loaded, words, tmp_path)
    try:
        node.store.environment.reserve_bytes = 1 << 60  # as if the disk were nearly full
        asked = job(1)
        node.answer(asked)
        node.engine.kept.next_look = 0.0
        node.engine.idle()
        assert node.engine.kept.saver.close(LONG)
        node.engine.kept.collect()
        assert "not saved" in node.engine.facts()["trouble"]
        assert node.store.get_turn(asked.id) is not None
        assert node.store.find_state(asked.id) is None
        assert node.store.check().clean
    finally:
        node.store.close()


def test_short_of_memory_idle_conversations_leave_at_once(
    loaded: Model, words: Any, tmp_path: Path
) -> None:
    node = Node(loaded, words, tmp_path, store={"idle_seconds": 3600})
    try:
        short = False
        node.engine.kept.hardship.pressed = lambda: short
        node.answer(job(1))
        node.engine.kept.next_look = node.engine.kept.next_word = 0.0
        node.engine.idle()
        assert node.engine.facts()["hot"] == 1
        short = True
        node.engine.kept.next_look = node.engine.kept.next_word = 0.0
        node.engine.idle()
        assert "short of memory" in node.engine.facts()["trouble"]
        node.settle()
        assert node.memory.used == 0
        short = False
        node.engine.kept.next_look = node.engine.kept.next_word = 0.0
        node.engine.idle()
        assert node.engine.facts()["trouble"] == ""
    finally:
        node.close()


def test_what_linux_says_of_memory() -> None:
    text = "MemTotal:       1000 kB\nMemFree:   5 kB\nMemAvailable:   {} kB\n"
    assert not linux_pressed(text.format(300))
    assert linux_pressed(text.format(20))
    assert not linux_pressed("nothing of the kind")
