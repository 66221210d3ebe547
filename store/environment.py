"""The LMDB environment: one owner, one writing thread, fixed tables, page accounting.

LMDB lets one thread of one process write at a time. On macOS its lock is a named semaphore that
is not released when its holder dies, so a second process in the environment can leave the next
writer waiting for ever. Three rules follow: the directory is locked before LMDB is opened; all
writing is done by one thread; and whoever waits for that thread stops waiting when it has been
stuck in `begin` for too long.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import lmdb
import msgpack

from store.data_map import DataMap
from store.errors import MapFull, StoreDamaged, StoreError, StoreFull, StoreStuck
from store.migrations import MIGRATIONS, migrate

log = logging.getLogger(__name__)
Txn: TypeAlias = Any
Table: TypeAlias = Any
T = TypeVar("T")

FORMAT = 2
VALUE_BYTES = (1 << 20) - 16
"""Length of every bulk value: with LMDB's 16-byte page header exactly 1 MiB, which is 64 pages of
16 KiB (macOS on Apple silicon) or 256 pages of 4 KiB. Equal page counts keep every freed run
reusable; sizes that differ by a few pages fragment the map within days."""
TABLES = (
    "blk", "conv", "dat", "index", "lru", "meta", "order", "pages", "pend", "snap", "state", "turn",
)  # fmt: skip
LIVE_CEILING = 0.88
"""Largest share of the map that may be live; eviction keeps below it ahead of need."""
BEGIN_SECONDS = 10.0
RESERVE_BYTES = 32 << 20
"""Free disk below which nothing large is written, unless told otherwise."""
_DAMAGED = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.PanicError)


class _Task(Generic[T]):
    """One piece of work for the writing thread and its outcome."""

    def __init__(self, work: Callable[[Txn], T]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only: the writer runs the task or the waiter drops it."""
        return self._claim.acquire(blocking=False)


class Environment:
    """An open LMDB environment that this process owns until `close`."""

    def __init__(self, path: Path, env: Any, lock_fd: int, begin_seconds: float) -> None:
        self.path = path
        self.env = env
        self.begin_seconds = begin_seconds
        self.reserve_bytes = RESERVE_BYTES
        self.page_size = int(env.stat()["psize"])
        self.map_pages = int(env.info()["map_size"]) // self.page_size
        self.value_pages = (VALUE_BYTES + 16) // self.page_size
        self.blk: Table = env.open_db(b"blk")
        self.conv: Table = env.open_db(b"conv")
        self.dat: Table = env.open_db(b"dat")
        self.index: Table = env.open_db(b"index")
        self.lru: Table = env.open_db(b"lru")
        self.meta: Table = env.open_db(b"meta")
        self.order: Table = env.open_db(b"order")
        self.pages: Table = env.open_db(b"pages")
        self.pend: Table = env.open_db(b"pend")
        self.snap: Table = env.open_db(b"snap")
        self.state: Table = env.open_db(b"state")
        self.turn: Table = env.open_db(b"turn")
        self.data_fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        self.data_map = DataMap(self.data_fd, self.map_pages * self.page_size)
        self._lock_fd = lock_fd
        self._queue: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._begin_since: float | None = None
        self.closed = False
        self._open = True
        self._readers = 0
        self._reading = threading.Condition()
        self._writer = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._writer.start()

    @classmethod
    def open(
        cls,
        path: Path,
        size_bytes: int,
        *,
        create: bool = True,
        begin_seconds: float = BEGIN_SECONDS,
    ) -> Environment:
        """Lock the directory and open the environment in it.

        `size_bytes` is the cap of the data file, at least 32 MiB; 0 keeps that of an existing
        store. Raises StoreError if another process owns the directory, if it holds no store and
        `create` is false, or if the store was written by another format; StoreDamaged if LMDB
        cannot read its own pages.
        """
        exists = (path / "data.mdb").exists()
        if not exists and not create:
            raise StoreError(
                f"there is no store in {path}: `tandem up` makes one; if it did, check the data "
                "directory"
            )
        if size_bytes < 32 << 20 and not (size_bytes == 0 and exists):
            raise StoreError(f"a store of {size_bytes} bytes is too small: give it 32 MiB or more")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = _lock_directory(path)
        try:
            env = _open_lmdb(path, size_bytes, exists)
        except BaseException:
            os.close(lock_fd)
            raise
        try:
            _check_format(env)
            return cls(path, env, lock_fd, begin_seconds)
        except BaseException as error:
            env.close()
            os.close(lock_fd)
            if isinstance(error, lmdb.Error):
                raise _translate(error, path) from error
            raise

    # ------------------------------------------------------------------ transactions

    @contextmanager
    def read(self) -> Iterator[Txn]:
        """A read transaction; what it returns are views of the map that die with it.

        Raises StoreDamaged if LMDB cannot read its own pages.
        """
        with self._reading:
            if self.closed:
                raise StoreError("the store is closed: open it again")
            self._readers += 1
        try:
            with self.env.begin(buffers=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise _translate(error, self.path) from error
        finally:
            with self._reading:
                self._readers -= 1
                self._reading.notify_all()

    def write(self, work: Callable[[Txn], T]) -> T:
        """Run `work` in a write transaction on the writing thread and return after its commit.

        An exception in `work` rolls everything back and is raised here. Raises MapFull or
        StoreFull when the map or the disk is full, StoreStuck when the write lock is not given
        in time.
        """
        task = _Task(work)
        if self.closed:
            raise StoreError("the store is closed: open it again")
        if threading.current_thread() is self._writer:
            raise StoreError("write transactions do not nest")
        self._queue.put(task)
        suspect: float | None = None
        while not task.done.wait(self.begin_seconds / 4):
            since = self._begin_since
            late = since is not None and time.monotonic() - since > self.begin_seconds
            # Seen late twice: where this process itself was stopped, once says nothing.
            stuck, suspect = late and since == suspect, since if late else None
            if (stuck or not self._writer.is_alive()) and task.claim():
                raise StoreStuck(
                    f"no write lock within {self.begin_seconds:g} s: another process holds the "
                    f"store in {self.path} open; end it (lsof shows it) and start again"
                )
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[return-value]  # set whenever error is None

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                self._begin_since = time.monotonic()
                txn = self.env.begin(write=True)
                self._begin_since = None
                if task.claim():
                    task.result = _commit(txn, task.work)
                else:
                    txn.abort()
            except lmdb.MapFullError:
                task.error = MapFull("the store's map is full: raise its size or evict")
            except lmdb.Error as error:
                task.error = _translate(error, self.path)
            except BaseException as error:
                task.error = error
            finally:
                self._begin_since = None
                task.done.set()
                del task

    def heartbeat(self) -> None:
        """One small commit: pages freed by the commit before it become usable after it."""
        self.write(lambda txn: txn.put(b"heartbeat", os.urandom(8), db=self.meta))

    # ------------------------------------------------------------------ accounting

    def live_pages(self, txn: Txn) -> int:
        """Pages in use by all tables, from LMDB's own counters (free list not included)."""
        total = 2
        for name in TABLES:
            stat = txn.stat(getattr(self, name))
            total += int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
        return total

    def ceiling_pages(self) -> int:
        """Pages that may be live before eviction has to make room."""
        return int(self.map_pages * LIVE_CEILING)

    def check_disk(self, need_pages: int) -> None:
        """Raise StoreFull if writing `need_pages` could grow the file beyond the free disk."""
        info = self.env.info()
        used = int(info["last_pgno"]) + 1
        with self.read() as txn:
            free_inside = used - self.live_pages(txn)
        growth = max(0, need_pages - max(0, free_inside)) * self.page_size
        disk = os.statvfs(self.path)
        if growth > disk.f_bavail * disk.f_frsize - self.reserve_bytes:
            raise StoreFull(
                f"the disk of {self.path} has no room for {growth >> 20} MiB more: "
                "free some space; what is stored is kept"
            )

    def close(self, *, keep_lock: bool = False) -> None:
        """Finish what is queued, flush and release the directory. Calling it twice is harmless.

        With `keep_lock` the directory stays locked until the next call. Where somebody still reads
        or writes after `begin_seconds`, all is flushed and stays open until the process ends: what
        is unmapped under them would crash it.
        """
        if not self.closed:
            with self._reading:
                self.closed = True
                self._reading.wait_for(lambda: not self._readers, self.begin_seconds)
            self._queue.put(None)
            self._writer.join(self.begin_seconds)
            if self._writer.is_alive():
                return  # stuck in `begin`
            self.env.sync(True)
            if self._readers:
                log.warning("the store in %s is still read: it is flushed, not closed", self.path)
                return
            self.env.close()
            self.data_map.close()
            os.close(self.data_fd)
            self._open = False
        if self._lock_fd >= 0 and not keep_lock and not self._open:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _commit(txn: Txn, work: Callable[[Txn], T]) -> T:
    try:
        result = work(txn)
        txn.commit()
    except BaseException:
        txn.abort()
        raise
    return result


def _lock_directory(path: Path) -> int:
    fd = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(
            f"process {holder} owns the store in {path}: stop it, or ask it over its socket"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _open_lmdb(path: Path, size_bytes: int, exists: bool) -> Any:
    options: dict[str, Any] = {} if exists else {"lib_version": 0}
    try:
        env = lmdb.open(
            str(path),
            map_size=size_bytes - size_bytes % (1 << 20),
            max_dbs=16,
            mode=0o600,
            sync=True,
            metasync=False,
            writemap=False,
            readahead=True,
            meminit=True,
            lock=True,
            **options,
        )
    except lmdb.Error as error:
        raise _translate(error, path) from error
    if env.lib_version()[0] != 0:
        env.close()
        raise StoreError(f"{path} was made by another LMDB engine than 0.9: use its own version")
    need = (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])
    if exists and (path / "data.mdb").stat().st_size < need:
        env.close()  # reading past the end of the file would end the process with SIGBUS
        raise StoreError(f"{path / 'data.mdb'} is cut short, {need} bytes expected: restore it")
    env.reader_check()
    return env


def _check_format(env: Any) -> None:
    """Note the format of a new store, migrate an older one, refuse what this program cannot read.

    Raises StoreError, and then nothing has been written.
    """
    page_size = int(env.stat()["psize"])
    if (VALUE_BYTES + 16) % page_size:
        raise StoreError(f"pages of {page_size} bytes do not divide 1 MiB: move the store")
    wanted = {"format": FORMAT, "psize": page_size, "value": VALUE_BYTES}
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        found = txn.get(b"format", db=meta)
        if found is None:
            txn.put(b"format", msgpack.packb(wanted), db=meta)
            return
        there = msgpack.unpackb(found)
        if {**there, "format": FORMAT} != wanted:
            raise StoreError(
                f"the store's format is another machine's: values of {there.get('value')} bytes in "
                f"pages of {there.get('psize')}, not {VALUE_BYTES} in {page_size}: export its "
                "conversations on the machine that made it and import them here"
            )
        if there != wanted:
            migrate(env, txn, int(there["format"]), FORMAT, MIGRATIONS)
            txn.put(b"format", msgpack.packb(wanted), db=meta)


def _translate(error: Exception, path: Path) -> StoreError:
    text = str(error)
    if isinstance(error, _DAMAGED):
        return StoreDamaged(
            f"the store in {path} is damaged beyond repair ({text}): put a copy of it back, or "
            "move it away and begin an empty one"
        )
    if "No space left" in text or "Disk quota" in text:
        return StoreFull("the disk is full: free some space; what is stored is kept")
    return StoreError(f"LMDB refused the store in {path}: {text}")
