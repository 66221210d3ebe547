"""What a prefill worker keeps of unfinished prompts, and for which prompts it is used."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from worker_prefill.parked import Parked


def run(*ids: int, position: int, schedule: Sequence[int] = ()) -> Any:
    """As much of a prefill as matters here."""
    return SimpleNamespace(ids=list(ids), position=position, schedule=list(schedule))


def snapshot(stop: int, nbytes: int, schedule: list[list[int]]) -> Any:
    """As much of a snapshot."""
    header = SimpleNamespace(stop=stop, extra={"schedule": schedule})
    return SimpleNamespace(header=header, payload=SimpleNamespace(nbytes=nbytes))


def test_only_exact_beginnings_are_used_and_the_longest_first() -> None:
    parked = Parked(4, 1000, 60.0)
    short, long = run(1, 2, 3, 4, position=2), run(1, 2, 3, 9, position=3)
    for one in (short, long):
        assert parked.put(one, 10)
    assert parked.take([1, 2]) is None, "its last token has to be computed"
    assert parked.take([1, 5, 3, 4]) is None
    assert parked.take([1, 2, 3, 7]) is long
    assert parked.take([1, 2, 3, 7]) is short
    assert parked.take([1, 2, 3, 7]) is None


def test_bounds_of_number_bytes_and_time() -> None:
    now = [0.0]
    parked = Parked(2, 100, 60.0, clock=lambda: now[0])
    assert not parked.put(run(1, 2, position=0), 1), "nothing computed"
    assert not parked.put(run(1, 2, position=1), 101), "too large"
    runs = [run(k, 2, position=1) for k in range(3)]
    for one in runs:
        assert parked.put(one, 40)
    assert (len(parked), parked.nbytes) == (2, 80)
    assert parked.take([0, 2]) is None, "the oldest gave way"
    assert parked.put(run(7, 2, position=1), 90)
    assert (len(parked), parked.nbytes) == (1, 90)
    now[0] = 61.0
    assert parked.take([7, 2]) is None
    assert len(parked) == 0


def test_nothing_is_kept_where_nothing_may_be() -> None:
    parked = Parked(0, 0, 0.0)
    assert parked.limit == 0
    assert not parked.put(run(1, 2, position=1), 0)


def test_a_snapshot_that_was_left_is_claimed_once_by_who_stands_on_it() -> None:
    parked = Parked(4, 100, 60.0)
    ids = [1, 2, 3, 4, 5, 6]
    near, far = snapshot(2, 10, [[2, 1]]), snapshot(4, 10, [[2, 2]])
    parked.leave([near, far], ids)
    assert (len(parked), parked.nbytes) == (0, 20)
    fitting = run(*ids, position=5, schedule=[2, 2, 1])
    assert parked.claim(fitting, "", ()) == []
    assert parked.claim(fitting, "bert", (2, 4)) == []
    assert parked.claim(run(1, 9, 3, 4, 5, 6, position=5, schedule=[2, 2, 1]), "", (2, 4)) == []
    assert parked.claim(run(*ids, position=5, schedule=[4, 1]), "", (2, 4)) == [], "other forwards"
    assert parked.claim(run(*ids, position=3, schedule=[2, 1]), "", (2, 4)) == [near]
    assert parked.claim(fitting, "", (2, 4)) == [far]
    assert parked.claim(fitting, "", (2, 4)) == []
    assert parked.nbytes == 0


def test_snapshots_that_were_left_give_way_and_expire() -> None:
    now = [0.0]
    parked = Parked(2, 100, 60.0, clock=lambda: now[0])
    ids, fitting = [1, 2, 3], run(1, 2, 3, position=2, schedule=[1, 1])
    first, second = snapshot(1, 40, [[1, 1]]), snapshot(2, 50, [[1, 2]])
    parked.leave([first, second, snapshot(1, 11, [[1, 1]])], ids)
    assert parked.nbytes == 90, "there was no room for the third"
    assert parked.put(run(7, 8, position=1), 50)
    assert parked.nbytes == 100
    assert parked.claim(fitting, "", (1, 2)) == [second]
    parked.leave([second], ids)
    now[0] = 61.0
    assert parked.claim(fitting, "", (1, 2)) == []
    assert parked.nbytes == 0
    nowhere = Parked(0, 0, 0.0)
    nowhere.leave([first], ids)
    assert nowhere.nbytes == 0
