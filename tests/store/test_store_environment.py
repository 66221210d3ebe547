from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest
from made_states import make_turn
from redis_kit import eventually

from store.environment import Environment, _Task
from store.errors import StoreDamaged, StoreError, StoreStuck
from store.store import Store

HOLD = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=64 << 20, max_dbs=16)
txn = env.begin(write=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_engine_flags_and_modes(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "data" / "store", 64 << 20)
    env = store.environment.env
    assert env.lib_version()[0] == 0
    flags = env.flags()
    assert (flags["sync"], flags["metasync"], flags["writemap"], flags["lock"]) == (
        True,
        False,
        False,
        True,
    )
    for name in ("data.mdb", "lock.mdb", "owner.lock"):
        assert stat.S_IMODE((tmp_path / "data" / "store" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data" / "store").stat().st_mode) == 0o700
    store.close()


def test_one_owner(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 64 << 20)
    with pytest.raises(StoreError, match=f"process {os.getpid()} owns"):
        Store.open(tmp_path / "store", 64 << 20)
    store.close()
    Store.open(tmp_path / "store", 64 << 20).close()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        Store.open(tmp_path / "none", 64 << 20, create=False)
    with pytest.raises(StoreError, match="too small"):
        Store.open(tmp_path / "none", 1000)
    assert not (tmp_path / "none").exists()
    other = tmp_path / "other"
    other.mkdir()
    lmdb.open(str(other), lib_version=1).close()
    with pytest.raises(StoreError, match="another LMDB engine"):
        Store.open(other, 64 << 20)
    Store.open(tmp_path / "old", 64 << 20).close()
    with lmdb.open(str(tmp_path / "old"), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"\x81\xa6format\x63", db=env.open_db(b"meta", txn))
    with pytest.raises(StoreError, match="format"):
        Store.open(tmp_path / "old", 64 << 20)


def test_a_stuck_write_lock_is_an_error_not_a_hang(tmp_path: Path) -> None:
    environment = Environment.open(tmp_path / "store", 64 << 20)
    environment.heartbeat()
    environment.begin_seconds = 0.5
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        ran = []
        with pytest.raises(StoreStuck, match="another process"):
            environment.write(lambda txn: ran.append(1))
        with environment.read() as txn:
            assert txn.get(b"heartbeat", db=environment.meta)
        holder.stdin.close()

    def beats() -> bool:
        with contextlib.suppress(StoreStuck):  # the writing thread may not have woken up yet
            environment.heartbeat()
            return True
        return False

    eventually(beats, "the lock is not given up")
    assert ran == []  # given up means never run later
    environment.begin_seconds = 30.0
    environment.close()


def test_a_process_that_was_stopped_is_not_stuck(tmp_path: Path) -> None:
    looks: list[float | None] = []
    looked = threading.Event()

    class Stopped(Environment):
        """As seen by the first look after a stop of the whole process just inside `begin`."""

        @property
        def _begin_since(self) -> float | None:
            looks.append(None if looks else -1e9)
            if len(looks) > 1:
                looked.set()
            return looks[-1]

        @_begin_since.setter
        def _begin_since(self, value: float | None) -> None: ...

    environment = Stopped.open(tmp_path / "store", 64 << 20)
    environment.begin_seconds = 0.2
    environment._queue.put(_Task(lambda txn: looked.wait()))  # nobody waits for this one
    assert environment.write(lambda txn: 7) == 7
    environment.close()


@pytest.mark.parametrize("ends", [True, False])
def test_closing_waits_for_who_reads(tmp_path: Path, ends: bool) -> None:
    """What is unmapped under a reader ends the process; one that does not end keeps all open."""
    path = tmp_path / "store"
    environment = Environment.open(path, 64 << 20, begin_seconds=60.0 if ends else 0.1)
    environment.write(lambda txn: txn.put(b"k", b"v" * 3000, db=environment.meta))
    reading, go_on = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        with environment.read() as txn:
            value = txn.get(b"k", db=environment.meta)
            reading.set()
            assert go_on.wait(60)
            seen.append(bytes(value))

    reader = threading.Thread(target=read)
    closer = threading.Thread(target=environment.close)
    reader.start()
    assert reading.wait(60)
    closer.start()
    eventually(lambda: environment.closed, "closing does not begin")
    with pytest.raises(StoreError, match="closed"), environment.read():
        pass
    if ends:
        go_on.set()
    closer.join(60)
    assert not closer.is_alive()
    go_on.set()
    reader.join(60)
    assert seen == [b"v" * 3000]
    if ends:
        Environment.open(path, 0).close()
    else:
        with pytest.raises(StoreError, match="owns the store"):
            Environment.open(path, 0)
        environment.env.close()


def test_a_failed_transaction_changes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 64 << 20)

    def failing(txn: object) -> None:
        store.turns.put(txn, make_turn([1], [2], conversation="conv_a"))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.environment.write(failing)
    assert store.stats()["turns"] == 0
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get_turn("resp_a")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 64 << 20)
    store.put_turn(make_turn(range(50_000), [1], conversation="conv_a"))
    store.close()
    path = tmp_path / "store" / "data.mdb"
    os.truncate(path, path.stat().st_size - 16384)
    with pytest.raises(StoreError, match="cut short"):
        Store.open(tmp_path / "store", 64 << 20)


@pytest.mark.parametrize("meta", [True, False])
def test_damaged_pages_are_told_in_one_line(tmp_path: Path, meta: bool) -> None:
    store = Store.open(tmp_path / "store", 64 << 20)
    store.put_turn(make_turn(range(50_000), [1], conversation="conv_a"))
    page = store.environment.page_size
    store.close()
    path = tmp_path / "store" / "data.mdb"
    data = bytearray(path.read_bytes())
    for start in range(0, 2 * page, page) if meta else range(2 * page, len(data), page):
        # A page that tells its own number has a type behind it (LMDB: MDB_page.mp_flags).
        if int.from_bytes(data[start : start + 8], "little") == start // page:
            data[start + 10 : start + 12] = b"\0\0"
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match="put a copy of it back") as error:
        Store.open(tmp_path / "store", 64 << 20)
    assert len(str(error.value).splitlines()) == 1
    path.unlink()
    Store.open(tmp_path / "store", 64 << 20).close()
