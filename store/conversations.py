"""Conversations: who owns them, where they stand, which turns they have.

`order` lists conversations by creation time, once for all and once for each owner, so that a page
of a list costs no scan. Which turns a conversation has lies in `conv` too, under its key followed
by a zero byte and the turn's number. Metadata and initial items may be long and lie in `pages`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from store import pages
from store.environment import Environment, Txn
from store.errors import StoreError
from store.objects import owner_tag
from store.turns import Turn, Turns, check_id

MAX_CONTENTS = 64 << 20
MAX_OWNER = 256
_EVERYONE = b"\0" * 8


def order_keys(ident: bytes, owner: str, created: float) -> tuple[bytes, bytes]:
    """The two keys in `order` of a conversation: among all, among its owner's."""
    tail = int(created * 1e6).to_bytes(8, "big") + ident
    return _EVERYONE + tail, owner_tag(owner) + tail


class Conversations:
    """Conversation records; every method works inside the caller's transaction."""

    def __init__(self, environment: Environment, turns: Turns) -> None:
        self._environment = environment
        self._turns = turns

    def get(self, txn: Txn, ident: str) -> dict[str, Any] | None:
        """The record: id, owner, created, last_used, head, turns, n_tokens, pinned."""
        found = txn.get(check_id(ident, "conversation"), db=self._environment.conv)
        if found is None:
            return None
        record: dict[str, Any] = msgpack.unpackb(found)
        return record

    def contents(self, txn: Txn, ident: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(metadata, items that the conversation was created with)."""
        found = pages.get(self._environment, txn, b"c" + check_id(ident, "conversation"))
        if found is None:
            raise StoreError(f"conversation {ident} has lost its contents: run a repair")
        metadata, items = json.loads(found)
        return metadata, items

    def create(
        self,
        txn: Txn,
        ident: str,
        owner: str,
        created: float,
        metadata: dict[str, Any],
        items: Sequence[dict[str, Any]],
    ) -> bool:
        """Store a new conversation; False if the same owner created it before."""
        key = check_id(ident, "conversation")
        if len(owner) > MAX_OWNER:
            raise StoreError(f"an owner has at most {MAX_OWNER} characters")
        old = self.get(txn, ident)
        if old is not None:
            if old["owner"] != owner:
                raise StoreError(f"conversation {ident} belongs to someone else: use a new id")
            return False
        self._put_contents(txn, ident, metadata, items)
        self._put(
            txn,
            {
                "id": ident,
                "owner": owner,
                "created": created,
                "last_used": created,
                "head": None,
                "turns": 0,
                "n_tokens": 0,
                "pinned": False,
            },
        )
        for order in order_keys(key, owner, created):
            txn.put(order, b"", db=self._environment.order)
        return True

    def update(self, txn: Txn, ident: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Change `metadata`, `pinned` or `last_used`, `add_items` or `remove_item` (an item's id).

        Items that are added after a turn wait for the next one (`added` of them, the last of the
        conversation's items); those that a turn has seen stay. Raises StoreError on anything else.
        """
        record = self.get(txn, ident)
        if record is None:
            raise StoreError(f"there is no conversation {ident}")
        unknown = set(changes) - {"metadata", "pinned", "last_used", "add_items", "remove_item"}
        if unknown:
            raise StoreError(f"a conversation has no field {sorted(unknown)[0]} that can change")
        kept = {"pinned", "last_used"}
        if set(changes) - kept:
            metadata, items = self.contents(txn, ident)
            items = self._changed(record, items, changes)
            self._put_contents(txn, ident, changes.get("metadata", metadata), items)
        record.update({key: value for key, value in changes.items() if key in kept})
        self._put(txn, record)
        return record

    def _changed(
        self, record: dict[str, Any], items: list[dict[str, Any]], changes: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The items after adding and removing; `record` counts those that wait for a turn."""
        added = record.get("added", 0)
        new = list(changes.get("add_items", ()))
        if (name := changes.get("remove_item")) is not None:
            first = 0 if record["head"] is None else len(items) - added
            found = [i for i, item in enumerate(items) if i >= first and item.get("id") == name]
            if not found:
                raise StoreError(f"no item {name} of this conversation can be removed")
            items = [item for i, item in enumerate(items) if i != found[0]]
            added = max(0, added - 1)
        if record["head"] is not None:
            record["added"] = added + len(new)
        return [*items, *new]

    def add_turn(self, txn: Txn, turn: Turn) -> None:
        """Enter a new turn; it becomes the head if it continues the head or is the first."""
        record = self.get(txn, turn.conversation)
        if record is None:
            raise StoreError(f"there is no conversation {turn.conversation}")
        number = record["turns"]
        record["turns"] = number + 1
        if record["head"] is None or turn.parent == record["head"]:
            self._take_added(txn, record, turn)
            record["head"] = turn.id
            record["n_tokens"] = turn.total
        record["last_used"] = max(record["last_used"], turn.created)
        self._put(txn, record)
        key = turn.conversation.encode() + b"\0" + number.to_bytes(4, "big")
        txn.put(key, turn.id.encode(), db=self._environment.conv)

    def _take_added(self, txn: Txn, record: dict[str, Any], turn: Turn) -> None:
        """Items that waited for a turn are that turn's now, if it has them."""
        if not (added := record.get("added", 0)):
            return
        metadata, items = self.contents(txn, record["id"])
        waiting = [item.get("id") for item in items[-added:]]
        if [item.get("id") for item in turn.items[:added]] == waiting:
            record["added"] = 0
            self._put_contents(txn, record["id"], metadata, items[:-added])

    def turn_ids(self, txn: Txn, ident: str) -> list[str]:
        """Ids of all turns of a conversation in the order they were stored."""
        prefix = check_id(ident, "conversation") + b"\0"
        cursor = txn.cursor(db=self._environment.conv)
        result = []
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not bytes(key).startswith(prefix):
                    break
                result.append(bytes(value).decode())
        return result

    def page(
        self,
        txn: Txn,
        owner: str | None,
        limit: int,
        after: str | None,
        before: tuple[str, float] | None = None,
    ) -> list[dict[str, Any]]:
        """Up to `limit` records, newest first, beginning behind conversation `after`, or where
        one of that id and creation time, `before`, stands or would stand."""
        prefix = _EVERYONE if owner is None else owner_tag(owner)
        upper = prefix + b"\xff" * 9
        if before is not None:
            place = order_keys(check_id(before[0], "conversation"), owner or "", before[1])
            upper = place[0 if owner is None else 1]
        elif after is not None:
            record = self.get(txn, after)
            if record is None:
                raise StoreError(f"there is no conversation {after}")
            keys = order_keys(after.encode(), record["owner"], record["created"])
            upper = keys[0 if owner is None else 1]
        result: list[dict[str, Any]] = []
        for key in _backwards(txn.cursor(db=self._environment.order), upper):
            if len(result) >= limit or not key.startswith(prefix):
                break
            record = self.get(txn, key[16:].decode())
            # The tag is a hash: another owner with the same one is passed over.
            if record is not None and owner in (None, record["owner"]):
                result.append(record)
        return result

    def remove(self, txn: Txn, ident: str) -> list[str]:
        """Delete a conversation and its turns; returns the ids of the turns that went.

        A turn that another conversation branched from stays (its ids are that branch's past)
        until the last such branch goes.
        """
        record = self.get(txn, ident)
        if record is None:
            raise StoreError(f"there is no conversation {ident}")
        key = check_id(ident, "conversation")
        turns = self.turn_ids(txn, ident)
        for number in range(record["turns"]):
            txn.delete(key + b"\0" + number.to_bytes(4, "big"), db=self._environment.conv)
        pages.delete(self._environment, txn, b"c" + key)
        for order in order_keys(key, record["owner"], record["created"]):
            txn.delete(order, db=self._environment.order)
        txn.delete(key, db=self._environment.conv)
        gone: list[str] = []
        for turn in reversed(turns):
            at: str | None = turn
            while at is not None and self._is_free(txn, at):
                gone.append(at)
                at = self._turns.remove(txn, at)
        return gone

    def _is_free(self, txn: Txn, turn: str) -> bool:
        """Whether a turn has no children and its conversation no longer exists."""
        if not self._turns.exists(txn, turn):
            return False
        link = self._turns.link(txn, turn)
        return link.children == 0 and self.get(txn, link.conversation) is None

    def _put(self, txn: Txn, record: dict[str, Any]) -> None:
        txn.put(record["id"].encode(), msgpack.packb(record), db=self._environment.conv)

    def _put_contents(
        self, txn: Txn, ident: str, metadata: dict[str, Any], items: Sequence[dict[str, Any]]
    ) -> None:
        try:
            packed = json.dumps([metadata, list(items)]).encode()
        except (TypeError, ValueError) as error:
            raise StoreError(f"metadata and items must be JSON values: {error}") from error
        if len(packed) > MAX_CONTENTS:
            raise StoreError(f"{len(packed)} bytes of items are over the limit of {MAX_CONTENTS}")
        pages.delete(self._environment, txn, b"c" + ident.encode())
        pages.put(self._environment, txn, b"c" + ident.encode(), packed)


def _backwards(cursor: Any, upper: bytes) -> Iterator[bytes]:
    """Keys below `upper`, the largest first."""
    found = cursor.set_range(upper)
    found = cursor.prev() if found else cursor.last()
    while found:
        yield bytes(cursor.key())
        found = cursor.prev()
