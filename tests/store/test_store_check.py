from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb.verify
import pytest
from made_states import MODEL, make_state, make_turn, payloads

from store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", 128 << 20)
    parent = None
    for number in range(4):
        ids = range(100 * number, 100 * number + 100)
        turn = make_turn(
            ids[:-3], ids[-3:], conversation="conv_a", parent=parent, ident=f"resp_{number}"
        )
        opened.put_turn(turn)
        pieces, snapshot = make_state(
            range(ids[-1]), start=(100 * number - 1) // 16 * 16 if number else 0, row_bytes=20_000
        )
        opened.save_state(turn.id, pieces, snapshot)
        parent = turn.id
    opened.put_turn(make_turn([1], [2], conversation="conv_b", parent="resp_1", ident="resp_b"))
    opened.create_conversation("conv_c", "ben", {"x": "y"})
    yield opened
    opened.close()


def test_a_healthy_store_is_clean(store: Store) -> None:
    report = store.check()
    assert report.clean, report.problems
    assert (report.states, report.turns, report.conversations) == (4, 5, 3)
    assert report.bytes_read == store.stats()["payload_bytes"]
    store.delete_conversation("conv_a")
    report = store.check()
    assert report.clean, report.problems
    assert (report.states, report.turns) == (0, 3)
    store.environment.env.sync(True)
    assert not lmdb.verify.verify(str(store.environment.path))


def change(store: Store, table: str, change: Callable[[bytes, bytes], bytes | None]) -> None:
    """Rewrite (or delete, on None) the first entry of a table for which something changes."""

    def work(txn: lmdb.Transaction) -> None:
        database = getattr(store.environment, table)
        for key, value in list(txn.cursor(db=database)):
            new = change(key, value)
            if new is None:
                txn.delete(key, db=database)
                return
            if new != value:
                txn.put(key, new, db=database)
                return
        raise AssertionError("nothing changed")

    store.environment.write(work)


def only(prefix: bytes) -> Callable[[bytes, bytes], bytes | None]:
    return lambda key, value: None if key.startswith(prefix) else value


DERIVED = {
    "references": ("blk", lambda key, value: value[:4] + b"\x09\0\0\0" + value[8:]),
    "prefix index": ("index", lambda key, value: None),
    "use order": ("lru", lambda key, value: None),
    "children": ("turn", lambda key, value: value[:8] + b"\x07\0\0\0" + value[12:]),
    "total tokens": ("turn", lambda key, value: b"\x01" + value[1:]),
    "membership": ("conv", only(b"conv_a\0")),
    "list": ("order", lambda key, value: None),
    "totals": ("meta", lambda key, value: b"\1" * 24 if key == b"totals" else value),
}


@pytest.mark.parametrize("what", DERIVED)
def test_what_follows_from_records_is_repaired(store: Store, what: str) -> None:
    table, changed = DERIVED[what]
    change(store, table, changed)
    report = store.check()
    assert not report.clean
    assert not report.dropped
    assert store.check(repair=True).repaired
    report = store.check()
    assert report.clean, report.problems
    assert report.states == 4
    for number in range(4):
        reader = store.load_state(f"resp_{number}", MODEL)
        assert reader is not None
        pieces = list(reader)
        assert reader.report.complete
        state = make_state(range(100 * number + 99), row_bytes=20_000)
        assert [bytes(piece.payload) for piece in pieces] == payloads(*state)
    store.put_turn(make_turn([9], [9], conversation="conv_a", parent="resp_3"))
    assert store.check().clean


@pytest.mark.parametrize(
    ("table", "changed"),
    [
        ("dat", lambda key, value: None),
        ("dat", lambda key, value: value[:1000] + bytes([value[1000] ^ 1]) + value[1001:]),
        ("dat", lambda key, value: value[:20] + b"\0" * 16 + value[36:]),
        ("blk", lambda key, value: None),
        ("blk", lambda key, value: value[:10]),
        ("blk", lambda key, value: value[:64] + b"\xff" + value[65:]),
        ("pages", only(b"h")),
        ("pages", lambda key, value: value[:-1] + b"!" if key[:1] == b"h" else value),
    ],
)
def test_states_with_damage_are_dropped_and_the_rest_is_kept(
    store: Store, table: str, changed: Callable[[bytes, bytes], bytes | None]
) -> None:
    change(store, table, changed)
    assert not store.check().clean
    report = store.check(repair=True)
    assert report.dropped
    assert not report.lost
    report = store.check()
    assert report.clean, report.problems
    assert store.stats()["turns"] == 5
    assert store.turn_ids("resp_3") == list(range(400))
    for number in range(4):
        if store.find_state(f"resp_{number}"):
            reader = store.load_state(f"resp_{number}", MODEL)
            assert reader is not None
            assert len(list(reader)) > 1
            assert reader.report.complete
        store.save_state(f"resp_{number}", *make_state(range(100 * number + 99), row_bytes=20_000))
    assert store.check().clean


def test_orphans_are_removed(store: Store) -> None:
    environment = store.environment
    before = store.stats()

    def work(txn: lmdb.Transaction) -> None:
        txn.put(b"\7" * 18, b"\0" * ((1 << 20) - 16), db=environment.dat)
        txn.put(b"h" + b"\7" * 16 + b"\0\0", b"x", db=environment.pages)
        txn.put(b"\7" * 16, b"", db=environment.pend)
        txn.put(b"\0" * 8 + b"resp_x", b"", db=environment.lru)

    environment.write(work)
    report = store.check()
    assert report.found == 4
    store.check(repair=True)
    assert store.check().clean
    after = store.stats()
    assert (after["values"], after["objects"]) == (before["values"], before["objects"])


def test_a_damaged_turn_is_reported_and_nothing_else_is_lost(store: Store) -> None:
    change(
        store,
        "pages",
        lambda key, value: value[:-1] + b"!" if key[:7] == b"iresp_1" else value,
    )
    report = store.check(repair=True)
    assert "resp_1" in report.lost
    assert set(report.dropped) == {"resp_1", "resp_2", "resp_3"}
    assert store.find_state("resp_0")
    assert store.get_turn("resp_3") is not None
    again = store.check()
    assert set(again.lost) == {"resp_1", "resp_2", "resp_b"}
    assert not again.dropped
    store.delete_conversation("conv_b")
    store.delete_conversation("conv_a")
    report = store.check()
    assert report.clean, report.problems


def test_states_inside_prompts_that_were_not_kept_are_found_and_swept(tmp_path: Path) -> None:
    """A process that dies before a first turn is kept leaves what it has stored of its prompt."""
    ids, kept = list(range(1000, 1064)), list(range(2000, 2064))
    for swept in (False, True):
        store = Store.open(tmp_path / "store", 128 << 20)
        store.create_conversation("conv_c", "ben")
        store.save_prefix("anna", ids, *make_state(ids), conversation="conv_new", gain=64)
        store.save_prefix("ben", kept, *make_state(kept), conversation="conv_c", gain=64)
        assert store.check().clean, "its turn may be under way"
        store.close()
        store = Store.open(tmp_path / "store", 128 << 20, create=False)
        if swept:
            assert store.sweep() == 1
        else:
            found = store.check().problems[0]
            assert found.startswith("orphan: the state cut_")
            assert found.endswith("a prompt of conversation conv_new, which is not stored")
            assert len(store.check(repair=True).dropped) == 1
        assert store.check().clean
        assert store.stats()["inside_prompts"] == 1
        assert store.sweep() == 0
        store.close()
