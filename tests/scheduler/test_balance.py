"""Which conversations should lie on another decode node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.balance import HIGH, Holder, Kept, Move, plan

FULL = Holder("full", 900, 1000)
EMPTY = Holder("empty", 100, 1000)


def some(count: int = 20, nbytes: int = 40, node: str = "full") -> list[Kept]:
    """The later its number, the later it was used."""
    return [Kept(f"conv_{k:02}", node, nbytes, 100.0 + k) for k in range(count)]


def names(moves: Sequence[Move]) -> list[str]:
    return [move.kept.conversation for move in moves]


def test_the_least_recently_used_go_until_the_stores_are_even() -> None:
    moves = plan([FULL, EMPTY], reversed(some()), 10**6)
    assert {move.to for move in moves} == {"empty"}
    # 900 and 100: after ten of 40, both have 500.
    assert names(moves) == [f"conv_{k:02}" for k in range(10)]


def test_what_has_to_stay_stays() -> None:
    kept = some(6)
    kept[0] = replace(kept[0], stays=True)
    kept[2] = replace(kept[2], nbytes=0)
    assert names(plan([FULL, EMPTY], kept, 10**6)) == ["conv_01", "conv_03", "conv_04", "conv_05"]


def test_no_more_than_the_limit() -> None:
    assert names(plan([FULL, EMPTY], some(), 100)) == ["conv_00", "conv_01"]
    large = [replace(some(1)[0], nbytes=101), *some(3)[1:]]
    assert names(plan([FULL, EMPTY], large, 100)) == ["conv_01", "conv_02"]


def test_a_store_that_is_not_full_gives_nothing_away() -> None:
    half = replace(FULL, stored=500)
    assert plan([half, EMPTY], some(), 10**6) == []
    assert names(plan([half, EMPTY], some(), 10**6, above=0.4)) == ["conv_00", "conv_01", "conv_02"]
    assert names(plan([FULL, EMPTY], some(), 10**6, above=0.85)) == ["conv_00", "conv_01"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"takes": False}, "takes no new conversations"),
        ({"rows": 8, "slots": 8}, "8 of 8 slots answer"),
        ({"memory": 95, "memory_limit": 100}, "95% of its memory is in use"),
    ],
)
def test_a_node_that_has_its_hands_full_is_given_nothing(change: dict[str, Any], why: str) -> None:
    busy = replace(EMPTY, **change)
    assert busy.why_not == why
    assert plan([FULL, busy], some(), 10**6) == []
    other = Holder("other", 700, 1000)
    assert {move.to for move in plan([FULL, busy, other], some(), 10**6)} == {"other"}


def test_another_models_node_and_even_stores_get_nothing() -> None:
    assert plan([FULL, replace(EMPTY, model="g")], some(), 10**6) == []
    assert plan([FULL, replace(FULL, name="b", stored=860)], some(), 10**6) == []
    assert plan([FULL], some(), 10**6) == []
    assert plan([FULL, EMPTY], some(3, node="gone"), 10**6) == []


def test_a_small_store_is_not_overfilled() -> None:
    small = Holder("small", 0, 100)
    moves = plan([FULL, small], some(), 10**6)
    assert len(moves) == 2, "a third would fill it beyond what eviction leaves alone"


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Holder], list[Kept]]:
    """Nodes of several sizes and models, and conversations that are part of what they store."""
    holders, kept = [], []
    for number in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(0, 60), max_size=12))
        size = draw(st.integers(max(1, sum(sizes)), 1000))
        stored = draw(st.integers(sum(sizes), size))
        slots = draw(st.integers(0, 3))
        holders.append(
            Holder(
                f"n{number}", stored, size,
                draw(st.integers(0, 100)), draw(st.sampled_from([0, 100])),
                draw(st.integers(0, slots)), slots,
                draw(st.sampled_from("fffg")), draw(st.sampled_from([True, True, True, False])),
            )
        )  # fmt: skip
        kept += [
            Kept(f"c{number}-{k}", f"n{number}", nbytes, draw(st.integers(0, 9)),
                 draw(st.sampled_from([False, False, True])))
            for k, nbytes in enumerate(sizes)
        ]  # fmt: skip
    return holders, kept


def uneven(holders: Sequence[Holder]) -> float:
    """What every move makes smaller: shares squared, by size."""
    return sum(one.stored**2 / one.size for one in holders)


def after(holders: Sequence[Holder], move: Move) -> list[Holder]:
    change = {move.kept.node: -move.kept.nbytes, move.to: move.kept.nbytes}
    return [replace(one, stored=one.stored + change.get(one.name, 0)) for one in holders]


@settings(max_examples=300, deadline=None)
@given(clusters(), st.integers(0, 400), st.sampled_from([0.0, 0.3, 0.5]))
def test_no_plan_makes_anything_worse(
    cluster: tuple[list[Holder], list[Kept]], limit: int, above: float
) -> None:
    holders, kept = cluster
    moves = plan(holders, kept, limit, above)
    assert sum(move.kept.nbytes for move in moves) <= limit
    assert len(set(names(moves))) == len(moves)
    assert all(a.kept.used <= b.kept.used for a, b in pairwise(moves))
    for move in moves:
        by_name = {one.name: one for one in holders}
        came, to = by_name[move.kept.node], by_name[move.to]
        assert not move.kept.stays
        assert (to.why_not, to.model) == ("", came.model)
        assert to is not came
        assert came.stored > above * came.size
        then = after(holders, move)
        assert uneven(then) < uneven(holders)
        worst = max(one.stored / one.size for one in holders)
        assert max(one.stored / one.size for one in then) <= worst
        given_to = next(one for one in then if one.name == move.to)
        assert given_to.stored <= HIGH * given_to.size
        holders = then


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_planning_again_comes_to_an_end(cluster: tuple[list[Holder], list[Kept]]) -> None:
    holders, kept = cluster
    for _ in range(50):
        moves = plan(holders, kept, 10**6, 0.0)
        if not moves:
            return
        for move in moves:
            holders = after(holders, move)
        gone = {move.kept.conversation: move.to for move in moves}
        kept = [replace(one, node=gone.get(one.conversation, one.node)) for one in kept]
    raise AssertionError("it goes on for ever")
