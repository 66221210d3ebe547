"""One conversation in one file: its turns, its states and every block once.

A bundle is MAGIC and then frames of (kind, length, xxh3_64 seeded by kind, body): one `C`
(conversation), `T` (turn) in the order they were stored, `O` (block or snapshot: header, then
payload) before the `S` (state) that needs it, and one `E` (number of frames before it). Nothing is
taken from a bundle before its frame's checksum and, for blocks, the codec's own checks have passed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgpack
import xxhash

from store.codec.header import MAX_HEADER, MAX_PAYLOAD, CodecError, Piece, parse
from store.errors import StoreError
from store.objects import ROOT
from store.renaming import placed, renamed
from store.turns import Turn

if TYPE_CHECKING:
    from store.store import Store

MAGIC = b"TANDEM-CONVERSATION-1\n\0\0"
_FRAME = struct.Struct("<cQQ")
_LENGTH = struct.Struct("<I")
MAX_BODY = MAX_PAYLOAD + 2 * MAX_HEADER


def export_conversation(store: Store, ident: str, path: Path) -> dict[str, int]:
    """Write conversation `ident` to the new file `path` (0600); returns counts.

    Ancestors of its turns that belong to another conversation are included. States that turn out
    damaged are left out. Raises StoreError if there is no such conversation or the file exists.
    """
    record = store.get_conversation(ident)
    if record is None:
        raise StoreError(f"there is no conversation {ident}")
    turns: dict[str, Turn] = {}
    for turn_id in store.conversation_turns(ident):
        for turn in store.path(turn_id):
            turns.setdefault(turn.id, turn)
    partial = path.with_name(path.name + ".part")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            writer = _Writer(file)
            # What waits for a turn that never was is no part of what was said.
            said = len(record["items"]) - record.pop("added", 0)
            record["items"] = msgpack.packb(record["items"][:said])
            writer.frame(b"C", msgpack.packb(record))
            for turn in turns.values():
                writer.frame(b"T", msgpack.packb(turn.to_dict()))
            states = sum(_export_state(store, turn, writer) for turn in turns.values())
            writer.frame(b"E", msgpack.packb(writer.frames))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.link(partial, path)  # fails rather than replace a file
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return {"turns": len(turns), "states": states, "bytes": size}


class _Writer:
    """Writes frames and remembers which objects were written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.frames = 0
        self.objects: set[bytes] = set()
        file.write(MAGIC)

    def frame(self, kind: bytes, *parts: bytes | memoryview) -> None:
        """One frame whose body is all `parts` in order."""
        digest = xxhash.xxh3_64(seed=kind[0])
        for part in parts:
            digest.update(part)
        length = sum(len(part) for part in parts)
        self._file.write(_FRAME.pack(kind, length, digest.intdigest()))
        for part in parts:
            self._file.write(part)
        self.frames += 1


def _export_state(store: Store, turn: Turn, writer: _Writer) -> int:
    ref = store.find_state(turn.id)
    reader = None if ref is None else store.load_state(turn.id, ref.fingerprint)
    if ref is None or reader is None:
        return 0
    with reader:
        needed = [ident for ident, _ in reader.objects]
        reader.skip(writer.objects)
        fresh = [ident for ident, _ in reader.objects]
        for ident, piece in zip(fresh, reader, strict=False):
            header = piece.header.pack()
            head = ident + _LENGTH.pack(len(header)) + header
            writer.frame(b"O", head, piece.payload)
            writer.objects.add(ident)
    if reader.report.damage or not writer.objects.issuperset(needed):
        return 0
    writer.frame(b"S", msgpack.packb({"turn": turn.id, "objects": needed}))
    return 1


def import_conversation(store: Store, path: Path, owner: str | None = None) -> dict[str, Any]:
    """Store what is in the bundle `path`; what is there already is left.

    Returns the conversation's id, counts, and new ids by old ones (`renamed`): all ids change where
    one of them is taken by another owner, or by this one for something else. `owner`: whose it
    becomes, instead of whose it was. Everything is verified first; nothing is stored if any of it
    is wrong (StoreError).
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    try:
        return _import(store, memoryview(mapped), owner)
    except (CodecError, ValueError, KeyError, TypeError, struct.error) as error:
        raise StoreError(f"{path} is not a whole and undamaged bundle: {error}") from error


def _import(store: Store, view: memoryview, owner: str | None) -> dict[str, Any]:
    conversation: dict[str, Any] = {}
    turns: list[Turn] = []
    objects: dict[bytes, tuple[int, int]] = {}
    states: list[dict[str, Any]] = []
    for kind, start, stop in _frames(view):
        body = view[start:stop]
        if kind == b"C":
            conversation = msgpack.unpackb(body)
        elif kind == b"T":
            turns.append(Turn.from_dict(msgpack.unpackb(body)))
        elif kind == b"O":
            objects[bytes(body[:16])] = (start, stop)
            _piece(body).verify()
        elif kind == b"S":
            states.append(msgpack.unpackb(body))
        else:
            raise ValueError(f"it has a frame of unknown kind {kind!r}")
    items = msgpack.unpackb(conversation.pop("items"))
    _check_turns(turns, states)
    if owner is not None:
        conversation["owner"] = owner
        turns = [replace(turn, owner=owner) for turn in turns]
    names = placed(store, conversation, items, turns)
    conversation, items, turns = renamed(names, conversation, items, turns)
    store.create_conversation(
        conversation["id"],
        conversation["owner"],
        conversation["metadata"],
        items,
        conversation["created"],
    )
    for turn in turns:
        store.put_turn(turn)
    written = 0
    for state in states:
        pieces = [_piece(view[slice(*objects[ident])]) for ident in state["objects"]]
        name = names.get(state["turn"], state["turn"])
        written += store.save_state(name, pieces[:-1], pieces[-1]).bytes_written
    counts = {"turns": len(turns), "states": len(states), "bytes": written}
    return {"conversation": conversation["id"], **counts, "renamed": names}


def _check_turns(turns: Sequence[Turn], states: Sequence[dict[str, Any]]) -> None:
    """A bundle stands by itself: it neither continues nor changes what is not in it."""
    seen: set[str] = set()
    for turn in turns:
        if turn.id in seen:
            raise ValueError("it has a turn twice")
        if turn.parent is not None and turn.parent not in seen:
            raise ValueError("a turn comes before the one that it continues")
        seen.add(turn.id)
    if any(state["turn"] not in seen for state in states):
        raise ValueError("it has a state of a turn that it lacks")


def _frames(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, stop) of every frame, verified. Raises ValueError unless the end is there."""
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise ValueError("it does not begin as one")
    at = len(MAGIC)
    count = 0
    while True:
        kind, length, digest = _FRAME.unpack_from(view, at)
        at += _FRAME.size
        if length > MAX_BODY or at + length > len(view):
            raise ValueError("it is cut short")
        body = view[at : at + length]
        if xxhash.xxh3_64_intdigest(body, kind[0]) != digest:
            raise ValueError(f"frame {count} fails its checksum")
        if kind == b"E":
            if msgpack.unpackb(body) != count:
                raise ValueError("frames are missing")
            return
        yield kind, at, at + length
        at += length
        count += 1


def _piece(body: memoryview) -> Piece:
    (length,) = _LENGTH.unpack_from(body, len(ROOT))
    start = len(ROOT) + _LENGTH.size
    return Piece(parse(body[start : start + length]), body[start + length :])
