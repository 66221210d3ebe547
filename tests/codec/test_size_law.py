"""The real GLM-5.3-Flash configuration, real classes, no weights: bytes are what the law says."""

from __future__ import annotations

from typing import Any

import pytest

from store.codec import reference
from store.codec.header import Piece
from store.codec.layout import VALUE_BYTES, Layout
from store.codec.pack import Exporter

LENGTHS = (64, 63, 1000, 3000)


def pieces_of(layout: Layout, caches: Any, tokens: int) -> list[Piece]:
    exporter = Exporter(layout, list(range(tokens)))
    return [*exporter.rows(caches, tokens, last=True), exporter.snapshot(caches)]


@pytest.fixture(scope="module", params=[16, 4])
def state(request: pytest.FixtureRequest) -> tuple[int, Layout, list[Any]]:
    pool = request.param
    caches = reference.fresh(pool)
    reference.fill(caches, max(LENGTHS))
    return pool, Layout.of(caches, reference.MODEL_TYPE), caches


def test_the_law_is_the_one_written_down() -> None:
    for pool in (16, 4):
        for tokens in (0, 16, 17_500 - 17_500 % pool, 1 << 20):
            plain = 147_619_840 + 11 * (1025 + 256 / pool) * tokens
            assert reference.law(tokens, pool) == plain
    assert round(reference.law(17_500, 16) / 1e6, 1) == 348.0
    assert round(reference.law(17_500, 4) / 1e6, 1) == 357.3


@pytest.mark.parametrize("tokens", LENGTHS)
def test_bytes_follow_the_law(state: tuple[int, Layout, list[Any]], tokens: int) -> None:
    pool, layout, _ = state
    caches = reference.fresh(pool)
    reference.fill(caches, tokens)
    pieces = pieces_of(layout, caches, tokens)
    found = sum(piece.payload.nbytes for piece in pieces)
    # The tokens of the pool that is not full yet wait, as keys and gates, in 11 layers.
    waiting = 11 * 2 * 256 * (tokens % pool)
    assert found == reference.law(tokens, pool) + waiting
    assert found - reference.law(tokens, pool) < 11 * 2 * 256 * pool
    assert layout.state_bytes(tokens) == reference.law(tokens, pool)
    snapshot = pieces[-1]
    assert snapshot.payload.nbytes == layout.snapshot_bytes(caches)
    dtypes = {run.dtype for piece in pieces for run in piece.header.runs}
    assert dtypes == {"bfloat16", "float32", "bool"}


def test_headers_cost_little(state: tuple[int, Layout, list[Any]]) -> None:
    _, layout, caches = state
    pieces = pieces_of(layout, caches, max(LENGTHS))
    heads = sum(len(piece.header.pack()) for piece in pieces)
    assert heads < 0.001 * sum(piece.payload.nbytes for piece in pieces)


def test_a_block_fills_one_value(state: tuple[int, Layout, list[Any]]) -> None:
    pool, layout, caches = state
    assert layout.row_bytes == 11 * (1025 + 256 // pool)
    assert layout.block_tokens == 80
    first = pieces_of(layout, caches, max(LENGTHS))[0]
    assert 0.8 * VALUE_BYTES < first.payload.nbytes + len(first.header.pack()) <= VALUE_BYTES
    facts = layout.describe()
    assert facts["caches"] == {
        "ArraysCache": 34,
        "KVCache": 22,
        "PoolingCache": 11,
        "KVCache (transient)": 11,
    }
    assert facts["fixed_bytes"] == reference.FIXED_BYTES
