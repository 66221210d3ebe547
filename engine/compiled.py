"""Whether a compiled decode step would give the same tokens, and how much faster it would be."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine.rows import line_of
from store.codec.layout import walk

if TYPE_CHECKING:
    from engine.model import Caches, Model

STEPS = 12
WARM = 4  # steps that are not timed: the first ones compile


def compare(model: Model) -> dict[str, Any]:
    """Decode one row by plain steps and by a compiled one, in turn; returns what was found.

    `equal` tells whether the tokens are the same, `ratio` the plain step's time to the compiled
    one's, `usable` whether the compiled step could stand in, `reason` why it is not used. Where
    positions are Python numbers in the caches, as in all of mlx-vlm's attention caches, the
    compiled step repeats the first one's position, so that its tokens differ. Caches without
    positions can be compiled, but only for one set of rows: it would be traced anew at each join.
    """
    from engine.prefill import Prefill
    from engine.probe import token_ids

    ids = token_ids(model, 65, 1)
    plain, held = Prefill(model, ids).run(), Prefill(model, ids).run()
    state = [leaf.__dict__ for _, _, leaf in walk(held)]

    def held_step(token: mx.array) -> mx.array:
        return _step(model, token, held)

    step: Any = mx.compile(held_step, inputs=state, outputs=state)
    a = b = mx.array([ids[-1]], dtype=mx.int32)
    equal = True
    plain_times: list[float] = []
    compiled_times: list[float] = []
    try:
        for _ in range(STEPS):
            begun = time.perf_counter()
            a = _step(model, a, plain)
            mx.eval(a)
            between = time.perf_counter()
            b = step(b)
            mx.eval(b)
            compiled_times.append(time.perf_counter() - between)
            plain_times.append(between - begun)
            equal = equal and bool(mx.array_equal(a, b))
    except Exception as error:  # whatever a model's caches do under a trace
        return {"equal": False, "usable": False, "reason": f"it fails: {line_of(error)}"}
    ratio = statistics.median(plain_times[WARM:]) / statistics.median(compiled_times[WARM:])
    if not equal:
        reason = "its tokens differ: the caches' positions are fixed when it is traced"
    elif ratio <= 1:
        reason = "it is not faster"
    else:
        reason = "it would have to be traced anew whenever a row joins or leaves"
    return {"equal": equal, "ratio": ratio, "usable": False, "reason": reason}


def _step(model: Model, token: mx.array, caches: Caches) -> mx.array:
    return mx.argmax(model.forward(token[:, None], caches, [0])[:, -1], axis=-1)
