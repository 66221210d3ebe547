"""What is told of how a job's prompt was made, beside how it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {"head": "prompt_head", "normalised": "head_normalised", "dropped": "dropped_items"}


def prompt_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Details of a job by its request; only what there is to say.

    `prompt_head`: what its client changes in the head on every request, and what that costs;
    `head_normalised`: how often a pattern matched there; `dropped_items`: what did not fit.
    """
    prompt = request.get("prompt") or {}
    return {new: prompt[old] for old, new in _NAMES.items() if prompt.get(old)}
