"""New ids for a conversation from a file, where its own are taken by something else.

The new ids follow from the old ones and the owner, so that the same file, taken in again by the
same owner, finds what it made before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from store.errors import StoreError
from store.turns import Turn

if TYPE_CHECKING:
    from store.store import Store

TRIES = 100
Items = Sequence[dict[str, Any]]
Record = Mapping[str, Any]


def placed(
    store: Store, conversation: Record, items: Items, turns: Sequence[Turn]
) -> dict[str, str]:
    """New ids by old ones, of the conversation and its turns; none where they can stay as they are.

    An id can stay while nothing has it, or the same owner has the same under it. Otherwise all
    change: who sends the file learns nothing else of what is there. Raises StoreError where no free
    ids are found.
    """
    names: dict[str, str] = {}
    for attempt in range(1, TRIES):
        if _is_free(store, *renamed(names, conversation, items, turns)):
            return names
        names = {conversation["id"]: _name("conv_", conversation, conversation["id"], attempt)}
        for turn in turns:
            names[turn.id] = _name("resp_", conversation, turn.id, attempt)
            names.setdefault(
                turn.conversation, _name("conv_", conversation, turn.conversation, attempt)
            )
    raise StoreError(f"no free ids were found for conversation {conversation['id']}")


def renamed(
    names: Mapping[str, str], conversation: Record, items: Items, turns: Sequence[Turn]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Turn]]:
    """The conversation's record, its first items and its turns under their new ids."""
    # An item that a response wrote is named after it.
    parts = {_part(old): _part(new) for old, new in names.items() if old.startswith("resp_")}

    def told(found: Items) -> list[dict[str, Any]]:
        return [_renamed_item(item, parts) for item in found]

    new = [
        replace(
            turn,
            id=names.get(turn.id, turn.id),
            conversation=names.get(turn.conversation, turn.conversation),
            parent=None if turn.parent is None else names.get(turn.parent, turn.parent),
            items=told(turn.items),
        )
        for turn in turns
    ]
    ident = conversation["id"]
    return {**conversation, "id": names.get(ident, ident)}, told(items), new


def _is_free(store: Store, conversation: Record, items: Items, turns: Sequence[Turn]) -> bool:
    stored = store.get_conversation(conversation["id"])
    if stored is not None:
        same = stored["owner"] == conversation["owner"]
        if not same or list(stored["items"])[: len(items)] != list(items):
            return False
    for turn in turns:
        whole = store.get_conversation(turn.conversation)
        if whole is not None and whole["owner"] != turn.owner:
            return False
        there = store.get_turn(turn.id)
        if there is not None and _said(there) != _said(turn):
            return False
    return True


def _said(turn: Turn) -> tuple[Any, ...]:
    return turn.owner, turn.conversation, turn.items, turn.truth()


def _name(prefix: str, conversation: Record, old: str, attempt: int) -> str:
    seed = "\0".join((conversation["owner"], conversation["id"], old, str(attempt)))
    return prefix + hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()


def _part(response: str) -> str:
    return response.removeprefix("resp_")


def _renamed_item(item: dict[str, Any], parts: Mapping[str, str]) -> dict[str, Any]:
    ident = item.get("id")
    if not isinstance(ident, str):
        return item
    kind, _, own = ident.partition("_")
    response, *rest = own.split("_")
    if (new := parts.get(response)) is None:
        return item
    return {**item, "id": "_".join((kind, new, *rest))}
