"""Uploaded files, and those that batches write: contents in the data directory, facts in Redis.

A file exists from the moment its record does. The contents are complete before that, so a crash
leaves at most contents without a record, which are removed when the next process begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import redis

Purpose = Literal["batch", "batch_output"]
KEEP_SECONDS = 30 * 86_400
"""How long a file is kept unless it says otherwise, as OpenAI keeps files of batches."""
MAX_FILES = 10_000
"""Files of one owner."""
_ID = re.compile(r"file-[0-9a-f]{32}")
_ALL = "tandem:files"
_BYTES = "tandem:files:bytes"
_PART = ".part"
_COPY = 1 << 20


class FilesError(Exception):
    """A file cannot be kept or found; one line with cause and cure."""


class FilesFull(FilesError):
    """As much is stored as may be, by this owner or by all together."""


@dataclass(frozen=True, slots=True)
class File:
    """One stored file; times in seconds since the epoch."""

    id: str
    owner: str
    name: str
    purpose: Purpose
    size: int
    created: float
    expires: float


def is_file_id(name: str) -> bool:
    """Whether `name` could be the id of a file; others never reach the file system."""
    return _ID.fullmatch(name) is not None


def new_file_id() -> str:
    """An id for a new file."""
    return f"file-{secrets.token_hex(16)}"


class Files:
    """The files of one data directory. Thread-safe."""

    def __init__(self, client: redis.Redis, directory: Path, total_bytes: int) -> None:
        """`total_bytes` may be stored by all owners together."""
        self._client = client
        self._dir = directory
        self._total = total_bytes
        # What is counted and what has a record agree, but between the two steps of a change.
        self._counting = threading.RLock()

    def put(
        self,
        source: BinaryIO,
        *,
        owner: str,
        name: str,
        purpose: Purpose,
        seconds: float = KEEP_SECONDS,
        owner_bytes: int = 0,
        ident: str | None = None,
        limited: bool = True,
    ) -> File:
        """Keep what `source` holds for `seconds`. `owner_bytes`: limit of this owner, 0 for none.

        With `ident`, a file that exists already is returned as it is. Raises FilesFull, unless
        `limited` is False: answers that were worked for are kept whatever else is stored.
        """
        ident = ident or new_file_id()
        if (known := self.get(ident)) is not None:
            return known
        part = self._path(ident).with_suffix(_PART)
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as to:
                while chunk := source.read(_COPY):
                    to.write(chunk)
                size = to.tell()
                to.flush()
                os.fsync(to.fileno())
            with self._counting:
                self._reserve(owner, size, owner_bytes, limited)
                os.replace(part, self._path(ident))
                return self._record(ident, owner, name, purpose, size, seconds)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _record(
        self, ident: str, owner: str, name: str, purpose: Purpose, size: int, seconds: float
    ) -> File:
        now = time.time()
        file = File(ident, owner, name, purpose, size, now, now + seconds)
        pipe = self._client.pipeline()
        pipe.hset(_key(ident), mapping={k: str(v) for k, v in _fields(file).items()})
        for index in (_ALL, f"{_ALL}:{owner}"):
            pipe.zadd(index, {ident: now})
        pipe.execute()
        return file

    def get(self, ident: str, *, expired: bool = False) -> File | None:
        """The file, or None where there is none or, unless `expired`, its time is over."""
        if not is_file_id(ident):
            return None
        raw = cast("dict[bytes, bytes]", self._client.hgetall(_key(ident)))
        file = _parse(ident, raw)
        return file if file is not None and (expired or file.expires > time.time()) else None

    def newest(self, owner: str | None = None) -> Iterator[File]:
        """All files, or an owner's, newest first."""
        index, start = _ALL if owner is None else f"{_ALL}:{owner}", 0
        while ids := cast("list[bytes]", self._client.zrevrange(index, start, start + 499)):
            pipe = self._client.pipeline(transaction=False)
            for ident in ids:
                pipe.hgetall(_key(ident.decode()))
            now = time.time()
            for ident, raw in zip(ids, pipe.execute(), strict=True):
                file = _parse(ident.decode(), raw)
                if file is not None and file.expires > now:
                    yield file
            start += 500

    def open(self, file: File) -> BinaryIO:
        """The contents. Raises FilesError where they are gone."""
        try:
            return self._path(file.id).open("rb")
        except FileNotFoundError:
            raise FilesError(f"the contents of {file.id} are gone: upload it again") from None

    def delete(self, file: File) -> None:
        """Forget a file; its contents go first, so that none are left over."""
        self._path(file.id).unlink(missing_ok=True)
        pipe = self._client.pipeline()
        pipe.delete(_key(file.id))
        for index in (_ALL, f"{_ALL}:{file.owner}"):
            pipe.zrem(index, file.id)
        with self._counting:
            removed = pipe.execute()[0]
            if removed:  # by us, and not at the same time by somebody else
                self._give_back(file.owner, file.size)

    def used(self, owner: str) -> int:
        """Bytes that an owner's files take."""
        return int(cast("bytes | None", self._client.hget(_BYTES, owner)) or 0)

    def used_by_all(self) -> int:
        """Bytes that all files take."""
        return sum(int(v) for v in cast("list[bytes]", self._client.hvals(_BYTES)))

    def sweep(self, used: Collection[str] = ()) -> int:
        """Delete what has expired and contents without a record; returns how many went.

        Files that are `used` stay. Only while no other process writes files here.
        """
        now = time.time()
        with self._counting:
            gone = self._recount(now, used)
        with contextlib.suppress(FileNotFoundError):
            for path in self._dir.iterdir():
                if path.suffix == _PART and is_file_id(path.stem):
                    old = now - path.stat().st_mtime > 3600
                else:
                    old = is_file_id(path.name) and not self._client.exists(_key(path.name))
                    old = old and now - path.stat().st_mtime > 3600
                if old:
                    path.unlink(missing_ok=True)
                    gone += 1
        return gone

    def _recount(self, now: float, used: Collection[str]) -> int:
        """Delete what has expired and count the rest anew; returns how many went."""
        gone = 0
        sizes: Counter[str] = Counter()
        for ident in cast("list[bytes]", self._client.zrange(_ALL, 0, -1)):
            raw = cast("dict[bytes, bytes]", self._client.hgetall(_key(ident.decode())))
            file = _parse(ident.decode(), raw)
            if file is None:
                self._client.zrem(_ALL, ident)
            elif file.expires <= now and file.id not in used:
                self.delete(file)
                gone += 1
            else:
                sizes[file.owner] += file.size
        # What was counted for an upload that a crash cut short is given back.
        pipe = self._client.pipeline()
        pipe.delete(_BYTES)
        for owner, size in sizes.items():
            pipe.hset(_BYTES, owner, str(size))
        pipe.execute()
        return gone

    def _path(self, ident: str) -> Path:
        assert is_file_id(ident)
        return self._dir / ident

    def _reserve(self, owner: str, size: int, owner_bytes: int, limited: bool) -> None:
        """Count `size` bytes for an owner, or raise FilesFull and count nothing."""
        pipe = self._client.pipeline()
        pipe.hincrby(_BYTES, owner, size)
        pipe.hvals(_BYTES)
        pipe.zcard(f"{_ALL}:{owner}")
        mine, everybody, count = pipe.execute()
        total = sum(int(value) for value in everybody)
        why = ""
        if not limited:
            return
        if owner_bytes and mine > owner_bytes:
            why = f"your files would take {mine:,} bytes, and {owner_bytes:,} are allowed"
        elif total > self._total:
            why = f"all files would take {total:,} bytes, and api.files_gb allows {self._total:,}"
        elif count >= MAX_FILES:
            why = f"you have {count} files, which is the limit"
        if why:
            self._give_back(owner, size)
            raise FilesFull(f"{why}: delete some first")

    def _give_back(self, owner: str, size: int) -> None:
        if self._client.hincrby(_BYTES, owner, -size) <= 0:
            self._client.hdel(_BYTES, owner)


def _key(ident: str) -> str:
    return f"tandem:file:{ident}"


def _fields(file: File) -> dict[str, Any]:
    return {
        "owner": file.owner,
        "name": file.name,
        "purpose": file.purpose,
        "size": file.size,
        "created": file.created,
        "expires": file.expires,
    }


def _parse(ident: str, raw: dict[bytes, bytes]) -> File | None:
    if b"size" not in raw:
        return None
    return File(
        id=ident,
        owner=raw[b"owner"].decode(),
        name=raw[b"name"].decode(),
        purpose=cast(Purpose, raw[b"purpose"].decode()),
        size=int(raw[b"size"]),
        created=float(raw[b"created"]),
        expires=float(raw[b"expires"]),
    )
