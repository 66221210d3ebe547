"""Items that a request names by their ids only: what a response wrote, put in their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from scheduler.api.backend import Backend
from scheduler.api.faults import Fault, bad, missing
from scheduler.api.items import output_items
from scheduler.api.lookup import find_job
from scheduler.api.schema import AnyItem, Item, ItemReference

MOST = 256
"""Responses that one request may name items of: each is looked up."""
_OWN = re.compile(r"[a-z]+_([0-9a-f]{32})(?:_\d+)?\Z")
_ITEM: TypeAdapter[AnyItem] = TypeAdapter(Item)


def resolved(
    backend: Backend, items: str | Sequence[AnyItem], where: str = "input"
) -> str | list[AnyItem]:
    """The items with those that are named in place of their names.

    Only what a response wrote has that in its id. Fault 404 for anything else, 400 for too many.
    """
    if isinstance(items, str):
        return items
    known: dict[str, list[dict[str, Any]]] = {}
    found: list[AnyItem] = []
    for number, item in enumerate(items):
        if not isinstance(item, ItemReference):
            found.append(item)
            continue
        param = f"{where}[{number}].id"
        match = _OWN.match(item.id)
        if match is None:
            raise missing("Item", item.id[:80], param)
        response = f"resp_{match.group(1)}"
        if response not in known:
            if len(known) >= MOST:
                raise bad(f"items of at most {MOST} responses can be named: send the rest", param)
            try:
                job = find_job(backend, response)
            except Fault as fault:
                if fault.status != 404:
                    raise
                raise missing("Item", item.id[:80], param) from None
            known[response] = output_items(job.id, job.output, job.status)
        named = [one for one in known[response] if one.get("id") == item.id]
        if not named:
            raise missing("Item", item.id[:80], param)
        found.append(_ITEM.validate_python(named[0]))
    return found
