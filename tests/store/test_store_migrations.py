"""Stores of other formats: migrated in one step, or refused and left byte for byte as they were."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import msgpack
import pytest
from made_states import conversation_id, make_state, make_turn

from store import environment, migrations
from store.environment import VALUE_BYTES
from store.errors import StoreError
from store.store import Store

SIZE = 64 << 20
DATA = Path(__file__).parent.parent / "data" / "store"


def made(path: Path) -> str:
    """A store with one turn and its state; returns the turn's id."""
    store = Store.open(path, SIZE)
    turn = make_turn(list(range(30)), [7, 8], conversation=conversation_id())
    store.put_turn(turn)
    store.save_state(turn.id, *make_state(store.turn_ids(turn.id)[:-1]))
    store.close()
    return turn.id


def content(path: Path) -> dict[str, dict[bytes, bytes]]:
    """Every table of a closed store."""
    env = environment._open_lmdb(path, 0, True)
    try:
        found = {}
        for name in environment.TABLES:
            table = env.open_db(name.encode())
            with env.begin() as txn:
                found[name] = dict(txn.cursor(db=table))
        return found
    finally:
        env.close()


def set_format(path: Path, **values: int) -> None:
    env = environment._open_lmdb(path, 0, True)
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        there = msgpack.unpackb(txn.get(b"format", db=meta))
        txn.put(b"format", msgpack.packb({**there, **values}), db=meta)
    env.close()


def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    made(tmp_path)
    set_format(tmp_path, format=environment.FORMAT + 1)
    before = content(tmp_path)
    with pytest.raises(StoreError, match="newer Tandem; update this one"):
        Store.open(tmp_path, SIZE)
    assert content(tmp_path) == before


def test_an_older_store_without_a_way_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    before = content(tmp_path)
    first = environment.FORMAT
    monkeypatch.setattr(environment, "FORMAT", first + 2)
    with pytest.raises(StoreError, match=f"cannot migrate format {first}: export"):
        Store.open(tmp_path, SIZE)
    assert content(tmp_path) == before


def test_other_pages_are_refused(tmp_path: Path) -> None:
    made(tmp_path)
    set_format(tmp_path, value=VALUE_BYTES // 2)
    with pytest.raises(StoreError, match="export its conversations on the machine"):
        Store.open(tmp_path, SIZE)


def mark(number: int) -> migrations.Step:
    def step(env: Any, txn: Any) -> None:
        txn.put(b"step-%d" % number, b"done", db=env.open_db(b"meta", txn=txn))

    return step


def test_an_older_store_is_migrated_by_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = made(tmp_path)
    first = environment.FORMAT
    monkeypatch.setattr(environment, "FORMAT", first + 2)
    monkeypatch.setattr(environment, "MIGRATIONS", {n: mark(n) for n in (first, first + 1)})
    store = Store.open(tmp_path, SIZE)
    try:
        assert store.turn_ids(turn)[-2:] == [7, 8]
        ref = store.find_state(turn)
        assert ref is not None
        assert ref.tokens == 31
        assert store.check().clean
    finally:
        store.close()
    meta = content(tmp_path)["meta"]
    assert msgpack.unpackb(meta[b"format"])["format"] == first + 2
    assert meta[b"step-%d" % first] == meta[b"step-%d" % (first + 1)] == b"done"
    Store.open(tmp_path, SIZE).close()  # a second time there is nothing to do


def test_a_migration_that_fails_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = made(tmp_path)
    before = content(tmp_path)
    first = environment.FORMAT

    def breaks(env: Any, txn: Any) -> None:
        txn.drop(env.open_db(b"turn", txn=txn), delete=False)
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(environment, "FORMAT", first + 2)
        patch.setattr(environment, "MIGRATIONS", {first: mark(first), first + 1: breaks})
        with pytest.raises(StoreError, match=r"no such luck.*as it was"):
            Store.open(tmp_path, SIZE)
    assert content(tmp_path) == before
    store = Store.open(tmp_path, SIZE)
    assert store.get_turn(turn) is not None
    store.close()


def test_a_store_of_format_1_keeps_what_was_said(tmp_path: Path) -> None:
    with zipfile.ZipFile(DATA / "format-1.zip") as archive:
        archive.extract("data.mdb", tmp_path)
    store = Store.open(tmp_path, SIZE)
    try:
        assert msgpack.unpackb(content_of(store, b"format"))["format"] == environment.FORMAT
        listed = store.list_conversations()
        assert len(listed) == 2
        (first,) = [one for one in listed if one["id"] == "conv_" + "1" * 32]
        assert first["turns"] == 2
        assert store.turn_ids(first["head"]) == [*range(30), 7, 8, 40, 41, 42, 9]
        assert [turn.output_ids for turn in store.path(first["head"])] == [[7, 8], [9]]
        assert store.find_state(first["head"]) is None  # computed again when it goes on
        assert store.check().clean
        store.save_state(first["head"], *make_state(store.turn_ids(first["head"])[:-1]))
        assert store.find_state(first["head"]) is not None
        assert store.check().clean
    finally:
        store.close()
    Store.open(tmp_path, SIZE).close()


def content_of(store: Store, key: bytes) -> bytes:
    with store.environment.read() as txn:
        return bytes(txn.get(key, db=store.environment.meta))
