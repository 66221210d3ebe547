"""The part of a check that follows from turns and conversations alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from store.conversations import order_keys
from store.environment import Txn
from store.errors import StoreError
from store.turns import Link, Turn

if TYPE_CHECKING:
    from store.store import Store


class Teller(Protocol):
    """The part of a check's report that is used here."""

    turns: int
    conversations: int
    lost: list[str]

    def tell(self, problem: str) -> None:
        """Note one problem."""


@dataclass(slots=True)
class Tree:
    """What `turn`, `conv` and `order` should hold, and the keys that records may have."""

    turn: dict[bytes, bytes] = field(default_factory=dict)
    conv: dict[bytes, bytes] = field(default_factory=dict)
    order: dict[bytes, bytes] = field(default_factory=dict)
    page_keys: set[bytes] = field(default_factory=set)


def check_tree(store: Store, txn: Txn, report: Teller) -> Tree:
    """Read every turn and conversation; note what is lost; compute what follows from them."""
    tree = Tree()
    turns = _turns(store, txn, report, tree)
    report.turns = len(turns)
    children = Counter(turn.parent for turn in turns.values() if turn.parent is not None)
    for ident in report.lost:
        link = store.turns.link(txn, ident)
        if link.parent is not None:
            children[link.parent] += 1
    for ident, turn in turns.items():
        total = _total(turns, turn)
        if total is None:
            report.tell(f"turn {ident} has lost an ancestor")
            report.lost.append(ident)
            total = turn.total
        link = Link(total, children[ident], turn.rebased, turn.parent, turn.conversation)
        tree.turn[ident.encode()] = link.pack()
    _conversations(store, txn, report, tree, turns)
    return tree


def _turns(store: Store, txn: Txn, report: Teller, tree: Tree) -> dict[str, Turn]:
    turns: dict[str, Turn] = {}
    for key, value in txn.cursor(db=store.environment.turn):
        ident = bytes(key).decode("ascii", "replace")
        tree.page_keys.update((b"t" + bytes(key), b"i" + bytes(key)))
        try:
            turn = store.turns.get(txn, ident)
        except StoreError as error:
            report.tell(str(error))
            report.lost.append(ident)
            tree.turn[bytes(key)] = bytes(value)
            continue
        if turn is not None:
            turns[ident] = turn
    return turns


def _total(turns: dict[str, Turn], turn: Turn) -> int | None:
    own = len(turn.prompt_ids) + len(turn.output_ids)
    if turn.parent is None:
        return own
    parent = turns.get(turn.parent)
    if parent is None:
        return None
    return own if turn.rebased else parent.total + own


def _conversations(
    store: Store, txn: Txn, report: Teller, tree: Tree, turns: dict[str, Turn]
) -> None:
    records: dict[str, dict[str, Any]] = {}
    members: dict[str, list[str]] = {}
    for key, value in txn.cursor(db=store.environment.conv):
        name, _, place = bytes(key).partition(b"\0")
        if place:
            members.setdefault(name.decode(), []).append(bytes(value).decode())
        else:
            records[name.decode()] = msgpack.unpackb(value)
    report.conversations = len(records)
    lost = set(report.lost)
    for turn in turns.values():
        if turn.conversation in records and turn.id not in members.setdefault(
            turn.conversation, []
        ):
            members[turn.conversation].append(turn.id)
    for ident, record in records.items():
        key = ident.encode()
        held = [turn for turn in members.get(ident, []) if turn in turns or turn in lost]
        if record["head"] not in held:
            record["head"] = held[-1] if held else None
        head = turns.get(record["head"] or "")
        record["turns"] = len(held)
        record["n_tokens"] = head.total if head else record["n_tokens"] if held else 0
        tree.conv[key] = msgpack.packb(record)
        for number, turn_id in enumerate(held):
            tree.conv[key + b"\0" + number.to_bytes(4, "big")] = turn_id.encode()
        for order in order_keys(key, record["owner"], record["created"]):
            tree.order[order] = b""
        tree.page_keys.add(b"c" + key)
        try:
            store.conversations.contents(txn, ident)
        except StoreError as error:
            report.tell(str(error))
            report.lost.append(ident)
