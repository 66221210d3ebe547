"""A cache that is always full, under concurrent load, with the saver and the evictor at work."""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Node, asking, make_job

from engine.model import Model
from scheduler.execution import Execution
from scheduler.record import Job

TURNS = 200 if os.environ.get("TANDEM_SOAK") else 48
CONVERSATIONS, ROWS = 12, 8
STALL = 120.0


@pytest.fixture
def watchdog() -> Iterator[None]:
    """Says where everybody stands if nothing moves any more, and ends the process."""
    faulthandler.dump_traceback_later(STALL * 4, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_eight_rows_over_a_memory_for_four(
    loaded: Model, words: Any, tmp_path: Path, watchdog: None
) -> None:
    chance = random.Random(5)
    node = Node(loaded, words, tmp_path, store={"idle_seconds": 3600})
    probe = _first(0)
    node.answer(probe)
    node.memory.limit = 4 * node.memory.used
    last: dict[int, Job] = {}
    running: dict[Execution, int] = {}
    turns = 0
    try:
        while turns < TURNS or running:
            free = [c for c in range(CONVERSATIONS) if c not in running.values()]
            while turns < TURNS and len(running) < ROWS and free and node.engine.free() > 0:
                number = free.pop(chance.randrange(len(free)))
                before = last.get(number)
                job = _first(number) if before is None else _following(node, before)
                execution = node.execution(job)
                node.engine.add(execution, job)
                running[execution] = number
                turns += 1
            for finished in node.engine.step():
                assert finished.error is None, finished.error
                if finished.commit is not None:
                    finished.commit()
                last[running.pop(finished.execution)] = finished.execution.job
            node.engine.kept.next_look = 0.0
            if not running:
                node.engine.idle()
        for job in last.values():
            assert node.said(job) == node.oracle(job), "no conversation has another's state"
        node.engine.drain()
        assert node.memory.used == 0, "everything is given back"
    finally:
        node.close()


def _first(number: int) -> Job:
    ids = [20 + (number * 53 + i * 17 + i * i) % 380 for i in range(40)]
    return make_job(ids, request=asking(4))


def _following(node: Node, job: Job) -> Job:
    past = node.store.turn_ids(job.id)
    return make_job([*past, 31, 77, 123], previous=job.id, request=asking(4))
