"""A compiled decode step is measured, and not used where its tokens differ."""

from __future__ import annotations

import pytest
from architectures import build

from engine.compiled import compare


@pytest.mark.parametrize(("name", "equal"), [("llama", False), ("mamba2", True)])
def test_a_compiled_step_is_compared_with_a_plain_one(name: str, equal: bool) -> None:
    found = compare(build(name))
    assert found["equal"] == equal
    assert found["ratio"] > 0
    assert not found["usable"]
    if not equal:
        assert "positions are fixed" in found["reason"]
