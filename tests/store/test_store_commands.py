from __future__ import annotations

import argparse
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgpack
import pytest
from made_states import MODEL, make_state, make_turn, payloads

from store import commands
from store.bundle import _Writer
from store.commands import register, size
from store.environment import VALUE_BYTES
from store.errors import StoreError
from store.paths import data_dir, socket_path, store_dir
from store.serving import serve
from store.store import Store


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="tdm-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        monkeypatch.setenv("TANDEM_DATA", str(Path(path) / "data"))
        yield Path(path) / "data"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["store", *words])
    result: int = arguments.run(arguments)
    return result


def fill(data: Path, count: int = 3) -> None:
    store = Store.open(store_dir(data), 128 << 20)
    parent = None
    for number in range(count):
        ids = range(100 * number, 100 * number + 100)
        turn = make_turn(
            ids[:-3], ids[-3:], conversation="conv_a", parent=parent, ident=f"resp_{number}"
        )
        store.put_turn(turn)
        start = (100 * number - 1) // 16 * 16 if number else 0
        store.save_state(turn.id, *make_state(range(ids[-1]), start=start, row_bytes=20_000))
        parent = turn.id
    store.update_conversation("conv_a", metadata={"topic": "x"})
    store.close()


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_commands_with_and_without_an_owner(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats") == 1
    assert "there is no store" in capsys.readouterr().err
    fill(data)
    assert run("stats", "--json") == 0
    alone = said(capsys)
    assert (alone["conversations"], alone["turns"], alone["states"]) == (1, 3, 3)
    store = Store.open(store_dir(data), 128 << 20)
    assert run("stats") == 1
    assert "does not answer" in capsys.readouterr().err
    server = serve(store, socket_path(data))
    assert run("stats") == 0
    assert "conversations  1" in capsys.readouterr().out
    assert run("check", "--json") == 0
    assert said(capsys)["clean"] is True
    assert run("evict", "115M", "--json") == 0
    assert said(capsys)["evicted"] == 3
    assert run("evict", "115M") == 0
    assert re.fullmatch(r"evicted 0, live share \d+\.\d\d%\n", capsys.readouterr().out)
    assert run("compact") == 1
    assert "owns the store, which must not be in use: stop Tandem" in capsys.readouterr().err
    server.close()
    store.close()


def test_an_owner_that_is_stuck_is_not_waited_for(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LOOKUP_SECONDS", 0.1)
    fill(data)
    store = Store.open(store_dir(data), 128 << 20)
    path = socket_path(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:  # takes connections and answers nothing
        listener.bind(str(path))
        listener.listen()
        assert run("stats") == 1
    assert f"process {os.getpid()} owns the store but does not answer" in capsys.readouterr().err
    store.close()


def test_every_row_of_the_statistics_is_explained(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(data)
    assert run("stats", "--json") == 0
    rows = set(said(capsys)) - {"path", "page_size", "conversations", "turns", "states"}
    told = commands._STATS
    for name in rows:
        word = name.replace("_", " ")
        for several in ("inside prompts", "written", "evicted"):
            if word.startswith(several):
                word = several
        assert word in told


def test_check_says_what_it_found(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data)
    assert run("check") == 0
    assert "no problems" in capsys.readouterr().out
    store = Store.open(store_dir(data), 0)
    environment = store.environment

    def work(txn: object) -> None:
        cursor = txn.cursor(db=environment.dat)  # type: ignore[attr-defined]
        cursor.last()
        cursor.delete()

    environment.write(work)
    store.close()
    assert run("check", "--quick") == 1
    assert "lacks a part" in capsys.readouterr().out
    assert run("check", "--repair") == 0
    assert "(repaired)" in capsys.readouterr().out
    assert run("check") == 0


def test_a_conversation_moves_to_another_store(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(data)
    bundle = tmp_path / "conversation.tandem"
    assert run("export", "conv_a", str(bundle), "--json") == 0
    assert said(capsys) == {"turns": 3, "states": 3, "bytes": bundle.stat().st_size}
    assert bundle.stat().st_mode & 0o777 == 0o600
    assert bundle.stat().st_size < 1.02 * (299 * 20_000 + 11 * 20_000 * 2 + 3 * 200_000)
    assert run("export", "conv_a", str(bundle)) == 1
    assert "cannot write" in capsys.readouterr().err
    other = tmp_path / "other"
    Store.open(store_dir(other), 128 << 20).close()
    for _ in range(2):
        assert run("import", str(bundle), "--data", str(other)) == 0
    store = Store.open(store_dir(other), 0)
    record = store.get_conversation("conv_a")
    assert record is not None
    assert (record["head"], record["metadata"]) == ("resp_2", {"topic": "x"})
    for number in range(3):
        reader = store.load_state(f"resp_{number}", MODEL)
        assert reader is not None
        state = make_state(range(100 * number + 99), row_bytes=20_000)
        assert [bytes(piece.payload) for piece in reader] == payloads(*state)
    assert store.turn_ids("resp_2") == list(range(300))
    assert store.check().clean
    store.close()


def test_a_bundle_with_any_byte_changed_is_refused(data: Path, tmp_path: Path) -> None:
    fill(data, 1)
    bundle = tmp_path / "conversation.tandem"
    assert run("export", "conv_a", str(bundle)) == 0
    whole = bundle.read_bytes()
    other = Store.open(tmp_path / "other", 64 << 20)
    spoiled = tmp_path / "spoiled"
    places = [*range(60), *range(60, len(whole), len(whole) // 60), len(whole) - 1]
    for place in places:
        spoiled.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        with pytest.raises(StoreError, match="not a whole"):
            other.import_conversation(spoiled)
        spoiled.write_bytes(whole[:place])
        with pytest.raises(StoreError, match=r"not a whole|cannot read"):
            other.import_conversation(spoiled)
    assert other.stats()["turns"] == other.stats()["objects"] == 0
    other.close()


def test_ids_that_are_taken_change_as_a_whole(data: Path, tmp_path: Path) -> None:
    fill(data)
    bundle = tmp_path / "conversation.tandem"
    assert run("export", "conv_a", str(bundle)) == 0
    store = Store.open(store_dir(data), 0)
    before = store.get_conversation("conv_a"), store.stats()["turns"]
    made = store.import_conversation(bundle, "mallory")
    assert (store.get_conversation("conv_a"), store.stats()["turns"] - 3) == before
    names = made["renamed"]
    assert set(names) == {"conv_a", "resp_0", "resp_1", "resp_2"}
    assert made["conversation"] == names["conv_a"]
    assert store.conversation_turns(names["conv_a"]) == [names[f"resp_{n}"] for n in range(3)]
    assert store.turn_ids(names["resp_2"]) == store.turn_ids("resp_2")
    turn = store.get_turn(names["resp_1"])
    assert turn is not None
    assert (turn.owner, turn.parent) == ("mallory", names["resp_0"])
    reader = store.load_state(names["resp_2"], MODEL)
    assert reader is not None
    state = make_state(range(299), row_bytes=20_000)
    assert [bytes(piece.payload) for piece in reader] == payloads(*state)
    # Again the same; and what is the owner's own stays where it is.
    assert store.import_conversation(bundle, "mallory") == {**made, "bytes": 0}
    assert store.import_conversation(bundle)["renamed"] == {}
    assert store.import_conversation(bundle, "other")["conversation"] != made["conversation"]
    assert store.check().clean
    store.close()


def test_the_same_id_with_other_contents_is_another_conversation(
    data: Path, tmp_path: Path
) -> None:
    fill(data, 2)
    bundle = tmp_path / "conversation.tandem"
    assert run("export", "conv_a", str(bundle)) == 0
    other = Store.open(tmp_path / "other", 64 << 20)
    other.put_turn(make_turn(range(9), range(3), conversation="conv_a", ident="resp_0"))
    made = other.import_conversation(bundle)
    assert set(made["renamed"]) == {"conv_a", "resp_0", "resp_1"}
    assert other.turn_ids("resp_0") == [*range(9), *range(3)]
    assert other.conversation_turns("conv_a") == ["resp_0"]
    assert len(other.turn_ids(made["renamed"]["resp_1"])) == 200
    other.close()


def test_a_bundle_stands_by_itself(tmp_path: Path) -> None:
    def forge(*frames: tuple[bytes, dict[str, object]]) -> Path:
        path = tmp_path / "forged"
        with path.open("wb") as file:
            writer = _Writer(file)
            for kind, body in frames:
                writer.frame(kind, msgpack.packb(body))
            writer.frame(b"E", msgpack.packb(writer.frames))
        return path

    store = Store.open(tmp_path / "store", 64 << 20)
    theirs = make_turn(range(9), range(3), conversation="conv_t", ident="resp_t")
    store.put_turn(replace(theirs, owner="alice"))
    head = {
        "id": "conv_m", "owner": "x", "metadata": {}, "created": 1.0, "items": msgpack.packb([])
    }  # fmt: skip
    mine = make_turn(range(5), range(2), conversation="conv_m", ident="resp_m")
    for wrong in (
        [replace(mine, parent="resp_t")],  # goes on from what is another's
        [mine, mine],
        [replace(mine, parent="resp_n"), replace(mine, id="resp_n")],
    ):
        frames = [(b"T", turn.to_dict()) for turn in wrong]
        with pytest.raises(StoreError, match="not a whole"):
            store.import_conversation(forge((b"C", head), *frames), "mallory")
    state = {"turn": "resp_t", "objects": []}
    with pytest.raises(StoreError, match="not a whole"):
        store.import_conversation(forge((b"C", head), (b"S", state)), "mallory")
    assert store.get_conversation("conv_m") is None
    # A turn of another's conversation enters a new one.
    into = replace(mine, conversation="conv_t")
    made = store.import_conversation(forge((b"C", head), (b"T", into.to_dict())), "mallory")
    assert store.conversation_turns("conv_t") == ["resp_t"]
    assert set(made["renamed"]) == {"conv_m", "conv_t", "resp_m"}
    store.close()


def test_compact_gives_space_back(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data)
    store = Store.open(store_dir(data), 0)
    store.drop_state("resp_2")
    store.close()
    assert run("compact", "--json") == 0
    found = said(capsys)
    assert isinstance(found["bytes_before"], int)
    assert isinstance(found["bytes_after"], int)
    assert found["bytes_after"] <= found["bytes_before"] - 5 * VALUE_BYTES
    assert (store_dir(data) / "data.mdb").stat().st_size == found["bytes_after"]
    assert (store_dir(data) / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert run("check") == 0
    assert sorted(path.name for path in store_dir(data).iterdir()) == [
        "data.mdb",
        "lock.mdb",
        "owner.lock",
    ]


def test_sizes() -> None:
    assert [size(text) for text in ("10", "1.5k", "2G", "1T")] == [10, 1500, 2 * 10**9, 10**12]
    with pytest.raises(argparse.ArgumentTypeError):
        size("ten")


def test_paths_follow_the_configuration(data: Path) -> None:
    from scheduler.config import Config

    config = Config(data_dir=data_dir())
    assert data_dir() == config.data_dir == data
    assert socket_path(data) == config.store_socket


def test_capacity_follows_from_what_is_stored(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store.open(store_dir(data), 128 << 20).close()
    assert run("stats", "--capacity") == 1
    assert "no state is stored" in capsys.readouterr().err
    fill(data)
    assert run("stats", "--capacity", "--json", "--size", "300G") == 0
    table = said(capsys)["capacity"]
    assert isinstance(table, list)
    for row in table:
        # Here each block of 16 tokens takes one value, and so does the snapshot.
        values = -(-row["tokens"] // 16) + 1
        assert row["bytes"] == values * VALUE_BYTES + 8 * row["tokens"]
        assert row["conversations"] == int(300e9 * 0.88) // row["bytes"]
        assert row["total_tokens"] == row["conversations"] * row["tokens"]
    assert run("stats", "--capacity") == 0
    assert "17,500" in capsys.readouterr().out


def test_what_was_just_written_is_resident(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    today = time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: today)  # also at midnight
    fill(data)
    assert run("stats", "--json") == 0
    found = said(capsys)
    resident, written, file = (
        found[name] for name in ("resident_bytes", "written_today_bytes", "file_bytes")
    )
    assert isinstance(resident, int)
    assert isinstance(written, int)
    assert isinstance(file, int)
    assert 0 < resident <= (store_dir(data) / "data.mdb").stat().st_size
    assert written >= 300 * 20_000
    assert file > 0
