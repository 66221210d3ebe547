"""What of a state is in memory, and reading what is not."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from made_states import MODEL, conversation_id, feeding, make_state, make_turn, payloads

from store.commands import register
from store.compaction import compact
from store.statistics import residency
from store.store import Store

SNAPSHOT = 3_000_000


def filled(path: Path) -> str:
    store = Store.open(path, 128 << 20)
    turn = make_turn(range(199), [199], conversation=conversation_id())
    store.put_turn(turn)
    store.save_state(turn.id, *make_state(range(160), row_bytes=20_000, snapshot_bytes=SNAPSHOT))
    store.close()
    return turn.id


def forget(path: Path) -> None:
    """Ask the kernel to drop the file from the page cache; nothing maps it now."""
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no way to empty the page cache")
@pytest.mark.parametrize("state", ["as written", "compacted"])
def test_a_cold_state_is_read_from_where_it_lies(tmp_path: Path, state: str) -> None:
    path = tmp_path / "store"
    turn = filled(path)
    if state == "compacted":
        compact(path)  # pages have other numbers: the hints are wrong
    forget(path)
    store = Store.open(path, 0)
    try:
        (row,) = residency(store)
        assert row["bytes"] == (10 + 3) << 20
        reader = store.load_state(turn, MODEL)
        assert reader is not None
        pieces, snapshot = make_state(range(160), row_bytes=20_000, snapshot_bytes=SNAPSHOT)
        assert reader.feed(feeding) == payloads(pieces, snapshot)
        if state == "as written":
            (row,) = residency(store)
            assert row["resident_bytes"] >= sum(map(len, payloads(pieces, snapshot)))
        assert store.check().clean
    finally:
        store.close()


def test_the_share_in_memory_is_told_by_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "store")
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    command = ["store", "stats", "--data", str(tmp_path), "--recent", "5"]
    for form in ([], ["--json"]):
        arguments = parser.parse_args([*command, *form])
        assert arguments.run(arguments) == 0
    head, told, line = capsys.readouterr().out.splitlines()
    assert "in memory" in head
    turn, conversation, *_ = told.split()
    assert (turn[:5], conversation[:5]) == ("resp_", "conv_")
    (row,) = json.loads(line)["residency"]
    assert 0 < row["resident_bytes"] <= row["bytes"]


def test_places_go_with_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "store"
    turn = filled(path)
    store = Store.open(path, 0)
    try:
        store.drop_state(turn)
        assert store.check().clean, "nothing is left of what was freed"
    finally:
        store.close()
