"""The end of the preamble that a prompt shares with others, where its state is kept by itself."""

from __future__ import annotations

from scheduler.record import Job
from store.codec.layout import Layout

MOST_SNAPSHOT = 4
"""A snapshot that is larger than so many times the rows before it takes more room than it saves
work: for GLM-5.3-Flash a preamble is kept from about 3,200 tokens on."""


def cut_of(job: Job, layout: Layout) -> int:
    """The position at which a state is kept for prompts that begin alike; 0 where none is.

    A whole number of blocks, so that each conversation goes on from the stored ones; what is left
    of the preamble is computed with the rest. Nothing is kept of a request that is not stored.
    """
    block_tokens = layout.block_tokens
    told = (job.request.get("prompt") or {}).get("preamble")
    if type(told) is not int or not job.request.get("store", True):
        return 0
    cut = min(told, job.prompt_tokens - 2)
    cut = max(0, cut - cut % block_tokens)
    rows = layout.rows_bytes(0, cut)
    return cut if layout.state_bytes(cut) - rows <= MOST_SNAPSHOT * rows else 0
