"""Memory that is promised before it is used."""

from __future__ import annotations

import threading

import pytest
from redis_kit import eventually

from worker_decode.memory import Memory


def test_promises_are_kept_within_the_limit() -> None:
    memory = Memory(100)
    assert memory.reserve(60)
    assert not memory.reserve(41)
    assert memory.reserve(40)
    assert (memory.used, memory.wanted) == (100, 0)
    memory.release(60)
    assert not memory.reserve(101, 60.0)  # never fits, so nobody waits for it
    memory.release(40)
    assert memory.used == 0


def test_what_exists_already_is_counted_beyond_the_limit() -> None:
    memory = Memory(100)
    memory.take(150)
    assert memory.used == 150
    assert not memory.reserve(1)
    memory.release(150)
    assert memory.reserve(100)


def test_more_than_is_used_cannot_be_given_back() -> None:
    memory = Memory(100)
    memory.take(10)
    with pytest.raises(ValueError, match="11 bytes given back of 10"):
        memory.release(11)
    assert memory.used == 10


def test_who_waits_is_seen_and_served() -> None:
    memory = Memory(100)
    assert memory.reserve(90)
    got: list[bool] = []
    waiters = [
        threading.Thread(target=lambda size=size: got.append(memory.reserve(size, 60.0)))
        for size in (30, 20)
    ]
    for waiter in waiters:
        waiter.start()
    eventually(lambda: memory.wanted == 40, "nobody is seen waiting")
    memory.release(90)
    for waiter in waiters:
        waiter.join()
    assert (got, memory.used, memory.wanted) == ([True, True], 50, 0)


def test_giving_up_leaves_nothing() -> None:
    memory = Memory(100)
    memory.take(100)
    assert not memory.reserve(1, 0.01)
    assert (memory.used, memory.wanted) == (100, 0)


def test_many_threads_never_exceed_the_limit() -> None:
    memory = Memory(10)
    seen: list[int] = []

    def work() -> None:
        for size in (1, 4, 7, 10, 3):
            assert memory.reserve(size, 60.0)
            seen.append(memory.used)
            memory.release(size)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40
    assert max(seen) <= 10
    assert memory.used == 0
