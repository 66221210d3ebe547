"""Two cache lists of one state that share memory: what one becomes, the other does not see."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from test_models import bits, layout_of
from tiny_models import TINY, prompt

from store.codec.pack import Exporter
from store.codec.twin import keep, kept_bytes, restore_kept, twin
from store.codec.unpack import Importer

IDS = prompt(150)
HELD = 105  # beyond rings, windows and a chunk of attention


def contents(layout: Any, caches: Any, held: int) -> list[bytes]:
    exporter = Exporter(layout, IDS[:held])
    pieces = [*exporter.rows(caches, held, last=True), exporter.snapshot(caches)]
    return [part for piece in pieces for part in (piece.header.pack(), bytes(piece.payload))]


@pytest.mark.rotate(7)
@pytest.mark.parametrize("name", list(TINY))
def test_a_twin_and_a_kept_state_are_bit_equal_later(name: str) -> None:
    entry = TINY[name]
    model = entry.build()
    layout = layout_of(entry, model)
    caches = entry.fresh_cache(model)
    entry.step(model, IDS[:64], caches)
    entry.step(model, IDS[64:HELD], caches)
    before = contents(layout, caches, HELD)
    other = twin(layout, caches, entry.fresh_cache(model), HELD)
    kept = keep(layout, caches)
    assert kept_bytes(kept) == layout.snapshot_bytes(caches)
    said = [bits(entry.step(model, IDS[at : at + 1], caches)) for at in range(HELD, 130)]
    assert contents(layout, other, HELD) == before
    again = [bits(entry.step(model, IDS[at : at + 1], list(other))) for at in range(HELD, 130)]
    assert again == said
    # The rows come from the list that went on, the rest from what was kept.
    third = restore_kept(layout, caches, kept, entry.fresh_cache(model), HELD)
    assert contents(layout, third, HELD) == before
    for _ in range(15):
        entry.step(model, [7], list(third))
    assert contents(layout, caches, 130) == contents(layout, other, 130)


@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "glm5_next", "gemma3", "qwen3_next"])
def test_rows_alone_are_restored_up_to_any_token(name: str) -> None:
    entry = TINY[name]
    model = entry.build()
    layout = layout_of(entry, model)
    caches = entry.fresh_cache(model)
    entry.step(model, IDS[:64], caches)
    entry.step(model, IDS[64:HELD], caches)
    pieces = Exporter(layout, IDS[:HELD]).rows(caches, HELD, last=True, ends=[64, HELD])
    ends = [
        piece.header.start + end
        for piece in pieces
        for step, count in piece.header.extra.get("ends", ())
        for end in [step] * count
    ]
    assert ends == [64, HELD]
    importer = Importer(layout, entry.fresh_cache(model), layout.fingerprint, 256)
    importer.add_all(pieces)
    if name not in ("llama", "deepseek_v32"):
        assert not layout.rows_alone
        with pytest.raises(Exception, match="do not make a state"):
            importer.finish_rows(64)
        return
    assert layout.rows_alone
    cut = importer.finish_rows(64)
    alone = entry.fresh_cache(model)
    entry.step(model, IDS[:64], alone)
    assert contents(layout, cut, 64) == contents(layout, alone, 64)
    ids = IDS[64:HELD]
    assert bits(entry.step(model, ids, list(cut))) == bits(entry.step(model, ids, alone))
    mx.clear_cache()
