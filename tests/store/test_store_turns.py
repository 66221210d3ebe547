from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_states import conversation_id, make_turn

from store.errors import StoreError
from store.store import Store
from store.turns import Turn


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", 64 << 20)
    yield opened
    opened.close()


def test_turn_round_trip(store: Store) -> None:
    turn = make_turn(range(100), range(100, 130), conversation=conversation_id())
    turn.items.append({"text": "\ud800 lone", "number": 1 << 80})
    store.put_turn(turn)
    found = store.get_turn(turn.id)
    assert found is not None
    assert (found.prompt_ids, found.output_ids) == (list(range(100)), list(range(100, 130)))
    assert (found.items, found.params, found.schedule) == (turn.items, turn.params, turn.schedule)
    assert found.total == 130
    assert store.get_turn("resp_" + "0" * 32) is None


def test_turns_survive_reopening(tmp_path: Path) -> None:
    conversation = conversation_id()
    turn = make_turn(range(70_000), [1], conversation=conversation)
    store = Store.open(tmp_path / "store", 64 << 20)
    store.put_turn(turn)
    store.close()
    store = Store.open(tmp_path / "store", 64 << 20, create=False)
    assert store.turn_ids(turn.id) == [*range(70_000), 1]
    assert store.stats()["turns"] == 1
    store.close()


def test_ids_follow_the_tree(store: Store) -> None:
    conversation = conversation_id()
    first = make_turn([1, 2], [3], conversation=conversation)
    second = make_turn([4], [5], conversation=conversation, parent=first.id)
    branch = make_turn([6], [7], conversation=conversation, parent=first.id)
    rebased = make_turn([9, 9, 9], [8], conversation=conversation, parent=second.id, rebased=True)
    after = make_turn([10], [11], conversation=conversation, parent=rebased.id)
    for turn in (first, second, branch, rebased, after):
        store.put_turn(turn)
    assert store.turn_ids(second.id) == [1, 2, 3, 4, 5]
    assert store.turn_ids(branch.id) == [1, 2, 3, 6, 7]
    assert store.turn_ids(rebased.id) == [9, 9, 9, 8]
    assert store.turn_ids(after.id) == [9, 9, 9, 8, 10, 11]
    assert [turn.id for turn in store.path(after.id)] == [
        first.id,
        second.id,
        rebased.id,
        after.id,
    ]
    record = store.get_conversation(conversation)
    assert record is not None
    assert (record["head"], record["turns"], record["n_tokens"]) == (after.id, 5, 6)
    assert record["saved"] == record["bytes"] == 0


def test_put_twice_is_once_and_never_changes(store: Store) -> None:
    conversation = conversation_id()
    turn = make_turn([1], [2], conversation=conversation)
    store.put_turn(turn)
    store.put_turn(turn)
    assert store.stats()["turns"] == 1
    assert store.conversation_turns(conversation) == [turn.id]
    turn.usage = {"seconds": 3}
    store.put_turn(turn)
    turn.output_ids = [3]
    with pytest.raises(StoreError, match="other contents"):
        store.put_turn(turn)
    found = store.get_turn(turn.id)
    assert found is not None
    assert found.output_ids == [2]


def test_refused_turns_leave_nothing(store: Store) -> None:
    conversation = conversation_id()
    orphan = make_turn([1], [2], conversation=conversation, parent="resp_" + "f" * 32)
    with pytest.raises(StoreError, match="there is no turn"):
        store.put_turn(orphan)
    bad = make_turn([1], [2], conversation=conversation)
    bad.prompt_ids = [-1]
    with pytest.raises(StoreError, match="token ids"):
        store.put_turn(bad)
    bad = make_turn([1], [2], conversation=conversation, ident="resp with space")
    with pytest.raises(StoreError, match="printable"):
        store.put_turn(bad)
    with pytest.raises(StoreError, match="no conversation"):
        store.put_turn(make_turn([1], [2], conversation=conversation), create=False)
    assert store.get_conversation(conversation) is None
    assert store.stats()["turns"] == 0


def test_conversations_by_owner_in_pages(store: Store) -> None:
    for number in range(10):
        store.create_conversation(
            f"conv_{number}",
            "anna" if number % 2 else "ben",
            {"n": str(number)},
            created=100.0 + number,
        )
    everyone = [record["id"] for record in store.list_conversations(limit=100)]
    assert everyone == [f"conv_{number}" for number in reversed(range(10))]
    anna = [record["id"] for record in store.list_conversations("anna", limit=3)]
    assert anna == ["conv_9", "conv_7", "conv_5"]
    rest = [record["id"] for record in store.list_conversations("anna", 3, after="conv_5")]
    assert rest == ["conv_3", "conv_1"]
    assert store.list_conversations("nobody") == []
    with pytest.raises(StoreError, match="no conversation"):
        store.list_conversations(after="conv_x")


def test_conversation_record_changes(store: Store) -> None:
    items = [{"role": "system", "content": "short answers"}]
    made = store.create_conversation("conv_a", "anna", {"topic": "x"}, items)
    assert (made["metadata"], made["items"], made["head"]) == ({"topic": "x"}, items, None)
    assert store.create_conversation("conv_a", "anna")["metadata"] == {"topic": "x"}
    with pytest.raises(StoreError, match="someone else"):
        store.create_conversation("conv_a", "ben")
    changed = store.update_conversation("conv_a", metadata={"topic": "y" * 5000}, pinned=True)
    assert (changed["metadata"]["topic"], changed["pinned"]) == ("y" * 5000, True)
    assert changed["items"] == items
    with pytest.raises(StoreError, match="no field head"):
        store.update_conversation("conv_a", head="resp_x")


def test_added_items_wait_for_the_turn_that_takes_them(store: Store) -> None:
    store.create_conversation("conv_a", items=[{"id": "a"}, {"id": "b"}])
    store.update_conversation("conv_a", remove_item="b")
    store.update_conversation("conv_a", add_items=[{"id": "c"}], metadata={"k": "v"})
    store.put_turn(Turn(id="resp_1", conversation="conv_a", prompt_ids=[1], output_ids=[2]))
    record = store.update_conversation("conv_a", add_items=[{"id": "d"}, {"id": "e"}])
    assert ([i["id"] for i in record["items"]], record["added"]) == (["a", "c", "d", "e"], 2)
    with pytest.raises(StoreError, match="can be removed"):
        store.update_conversation("conv_a", remove_item="a")
    assert store.update_conversation("conv_a", remove_item="e")["added"] == 1
    rest: Any = {"conversation": "conv_a", "prompt_ids": [3], "output_ids": [4]}
    store.put_turn(Turn(id="resp_2", parent="resp_1", items=[{"id": "x"}], **rest))
    record = store.get_conversation("conv_a")
    assert record is not None
    assert record["added"] == 1  # that turn did not take it
    store.put_turn(Turn(id="resp_3", parent="resp_2", items=[{"id": "d"}], **rest))
    record = store.get_conversation("conv_a")
    assert record is not None
    assert ([item["id"] for item in record["items"]], record["added"]) == (["a", "c"], 0)
    assert record["metadata"] == {"k": "v"}


def test_delete_removes_everything(store: Store) -> None:
    before = store.stats()["live_bytes"]
    conversation = conversation_id()
    parent = None
    for _ in range(5):
        turn = make_turn(range(9000), [1], conversation=conversation, parent=parent)
        store.put_turn(turn)
        parent = turn.id
    assert store.delete_conversation(conversation)
    assert not store.delete_conversation(conversation)
    stats = store.stats()
    assert (stats["conversations"], stats["turns"]) == (0, 0)
    assert stats["live_bytes"] - before <= 4 * stats["page_size"]
    assert store.list_conversations() == []


def test_a_branch_elsewhere_keeps_its_past(store: Store) -> None:
    first = make_turn([1, 2], [3], conversation="conv_a")
    second = make_turn([4], [5], conversation="conv_a", parent=first.id)
    branch = make_turn([6], [7], conversation="conv_b", parent=first.id)
    for turn in (first, second, branch):
        store.put_turn(turn)
    store.delete_conversation("conv_a")
    assert store.get_turn(second.id) is None
    assert store.turn_ids(branch.id) == [1, 2, 3, 6, 7]
    store.delete_conversation("conv_b")
    assert store.stats()["turns"] == 0
