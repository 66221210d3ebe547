"""What a directory of model files holds: names, sizes, and a hash of every chunk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from transport.errors import LinkError

CHUNK = 64 << 20
"""Bytes that are hashed, sent and written as one; the last of a file may be shorter."""
RECORD = ".tandem-manifest.json"
MAX_FILES = 10_000
MAX_DEPTH = 4
MAX_BYTES = 1 << 44
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +-]{0,199}")
_BLOCK = 4 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """One file: its path within the directory, its size, and the hashes of its chunks, if known."""

    path: str
    size: int
    hashes: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return -(-self.size // CHUNK)

    def span(self, number: int) -> tuple[int, int]:
        """Offset and length of a chunk."""
        start = number * CHUNK
        return start, min(CHUNK, self.size - start)


def check_entry(path: object, size: object) -> Entry:
    """An entry that a peer named. Raises LinkError for one that could leave the directory."""
    if not isinstance(path, str) or type(size) is not int or not 0 <= size <= MAX_BYTES:
        raise LinkError("a file of the push has no proper name or size", "protocol")
    parts = path.split("/")
    if not 1 <= len(parts) <= MAX_DEPTH or not all(_PART.fullmatch(part) for part in parts):
        raise LinkError(f"the file name {path[:80]!r} is not accepted", "protocol")
    return Entry(path, size)


def scan(directory: Path) -> list[Entry]:
    """The files of a directory in order of path, hidden ones left out; links are followed.

    Raises LinkError where there are none, or a name cannot travel.
    """
    found = []
    for root, folders, names in os.walk(directory, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                file = Path(root) / name
                relative = file.relative_to(directory).as_posix()
                found.append(check_entry(relative, file.stat().st_size))
    if not found or len(found) > MAX_FILES:
        raise LinkError(f"{directory} holds {len(found)} files, not 1..{MAX_FILES}", "failed")
    return sorted(found, key=lambda entry: entry.path)


def digest_chunk(data: memoryview | bytes) -> str:
    """The hash of one chunk."""
    return str(xxhash.xxh3_128_hexdigest(data))


def hash_file(path: Path, entry: Entry, moved: Callable[[int], None]) -> list[str]:
    """The hashes of a file's chunks as they are on disk. Raises LinkError where it is shorter."""
    found = []
    with path.open("rb") as file:
        for number in range(entry.chunks):
            _, left = entry.span(number)
            running = xxhash.xxh3_128()
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise LinkError(f"{entry.path} is shorter than {entry.size} bytes", "failed")
                running.update(block)
                left -= len(block)
                moved(len(block))
            found.append(running.hexdigest())
    return found


def measure(directory: Path, progress: Progress = lambda done, total: None) -> list[Entry]:
    """Read every byte of the directory; the entries with hashes. Raises LinkError, OSError."""
    entries = scan(directory)
    total = sum(entry.size for entry in entries)
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return [
        Entry(entry.path, entry.size, tuple(hash_file(directory / entry.path, entry, moved)))
        for entry in entries
    ]


def digest(entries: list[Entry]) -> str:
    """One hash over names, sizes and contents: equal where two directories are."""
    running = xxhash.xxh3_128()
    for entry in sorted(entries, key=lambda one: one.path):
        running.update(json.dumps([entry.path, entry.size, entry.hashes]).encode())
    return str(running.hexdigest())


def write_record(directory: Path, entries: list[Entry]) -> None:
    """Keep the hashes beside the files, with what tells whether a file has been touched since."""
    record = {
        "chunk": CHUNK,
        "files": [
            [e.path, e.size, (directory / e.path).stat().st_mtime_ns, list(e.hashes)]
            for e in entries
        ],
    }
    partial = directory / f"{RECORD}.part"
    partial.write_text(json.dumps(record), encoding="utf-8")
    os.replace(partial, directory / RECORD)


def read_record(directory: Path) -> list[Entry] | None:
    """The recorded entries; None without a record of this chunk size, or where it is damaged."""
    try:
        record: Any = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        if record["chunk"] != CHUNK:
            return None
        return [Entry(path, size, tuple(hashes)) for path, size, _, hashes in record["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def untouched(directory: Path) -> bool:
    """Whether every recorded file has the size and time of modification that it had then."""
    try:
        record: Any = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        there = {entry.path for entry in scan(directory)}
        for path, size, mtime, _ in record["files"]:
            status = (directory / path).stat()
            if status.st_size != size or status.st_mtime_ns != mtime or path not in there:
                return False
        return len(there) == len(record["files"])
    except (OSError, ValueError, KeyError, TypeError, LinkError):
        return False


def differences(recorded: list[Entry], found: list[Entry]) -> Iterator[str]:
    """What differs between what was recorded and what is there, one line each."""
    there = {entry.path: entry for entry in found}
    for entry in recorded:
        other = there.pop(entry.path, None)
        if other is None:
            yield f"{entry.path} is missing"
        elif other.size != entry.size:
            yield f"{entry.path} has {other.size} bytes instead of {entry.size}"
        elif other.hashes != entry.hashes:
            wrong = [
                n for n, (a, b) in enumerate(zip(entry.hashes, other.hashes, strict=True)) if a != b
            ]
            yield f"{entry.path} differs in {len(wrong)} of {entry.chunks} chunks of {CHUNK} bytes"
    for path in there:
        yield f"{path} was not there before"
