"""JSON schemas that no finite text satisfies: they refer to themselves with no way out.

The grammar engine takes `{"$ref": "#"}` for a schema and ends the answer at its first token; a
required property that needs itself makes it open objects until its tokens are used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 200_000
"""Parts of a schema that are looked at, a second's work; a larger tangle is left to the engine."""


def endless(schema: Mapping[str, Any]) -> str:
    """What in a schema has no end, in one line; nothing where each part that is needed has one.

    The smallest set of references that can end is found round by round; keywords that are not known
    here are taken to have an end, so that nothing is refused that could be followed.
    """
    places = {at: _at(schema, at) for at in _references(schema)}
    finite = _Finite()
    try:
        while new := {at for at in places if at not in finite and finite.ends(places[at])}:
            finite |= new
        if finite.ends(schema):
            return ""
    except (_TooMuch, RecursionError):
        return ""
    stuck = sorted(places.keys() - finite)[0]
    return f"{stuck[:80]!r} refers to itself with no way out: make it optional, or give another way"


def _references(schema: Any) -> set[str]:
    """All local references in a schema."""
    places, found = set(), [schema]
    while found:
        part = found.pop()
        if isinstance(part, list):
            found += part
        elif isinstance(part, dict):
            found += part.values()
            if isinstance(at := part.get("$ref"), str) and at.startswith("#"):
                places.add(at)
    return places


def _at(schema: Any, reference: str) -> Any:
    """What a local reference names; True, which anything satisfies, where that is not found."""
    part = schema
    for name in reference.lstrip("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            return True
    return part if reference == "#" or reference.startswith("#/") else True


class _TooMuch(Exception):
    """The schema is not looked through: MOST parts were."""


class _Finite(set[str]):
    """References that can end."""

    looked = 0

    def ends(self, schema: Any) -> bool:
        """Whether some finite text satisfies a schema, if these references have one."""
        self.looked += 1
        if self.looked > MOST:
            raise _TooMuch
        if not isinstance(schema, dict):
            return True
        at = schema.get("$ref")
        if isinstance(at, str) and at.startswith("#") and at not in self:
            return False
        for name in ("anyOf", "oneOf"):
            ways = schema.get(name)
            if isinstance(ways, list) and ways and not any(map(self.ends, ways)):
                return False
        every = schema.get("allOf")
        if isinstance(every, list) and not all(map(self.ends, every)):
            return False
        if schema.get("type") == "object":
            needed, parts = schema.get("required"), schema.get("properties")
            if isinstance(needed, list) and isinstance(parts, dict):
                names = [name for name in needed if isinstance(name, str)]
                return all(self.ends(parts.get(name)) for name in names)
        if schema.get("type") == "array" and "prefixItems" not in schema:
            least = schema.get("minItems")
            if isinstance(least, int) and least > 0:
                return self.ends(schema.get("items"))
        return True
