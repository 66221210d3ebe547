"""Copies on several threads: all are done, the caller works too, and a failure ends the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from store.codec import memory

LARGE = 1 << 30


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_task_runs_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_THREADS", threads)
    done: list[int] = []
    memory.run_all([lambda number=number: done.append(number) for number in range(100)], LARGE)
    assert sorted(done) == list(range(100))


def test_the_caller_takes_tasks_while_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_THREADS", 2)
    together = threading.Barrier(2, timeout=60)
    names: list[str] = []

    def meet() -> None:
        together.wait()
        names.append(threading.current_thread().name)

    memory.run_all([meet, meet], LARGE)
    assert threading.current_thread().name in names
    assert len(set(names)) == 2


def test_the_first_failure_is_raised_when_nothing_runs_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_THREADS", 2)
    together = threading.Barrier(2, timeout=60)
    left: list[int] = []
    ended: list[bool] = []

    def fail() -> None:
        together.wait()
        raise OSError("broken")

    def slow() -> None:
        together.wait()  # `running` is there: its `join` runs one of the two
        deadline = time.monotonic() + 60
        while not running.stopped and time.monotonic() < deadline:
            time.sleep(0.001)
        ended.append(running.stopped)

    running = memory.Running([fail, slow, *[lambda: left.append(1)] * 5], 2)
    with pytest.raises(OSError, match="broken"):
        running.join()
    assert ended == [True]
    assert not left


@pytest.mark.parametrize("threads", [1, 3])
def test_tasks_are_drawn_one_at_a_time_and_in_order(threads: int) -> None:
    drawing = threading.Lock()
    drawn: list[int] = []
    done: list[int] = []

    def tasks() -> Iterator[Callable[[], object]]:
        for number in range(200):
            assert drawing.acquire(blocking=False), "two threads draw at once"
            drawn.append(number)
            drawing.release()
            yield lambda number=number: done.append(number)

    memory.Running(tasks(), threads).join()
    assert drawn == list(range(200))
    assert sorted(done) == drawn


def test_what_drawing_raises_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def tasks() -> Iterator[Callable[[], object]]:
        yield lambda: done.append(1)
        raise OSError("nothing more can be drawn")

    with pytest.raises(OSError, match="nothing more"):
        memory.Running(tasks(), 2).join()
    assert done == [1]
