"""The weights of the rule that picks the next job; the rule itself is `lua/policy.lua`.

Horizon and preemption gain were chosen with `tandem simulate` on the Mooncake conversation trace
at load 0.78, on thinnings 100 to 159: the longest horizon (of 360, 380, 400, 420 s) that kept every
wait under 470 s. Thinnings 0 to 19, on which results are reported, had no part in the choice.
"""

from __future__ import annotations

from typing import Any

from scheduler.config import JobsConfig

#: Tokens per second until a queue's rate has been measured.
FIRST_RATE = 1000.0

#: Candidates from each index. With fewer waiting jobs the pick is exact.
WINDOW = 32


def arguments(settings: JobsConfig, rate: float = FIRST_RATE) -> dict[str, Any]:
    """What scripts that pick or enqueue are told. `rate`: tokens per second, until measured."""
    return {
        "rate": rate,
        "horizon": settings.horizon_seconds,
        "share": settings.owner_share,
        "window": WINDOW,
        "weights": {
            "interactive": settings.interactive_weight,
            "normal": 1.0,
            "batch": settings.batch_weight,
        },
    }
