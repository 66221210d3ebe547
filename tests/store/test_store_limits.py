"""Pins, shares of owners, the day's budget of written bytes, and warming up after a start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_states import MODEL, conversation_id, make_state, make_turn

from store.errors import OverBudget, StoreFull
from store.parts import PART_BYTES
from store.quotas import Limits
from store.store import Store
from store.warming import Warming

SIZE = 128 << 20
Opener = Callable[[Limits], Store]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    stores: list[Store] = []

    def opener(limits: Limits) -> Store:
        stores.append(Store.open(tmp_path / f"store{len(stores)}", SIZE, limits=limits))
        return stores[-1]

    yield opener
    for store in stores:
        store.close()


def save(store: Store, number: int, owner: str, parts: int = 5, parent: str | None = None) -> str:
    """A turn of an owner's and its state, in a conversation of its own unless it has a parent."""
    own = range(1000 * number, 1000 * number + 40)
    held = store.get_turn(parent) if parent else None
    conversation = held.conversation if held else conversation_id()
    turn = make_turn(list(own)[:-1], [own[-1]], conversation=conversation, parent=parent)
    turn.owner = owner
    store.put_turn(turn)
    ids = store.turn_ids(turn.id)[:-1]
    store.save_state(turn.id, *make_state(ids, snapshot_bytes=parts * PART_BYTES))
    return turn.id


def conversation_of(store: Store, turn: str) -> str:
    found = store.get_turn(turn)
    assert found is not None
    return found.conversation


@pytest.mark.usefixtures("quick")
def test_pinned_conversations_stay(opened: Opener) -> None:
    store = opened(Limits())
    first = save(store, 0, "")
    store.update_conversation(conversation_of(store, first), pinned=True)
    turns = [save(store, number, "") for number in range(1, 40)]
    assert store.find_state(first)
    assert store.find_state(turns[0]) is None
    store.update_conversation(conversation_of(store, first), pinned=False)
    for number in range(40, 70):
        save(store, number, "")
    assert store.find_state(first) is None
    assert store.check().clean


def test_a_store_full_of_pins_says_so_and_keeps_everything(opened: Opener) -> None:
    store = opened(Limits())
    turns: list[str] = []

    def fill() -> None:
        for number in range(60):
            turns.append(save(store, number, ""))
            store.update_conversation(conversation_of(store, turns[-1]), pinned=True)

    with pytest.raises(StoreFull, match="pinned"):
        fill()
    assert len(turns) > 10
    assert all(store.find_state(turn) for turn in turns)


@pytest.mark.usefixtures("quick")
def test_an_owner_keeps_within_its_share(opened: Opener) -> None:
    limit = 30 * PART_BYTES
    store = opened(Limits(owner_bytes=limit))
    others = [save(store, 100 + number, "b", 2) for number in range(4)]
    turns = [save(store, number, "a") for number in range(20)]
    assert 0 < store.quotas.used("a") <= limit
    kept = [turn for turn in turns if store.find_state(turn)]
    assert kept == turns[-len(kept) :]
    assert 3 <= len(kept) < 6
    assert all(store.find_state(turn) for turn in others)
    assert store.check().clean
    with pytest.raises(StoreFull, match="share"):
        save(store, 50, "a", 31)
    assert [turn for turn in turns if store.find_state(turn)] == kept


def test_an_owner_may_have_a_share_of_its_own(opened: Opener) -> None:
    store = opened(Limits())
    store.quotas.limit_of = lambda owner: 20 * PART_BYTES if owner == "a" else 0
    others = [save(store, 100 + number, "b") for number in range(10)]
    turns = [save(store, number, "a") for number in range(10)]
    assert 0 < store.quotas.used("a") <= 20 * PART_BYTES
    assert [turn for turn in turns if store.find_state(turn)] != turns
    assert all(store.find_state(turn) for turn in others)


def test_shared_blocks_count_once_for_an_owner(opened: Opener) -> None:
    store = opened(Limits(owner_bytes=100 * PART_BYTES))
    first = save(store, 0, "a", 3)
    before = store.quotas.used("a")
    save(store, 1, "a", 3, parent=first)
    both = store.quotas.used("a")
    assert both < 2 * before + 100_000
    store.drop_state(first)
    assert store.quotas.used("a") < both


def test_a_spent_budget_stops_large_snapshots_only(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: today)  # also at midnight
    store = opened(Limits(daily_bytes=20 * PART_BYTES))
    turns = [save(store, number, "", 5) for number in range(3)]
    written = store.stats()["written_today_bytes"]
    assert 15 * PART_BYTES <= written <= 20 * PART_BYTES
    with pytest.raises(OverBudget, match="today"):
        save(store, 10, "", 5)
    assert store.stats()["turns"] == 4
    ids = list(range(11_000, 11_040))
    turn = make_turn(ids[:-1], ids[-1:], conversation=conversation_id())
    store.put_turn(turn)
    store.save_state(turn.id, *make_state(ids[:-1], snapshot_bytes=100))
    assert store.find_state(turn.id)
    assert all(store.find_state(turn) for turn in turns)
    found = store.stats()
    assert found["over_daily_budget"] == 1
    assert found["written_today_bytes"] > written


def test_the_latest_states_are_warmed_within_the_budget(opened: Opener) -> None:
    store = opened(Limits())
    turns = [save(store, number, "", 4) for number in range(5)]
    warming = Warming(store, 1 << 40)
    warming.wait()
    assert warming.states == len(turns)
    assert warming.nbytes == store.stats()["payload_bytes"]
    some = Warming(store, 9 * PART_BYTES)
    some.wait()
    assert some.states == 2
    assert some.nbytes <= 9 * PART_BYTES
    store.drop_state(turns[-1])
    none = Warming(store, 0)
    none.close()
    assert (none.states, none.nbytes) == (0, 0)
    assert store.load_state(turns[0], MODEL) is not None
