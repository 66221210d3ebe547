"""Conversations that come and go leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import subprocess

import mlx.core as mx

from engine.decode import Batch
from engine.model import Model
from engine.prefill import Prefill
from engine.rows import Event, Row
from engine.sampling import SamplingParams

CONVERSATIONS = 500
SETTLED = 50
# The allocators of Python and MLX round and keep pages; a state of these tests has 100 KB.
SLACK = 24 << 20


def resident() -> int:
    """Bytes of this process in memory; `ps` says it on every system."""
    output = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, check=True
    )
    return int(output.stdout) * 1024


def measure() -> tuple[int, int]:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory(), resident()


def test_five_hundred_conversations_leave_no_memory(small: Model) -> None:
    rng = random.Random(2)
    batch = Batch(small, 6)
    running: set[int] = set()
    started = ended = 0
    after_first: tuple[int, int] | None = None
    row: Row | None = None  # would keep the last conversation's state alive, as `event` would
    event: Event | None = None
    while ended < CONVERSATIONS:
        if after_first is None and ended >= SETTLED and not running:
            row = event = None
            after_first = measure()
        hold = after_first is None and ended >= SETTLED
        if started < CONVERSATIONS and len(batch) < 6 and not hold and rng.random() < 0.7:
            ids = [rng.randrange(2, 512) for _ in range(rng.randrange(2, 60))]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 10), temperature=rng.choice([0.0, 1.0]), top_logprobs=2
            )
            if rng.random() < 0.5:
                row = Row(Prefill(small, ids).run(), ids[:-1], ids[-1:], params)
            else:
                row = Row(small.fresh_cache(), [], ids, params)
            running.add(batch.add(row))
            started += 1
        if running and rng.random() < 0.1:
            uid = rng.choice(sorted(running))
            batch.cancel(uid)
            running.remove(uid)
            ended += 1
        for event in batch.step():
            if event.finish:
                running.remove(event.uid)
                ended += 1
    assert after_first is not None
    row = event = None
    active, rss = measure()
    assert len(batch) == 0
    assert active == after_first[0]
    assert rss <= after_first[1] + SLACK
