"""Chunk plans and schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefill import (
    MIN_CHUNK,
    SHORT,
    append_schedule,
    ends_of,
    expand_schedule,
    plan,
    plan_through,
)
from scheduler.sections import LEAST_CHUNK


@given(st.integers(0, 1 << 20), st.integers(0, 40_000), st.integers(17, 8192))
def test_plan_covers_the_range_without_a_short_remainder(
    start: int, total: int, chunk: int
) -> None:
    lengths = plan(start, start + total, chunk)
    assert sum(lengths) == total
    assert all(1 <= length <= chunk for length in lengths)
    if total > SHORT:
        assert min(lengths) > SHORT
    else:
        assert lengths == ([total] if total else [])
    assert len(lengths) == -(-total // chunk)


def test_plan_folds_a_short_remainder() -> None:
    assert plan(0, 256 + 4, 256) == [130, 130]
    assert plan(10, 10 + 256 + 9, 256) == [256, 9]
    assert plan(0, 17 + 1, 17) == [9, 9]


def test_the_configuration_takes_no_chunk_that_the_plan_refuses() -> None:
    assert LEAST_CHUNK == MIN_CHUNK


@pytest.mark.parametrize(("start", "stop", "chunk"), [(0, 10, 16), (5, 4, 256)])
def test_plan_refuses(start: int, stop: int, chunk: int) -> None:
    with pytest.raises(ValueError, match=r"chunk|backwards"):
        plan(start, stop, chunk)


@given(st.lists(st.integers(1, 5)))
def test_schedules_expand_to_what_was_appended(lengths: list[int]) -> None:
    schedule: list[list[int]] = []
    for length in lengths:
        append_schedule(schedule, length)
    assert expand_schedule(schedule) == lengths
    assert all(a[0] != b[0] for a, b in itertools.pairwise(schedule))
    assert expand_schedule([*schedule, 7]) == [*lengths, 7]


@pytest.mark.parametrize("cuts", [(), (64,), (40, 100), (0, 200, 500), (100, 40, 40)])
def test_a_forward_ends_at_every_cut(cuts: tuple[int, ...]) -> None:
    lengths = plan_through(0, 200, 64, cuts)
    ends = ends_of(lengths)
    assert ends[-1] == 200
    assert {cut for cut in cuts if 0 < cut < 200} <= set(ends)
    assert max(lengths) <= 64
    if not cuts:
        assert lengths == plan(0, 200, 64)
