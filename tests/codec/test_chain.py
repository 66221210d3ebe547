"""Chained hashes name the ids, the model and everything else that decides rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.codec.chain import Chain, Mark, boundaries, image_mark
from store.codec.header import CodecError, chain, root

SEED = root(b"m" * 16)
ids_lists = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=60)


@given(ids_lists, st.integers(1, 17))
def test_positions_agree_with_blocks(ids: list[int], block: int) -> None:
    links = list(boundaries(SEED, ids, block))
    whole = Chain(SEED, ids, block)
    assert [whole.at(index * block) for index in range(len(links))] == links
    for position in range(len(ids) + 1):
        start = position - position % block
        expected = chain(whole.at(start), ids[start:position]) if position % block else None
        assert whole.at(position) == (expected or links[position // block])


@given(ids_lists, st.integers(1, 17), st.data())
def test_a_chain_goes_on_from_any_boundary(ids: list[int], block: int, data: st.DataObject) -> None:
    whole = Chain(SEED, ids, block)
    start = data.draw(st.integers(0, len(ids) // block)) * block
    later = Chain(SEED, ids, block, known=(start, whole.at(start)))
    assert later.at(len(ids)) == whole.at(len(ids))


@given(ids_lists, st.integers(1, 17), st.data())
def test_any_other_id_gives_another_chain_from_there_on(
    ids: list[int], block: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids]
    other[at] = (other[at] + 1) % (1 << 32)
    one, two = Chain(SEED, ids, block), Chain(SEED, other, block)
    assert all(one.at(n) == two.at(n) for n in range(at + 1))
    assert all(one.at(n) != two.at(n) for n in range(at + 1, len(ids) + 1))


def test_models_extras_and_lengths_differ() -> None:
    assert root(b"m" * 16) != root(b"n" * 16)
    assert root(b"m" * 16) != root(b"m" * 16, b"adapter")
    assert chain(SEED, [1, 2]) != chain(SEED, [1, 2], b"extra")
    assert chain(SEED, [1]) != chain(SEED, [1, 0])
    assert chain(chain(SEED, [1]), [2]) != chain(SEED, [1, 2])


def test_a_mark_counts_from_its_position_on() -> None:
    ids = [5] * 40
    plain = Chain(SEED, ids, 8)
    for position in (0, 7, 8, 20, 39):
        marked = Chain(SEED, ids, 8, [Mark(position, b"x" * 32)])
        for n in range(41):
            assert (marked.at(n) == plain.at(n)) == (n <= position)


def test_marks_differ_by_content_place_shape_and_dtype() -> None:
    pixels = bytes(48)
    marks = [
        image_mark(3, pixels, (4, 4, 3), "uint8"),
        image_mark(4, pixels, (4, 4, 3), "uint8"),
        image_mark(3, pixels, (2, 8, 3), "uint8"),
        image_mark(3, pixels, (4, 4, 3), "int8"),
        image_mark(3, b"\1" + pixels[1:], (4, 4, 3), "uint8"),
    ]
    assert len({Chain(SEED, [1] * 10, 16, [mark]).at(10) for mark in marks}) == len(marks)
    both = Chain(SEED, [1] * 10, 16, marks[:2]).at(10)
    assert both == Chain(SEED, [1] * 10, 16, marks[1::-1]).at(10)


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["1"], [None], [1.5]])
def test_ids_that_are_none_are_refused(ids: list[int]) -> None:
    with pytest.raises(CodecError):
        chain(SEED, ids)


def test_positions_outside_are_refused() -> None:
    whole = Chain(SEED, [1, 2, 3], 2)
    for position in (-1, 4):
        with pytest.raises(CodecError):
            whole.at(position)
    with pytest.raises(CodecError):
        Chain(SEED, [1, 2, 3], 2, known=(1, SEED))
    with pytest.raises(CodecError):
        Chain(SEED, [1] * 9, 2, known=(4, SEED)).at(2)
    with pytest.raises(CodecError):
        Chain(SEED, [], 0)
    with pytest.raises(CodecError):
        chain(b"short", [1])
