"""Memory is bounded before it is taken."""

from __future__ import annotations

import dataclasses
import gc

import mlx.core as mx
import pytest

from engine.errors import ModelError
from engine.memory import active, chunk_bytes, fit_chunk, fits, growth_bytes
from engine.model import Model, evaluate
from engine.prefill import Prefill


@pytest.fixture
def device_of(small: Model, monkeypatch: pytest.MonkeyPatch) -> object:
    def limit(working_set: int) -> None:
        changed = dataclasses.replace(small.device, working_set_bytes=working_set)
        monkeypatch.setattr(small, "device", changed)

    return limit


@pytest.mark.parametrize(("chunk", "stop"), [(64, 512), (256, 2048), (512, 2048)])
def test_the_estimate_bounds_what_a_chunk_takes(
    small: Model, chunk: int, stop: int, request: pytest.FixtureRequest
) -> None:
    caches = small.fresh_cache()
    gc.collect()
    gc.disable()  # what others left is not freed in the middle of a forward
    request.addfinalizer(gc.enable)
    for start in range(0, stop, chunk):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        small.forward(mx.ones((1, chunk), dtype=mx.int32), caches, [0], logits=False)
        evaluate(caches)
        taken = mx.get_peak_memory() - before
        bound = chunk_bytes(small, chunk, start) + growth_bytes(small, chunk, start)
        assert taken <= bound
        assert bound <= 8 * taken


def test_a_chunk_is_halved_until_it_fits(small: Model, device_of: object) -> None:
    assert fit_chunk(small, 512, 0) == 512
    need = chunk_bytes(small, 128, 0) + growth_bytes(small, 128, 0)
    gc.collect()
    assert callable(device_of)
    device_of(active() + need + 1000)
    assert fit_chunk(small, 512, 0) == 128
    run = Prefill(small, [5] * 600, chunk=512)
    run.step()
    assert run.position <= 128
    assert run.schedule == [run.position]
    device_of(0)
    with pytest.raises(ModelError, match="end other conversations"):
        fit_chunk(small, 512, 0)


def test_a_state_that_cannot_fit_is_known_beforehand(small: Model, device_of: object) -> None:
    parts = fits(small, 1000)
    assert parts["fits"]
    assert parts["weights"] == small.nbytes
    assert callable(device_of)
    device_of(parts["weights"] + parts["state"])
    assert not fits(small, 1000)["fits"]
