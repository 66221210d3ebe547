"""Schemas that refer to themselves: refused where no answer could end, taken where one can."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api.endless import endless
from scheduler.api.faults import Fault
from scheduler.api.intake import _digest
from scheduler.api.schema import ResponseRequest

SELF = {"$ref": "#"}
NODE = {"type": "object", "properties": {"x": SELF}, "additionalProperties": False}
ENDLESS: dict[str, dict[str, Any]] = {
    "itself": SELF,
    "in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a",
    },
    "the only way": {"anyOf": [SELF]},
    "needed": {**NODE, "required": ["x"]},
    "needed in a list": {"type": "array", "items": SELF, "minItems": 1},
    "one of all": {"allOf": [{"type": "string"}, SELF]},
}  # fmt: skip
FINITE: dict[str, dict[str, Any]] = {
    "optional": NODE,
    "a list": {"type": "array", "items": SELF},
    "another way": {"anyOf": [SELF, {"type": "string"}]},
    "null": {
        **NODE, "required": ["x"], "properties": {"x": {"anyOf": [SELF, {"type": "null"}]}},
    },
    "chain": {
        "$defs": {"a~b": {"$ref": "#/$defs/c"}, "c": {"type": "string"}}, "$ref": "#/$defs/a~0b",
    },
    "unknown": {"$ref": "#/nowhere"},
    "unused": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "string"},
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_an_end_is_named(name: str) -> None:
    assert "refers to itself with no way out" in endless(ENDLESS[name])


@pytest.mark.parametrize("name", FINITE)
def test_a_recursive_schema_with_an_end_is_taken(name: str) -> None:
    assert endless(FINITE[name]) == ""


def test_a_large_tangle_does_not_hold_up_the_api() -> None:
    """Each round finds one more: in all, more parts than are looked at."""
    chain = {f"a{n:04}": {"$ref": f"#/$defs/a{n + 1:04}"} for n in range(2000)}
    assert endless({"$defs": chain, "$ref": "#/$defs/a0000"}) == ""
    least = {**chain, "a2000": {"$ref": "#/$defs/a0000"}}
    assert endless({"$defs": least, "$ref": "#/$defs/a0000"})


def test_half_a_character_is_called_that() -> None:
    body = ResponseRequest.model_validate({"input": "x", "tool_choice": {"\ud800": 1}})
    with pytest.raises(Fault) as caught:
        _digest(body)
    assert "half of a character" in str(caught.value.message)
