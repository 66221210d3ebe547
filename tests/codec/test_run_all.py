"""Copies on several threads: all are done, the caller works too, and a failure ends the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

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


class Told(list[Callable[[], object]]):
    """Tasks that tell when the last one was taken."""

    def __init__(self, tasks: Sequence[Callable[[], object]]) -> None:
        super().__init__(tasks)
        self.gone = threading.Event()

    def __iter__(self) -> Iterator[Callable[[], object]]:
        given = super().__iter__()
        told = self

        class Giving:
            def __iter__(self) -> Giving:
                return self

            def __next__(self) -> Callable[[], object]:
                try:
                    return next(given)
                except StopIteration:
                    told.gone.set()
                    raise

        return Giving()


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
        together.wait()
        ended.append(tasks.gone.wait(60))

    tasks = Told([fail, slow, *[lambda: left.append(1)] * 5])
    with pytest.raises(OSError, match="broken"):
        memory.run_all(tasks, LARGE)
    assert ended == [True]
    assert not left
