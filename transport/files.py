"""Takes directories of model files from the other machine, piece by piece, and answers for them.

A connection proves the shared secret as a link's does (transport.auth), then speaks messages of
one msgpack map each, with a length prefix. A push can be broken off at any point: chunks that have
arrived are journalled, and the next push of that name goes on after them. What is complete is read
back from disk and compared, and only then takes its final name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgpack

from transport import auth, manifest
from transport.errors import LinkError
from transport.manifest import CHUNK, Entry
from transport.wire import Connection, listen

MAX_MESSAGE = 32 << 20
MAX_CLIENTS = 8
SPARE_BYTES = 1 << 30
DEADLINE = 60.0
#: After so long without a byte another push of the same name takes over, waiting at most...
SILENT_SECONDS, TAKE_OVER_SECONDS = 3.0, 15.0
_LENGTH = struct.Struct("<I")
_JOURNAL = ".tandem-push.jsonl"


def send(
    connection: Connection, message: dict[str, Any], payload: memoryview | None = None
) -> None:
    """One message, and the bytes that follow it. Raises LinkError."""
    body = msgpack.packb(message)
    if len(body) > MAX_MESSAGE:
        raise LinkError(f"a message of {len(body)} bytes is too long", "protocol")
    buffers = [_LENGTH.pack(len(body)), body]
    connection.write(*buffers, *([payload] if payload is not None else []))


def receive(connection: Connection) -> dict[str, Any]:
    """One message. Raises LinkError; its `error`, if it has one, too."""
    (size,) = _LENGTH.unpack(connection.read(_LENGTH.size))
    if not 0 < size <= MAX_MESSAGE:
        raise LinkError(f"a message of {size} bytes, limit {MAX_MESSAGE}", "protocol")
    try:
        found = msgpack.unpackb(connection.read(size))
    except (ValueError, msgpack.UnpackException) as error:
        raise LinkError(f"a message is not valid: {error}", "protocol") from None
    if not isinstance(found, dict):
        raise LinkError("a message is not a map", "protocol")
    if found.get("error"):
        raise LinkError(str(found["error"]), "failed")
    return found


class FileServer:
    """Listens on `host` from construction until `close`; directories lie in `models`.

    Raises LinkError where the address cannot be bound.
    """

    def __init__(self, host: str, secret: bytes, models: Path) -> None:
        self._secret = auth.check_secret(secret)
        self._models = models
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy: dict[str, _Push] = {}
        self._clients: set[Connection] = set()
        self._closing = False
        self._listener = listen(host, 0, backlog=8)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection; what has arrived stays for the next push."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.kill()
        self._thread.join(5)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if (connection := Connection.taken(sock, DEADLINE)) is None:
                continue
            with self._lock:
                full = len(self._clients) >= MAX_CLIENTS
                if not full:
                    self._clients.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="files-client", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        try:
            auth.demand(connection, self._secret)
            auth.welcome(connection)
            while not self._closing:
                request = receive(connection)
                try:
                    self._answer(connection, request)
                except (LinkError, OSError) as error:
                    send(connection, {"error": str(error)[:500]})
                    return
        except LinkError:
            pass  # a stranger, or a client that has gone
        finally:
            with self._lock:
                self._clients.discard(connection)
            connection.close()

    def _answer(self, connection: Connection, request: dict[str, Any]) -> None:
        kind = request.get("type")
        if kind == "list":
            send(connection, {"models": listing(self._models)})
            return
        name = request.get("name")
        if not isinstance(name, str) or not manifest.NAME.fullmatch(name):
            raise LinkError("a model's name has letters, digits, '.', '_' and '-'", "protocol")
        if kind == "digest":
            found, trouble = verify(self._models / name, _ticker(connection))
            send(connection, {"digest": found, "problems": trouble[:50]})
        elif kind == "push":
            push = _Push(self._models, name, connection)
            self._enter(name, push)
            try:
                push.run(request)
            finally:
                with self._changed:
                    del self._busy[name]
                    self._changed.notify_all()
        else:
            raise LinkError("unknown request", "protocol")

    def _enter(self, name: str, push: _Push) -> None:
        """Be the one push of this name. An earlier one that has fallen silent is ended."""
        end = time.monotonic() + TAKE_OVER_SECONDS
        with self._changed:
            while (other := self._busy.get(name)) is not None:
                now = time.monotonic()
                if now > end:
                    raise LinkError(f"another push of {name} is under way", "busy")
                if now - other.heard > SILENT_SECONDS:
                    other.kill()
                self._changed.wait(0.2)
            self._busy[name] = push


def listing(models: Path) -> list[dict[str, Any]]:
    """The directories of models in `models`, with their bytes of files, whole or in part."""
    found = []
    for path in sorted(models.iterdir()) if models.is_dir() else ():
        partial = path.name.endswith(".push")
        if (
            path.is_dir()
            and not path.name.startswith(".")
            and (partial or (path / "config.json").is_file())
        ):
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append({"name": path.name.removesuffix(".push"), "bytes": size,
                          "partial": partial})  # fmt: skip
    return found


def verify(
    directory: Path, progress: manifest.Progress = lambda done, total: None
) -> tuple[str, list[str]]:
    """Read a directory and compare it with its record; its digest, and what differs.

    A directory without a record gets one: what is there now is what is compared with later.
    Raises LinkError where there is no such directory.
    """
    if not directory.is_dir():
        raise LinkError(f"there is no model {directory.name} here", "failed")
    found = manifest.measure(directory, progress)
    recorded = manifest.read_record(directory)
    if recorded is None:
        with contextlib.suppress(OSError):  # a directory of somebody else's may be read-only
            manifest.write_record(directory, found)
        return manifest.digest(found), []
    return manifest.digest(found), list(manifest.differences(recorded, found))


def _ticker(connection: Connection) -> manifest.Progress:
    """Tells the client now and then how far a long reading is."""
    told = 0

    def tick(done: int, total: int) -> None:
        nonlocal told
        if done - told >= CHUNK:
            told = done
            send(connection, {"verified": done, "total": total})

    return tick


class _Push:
    """One push into NAME.push, renamed to NAME when it is whole."""

    def __init__(self, models: Path, name: str, connection: Connection) -> None:
        self._final = models / name
        self._part = models / f"{name}.push"
        self._connection = connection
        self.heard = time.monotonic()

    def kill(self) -> None:
        """End its connection, from another thread."""
        self._connection.kill()

    def run(self, request: dict[str, Any]) -> None:
        """Tell what is here, take what is missing, read it back, give it its name."""
        entries = _entries(request.get("files"))
        if self._final.exists():
            recorded = manifest.read_record(self._final)
            there = recorded if recorded and manifest.untouched(self._final) else None
            have = there or manifest.measure(self._final, _ticker(self._connection))
            send(self._connection, {"state": "whole", "digest": manifest.digest(have)})
            return
        self._part.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = self._journal()
        held = {e.path: known.get((e.path, e.size), {}) for e in entries}
        missing = sum(e.size for e in entries) - sum(
            e.span(number)[1] for e in entries for number in held[e.path] if number < e.chunks
        )
        free = shutil.disk_usage(self._part).free
        if missing + SPARE_BYTES > free:
            raise LinkError(
                f"the other machine has {free / 1e9:.1f} GB free and {missing / 1e9:.1f} GB are to "
                "come: free some there, or set its models_dir to another disk",
                "failed",
            )
        files = [[[number, known_hash] for number, known_hash in held[e.path].items()]
                 for e in entries]  # fmt: skip
        send(self._connection, {"state": "part", "have": files})
        hashes = {e.path: dict(held[e.path]) for e in entries}
        self._take(entries, hashes)
        self._finish(entries, hashes)

    def _journal(self) -> dict[tuple[str, int], dict[int, str]]:
        """Chunks that arrived earlier, by path and size."""
        found: dict[tuple[str, int], dict[int, str]] = {}
        with contextlib.suppress(OSError), (self._part / _JOURNAL).open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError):  # the last line may be cut
                    path, size, number, known = json.loads(line)
                    if (self._part / path).exists():
                        found.setdefault((path, size), {})[number] = known
        return found

    def _take(self, entries: list[Entry], hashes: dict[str, dict[int, str]]) -> None:
        buffer = memoryview(bytearray(min(CHUNK, max((e.size for e in entries), default=0)) or 1))
        with (self._part / _JOURNAL).open("a", encoding="utf-8") as journal:
            while (message := receive(self._connection)).get("type") != "end":
                index, number = message.get("file"), message.get("chunk")
                if type(index) is not int or not 0 <= index < len(entries):
                    raise LinkError("a chunk of a file that was not offered", "protocol")
                entry = entries[index]
                if type(number) is not int or not 0 <= number < entry.chunks:
                    raise LinkError("a chunk that the file does not have", "protocol")
                start, size = entry.span(number)
                self._connection.read_into(buffer[:size])
                self.heard = time.monotonic()
                found = manifest.digest_chunk(buffer[:size])
                if found != message.get("hash"):
                    raise LinkError(f"{entry.path} was damaged on the way: push again", "failed")
                path = self._part / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    done = 0
                    while done < size:
                        done += os.pwrite(descriptor, buffer[done:size], start + done)
                finally:
                    os.close(descriptor)
                hashes[entry.path][number] = found
                journal.write(json.dumps([entry.path, entry.size, number, found]) + "\n")
                journal.flush()

    def _finish(self, entries: list[Entry], hashes: dict[str, dict[int, str]]) -> None:
        whole = []
        for entry in entries:
            path = self._part / entry.path
            known = hashes[entry.path]
            if sorted(known) != list(range(entry.chunks)):
                raise LinkError(f"{entry.path} is not complete: push again", "failed")
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, entry.size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            whole.append(Entry(entry.path, entry.size, tuple(known[n] for n in sorted(known))))
        wanted = {entry.path for entry in entries}
        for extra in [e.path for e in manifest.scan(self._part) if e.path not in wanted]:
            (self._part / extra).unlink()  # of an earlier push of another list
        found = manifest.measure(self._part, _ticker(self._connection))
        wrong = list(manifest.differences(whole, found))
        if wrong:
            (self._part / _JOURNAL).unlink()  # what is on disk is not what arrived
            raise LinkError(f"read back from disk, {wrong[0]}: push again", "failed")
        (self._part / _JOURNAL).unlink(missing_ok=True)
        manifest.write_record(self._part, found)
        os.replace(self._part, self._final)
        send(self._connection, {"state": "done", "digest": manifest.digest(found)})


def _entries(files: object) -> list[Entry]:
    if not isinstance(files, list) or not 1 <= len(files) <= manifest.MAX_FILES:
        raise LinkError(f"a push has 1..{manifest.MAX_FILES} files", "protocol")
    found = [manifest.check_entry(*pair) for pair in files if isinstance(pair, list)
             and len(pair) == 2]  # fmt: skip
    if len(found) != len(files) or len({e.path for e in found}) != len(found):
        raise LinkError("the list of files is not proper", "protocol")
    return found
