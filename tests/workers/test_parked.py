"""What a prefill worker keeps of unfinished prompts, and for which prompts it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from worker_prefill.parked import Parked


def run(*ids: int, position: int) -> Any:
    """As much of a prefill as matters here."""
    return SimpleNamespace(ids=list(ids), position=position)


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
