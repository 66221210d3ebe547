"""The end of the preamble that a prompt shares with others, where its state is kept by itself."""

from __future__ import annotations

from scheduler.record import Job


def cut_of(job: Job, block_tokens: int) -> int:
    """The position at which a state is kept for prompts that begin alike; 0 where none is.

    A whole number of blocks, so that each conversation goes on from the stored ones; what is left
    of the preamble is computed with the rest. Nothing is kept of a request that is not stored.
    """
    told = (job.request.get("prompt") or {}).get("preamble")
    if type(told) is not int or not job.request.get("store", True):
        return 0
    cut = min(told, job.prompt_tokens - 2)
    return max(0, cut - cut % block_tokens)
