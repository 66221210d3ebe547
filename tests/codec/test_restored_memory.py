"""What a restored state does not fill of its memory holds nothing of whoever had it before."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import KVCache

from store.codec import memory
from store.codec.layout import Layout
from store.codec.pack import Exporter
from store.codec.unpack import Importer

MODEL = b"m" * 16
TOKENS, CAPACITY, HEADS, WIDTH = 600, 1024, 4, 512


def filled() -> list[KVCache]:
    caches = [KVCache(), KVCache()]
    for seed, cache in enumerate(caches):
        rows = mx.random.normal((1, HEADS, TOKENS, WIDTH), key=mx.random.key(seed))
        cache.update_and_fetch(rows, -rows)
        mx.eval(cache.state)
    return caches


def test_room_behind_the_rows_is_zero_whatever_the_memory_held() -> None:
    caches = filled()
    layout = Layout.of(caches, "any", MODEL)
    exporter = Exporter(layout, range(TOKENS))
    pieces = [*exporter.rows(caches, TOKENS, last=True), exporter.snapshot(caches)]
    sizes = [HEADS * WIDTH * CAPACITY * 4] * 4
    before = mx.set_cache_limit(1 << 30)
    try:
        for block in memory.allocate(*sizes):
            block.view[:] = 0xAB
        del block
        importer = Importer(layout, [KVCache(), KVCache()], MODEL, CAPACITY)
        importer.add_all(pieces[:-1])
        restored = importer.finish(pieces[-1])
    finally:
        mx.set_cache_limit(before)
    for cache, original in zip(restored, caches, strict=True):
        for mine, theirs in ((cache.keys, original.keys), (cache.values, original.values)):
            assert mine.shape[2] == CAPACITY
            assert np.array_equal(mine[:, :, :TOKENS], theirs[:, :, :TOKENS])
            assert not np.asarray(mine[:, :, TOKENS:]).any()


def test_memory_given_back_is_used_again_and_not_cleared() -> None:
    before = mx.set_cache_limit(1 << 30)
    try:
        mx.clear_cache()
        (block,) = memory.allocate(32 << 20)
        block.view[:] = 7
        del block
        held = mx.get_cache_memory()
        (again,) = memory.allocate(32 << 20)
        assert mx.get_cache_memory() < held
        assert again.view[: 1 << 20].min() == 7
    finally:
        mx.set_cache_limit(before)
