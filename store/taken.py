"""Which path a benchmark meant to measure, and which it did. Here every room may use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WrongPath(RuntimeError):
    """The benchmark did not measure what it meant to: its figures say nothing about it."""


def taken(bench: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What a benchmark reports of its path. Raises WrongPath where it took another one.

    `expected`: what it meant to take, by fork; `found`: what was taken, the same forks at least.
    """
    missed = [
        f"{fork} was {found.get(fork, 'not told')} and not {wanted}"
        for fork, wanted in expected.items()
        if found.get(fork) != wanted
    ]
    if missed:
        raise WrongPath(f"the benchmark {bench} took another path: {'; '.join(missed)}")
    return {"expected": dict(expected), "taken": dict(found)}
