"""A request of another API, in the terms of the Responses API."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from scheduler.api.faults import bad, from_validation
from scheduler.api.schema import MAX_IDS, ResponseRequest

_THEIRS = {"input": "messages", "instructions": "system"}
"""What the other APIs call fields of ours."""


def translated(items: list[dict[str, Any]], fields: dict[str, Any]) -> ResponseRequest:
    """The request of these fields whose input is `items`: those that its messages make.

    Raises Fault 400, in the client's words, where it goes beyond what is taken.
    """
    if len(items) > MAX_IDS:
        raise bad(
            f"messages: they make {len(items)} items, at most {MAX_IDS} are taken: texts, tool "
            "calls, their results and thoughts count one each; leave out or sum up the oldest",
            "messages",
        )
    try:
        return ResponseRequest.model_validate({**fields, "input": items})
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise from_validation([{**e, "loc": ("body", *_place(e["loc"]))} for e in found]) from None


def _place(ours: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where the client has what stands there in our terms; not which of the messages it is."""
    theirs = _THEIRS.get(str(ours[0])) if ours else None
    return ours if theirs is None else (theirs,)
