"""Asking the store's owner from another process: length-prefixed msgpack over a unix socket.

Requests are [method, {arguments}], answers [true, result] or [false, kind, message]. Only the
methods listed here exist; sizes are bounded before anything is read; the socket file is 0600.
Over TCP (`store.remote`) the same, for fewer methods, once both ends have proved a secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgpack

from store.capacity import capacity
from store.errors import MapFull, OverBudget, StoreError, StoreFull, StoreStuck, StoreUnavailable
from store.outlet import Outlet
from store.remote import REMOTE_METHODS, Remote, admit, connect, listen
from store.statistics import residency
from store.store import Store
from store.turns import Turn, pack_ids, unpack_ids

log = logging.getLogger(__name__)
MAX_REQUEST = 80 << 20
MAX_ANSWER = 512 << 20
MAX_CLIENTS = 64
IDLE_SECONDS = 600.0
_LENGTH = struct.Struct(">I")
_ERRORS = {kind.__name__: kind for kind in (StoreError, StoreFull, MapFull, OverBudget, StoreStuck)}
_PLAIN = (
    "create_conversation",
    "get_conversation",
    "list_conversations",
    "conversation_turns",
    "update_conversation",
    "delete_conversation",
    "drop_state",
    "turn_ids",
    "touch",
    "stats",
    "evict",
)


def _encode_turn(turn: Turn | None) -> dict[str, Any] | None:
    return None if turn is None else turn.to_dict()


class Server:
    """Serves one store on one socket until `close`; one thread for each connection."""

    def __init__(self, store: Store, socket_path: Path) -> None:
        self.path = socket_path
        self._store = store
        self._methods: dict[str, Callable[..., Any]] = {
            name: getattr(store, name) for name in _PLAIN
        }
        self._methods["ping"] = lambda: "pong"
        self._methods["put_turn"] = lambda turn: store.put_turn(Turn.from_dict(turn))
        self._methods["get_turn"] = lambda turn_id: _encode_turn(store.get_turn(turn_id))
        self._methods["path"] = lambda turn_id: [turn.to_dict() for turn in store.path(turn_id)]
        self._methods["residency"] = lambda **how: residency(store, **how)
        self._methods["capacity"] = lambda **how: capacity(store, **how)
        self._methods["find_state"] = self._find_state
        self._methods["longest_prefix"] = self._longest_prefix
        self._methods["check"] = lambda **how: store.check(**how).to_dict()
        self._methods["copy"] = lambda path: store.copy(Path(path))
        self._methods["export"] = lambda ident, path: store.export_conversation(ident, Path(path))
        self._methods["import"] = self._import
        self._outlet = Outlet(store, store.environment.path / "exports")
        self._methods["export_open"] = self._outlet.open
        self._methods["export_read"] = self._outlet.read
        self._methods["export_close"] = self._outlet.close
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._listener = _listen(socket_path)
        self._listeners = [self._listener]
        self._threads = [self._accepting(self._listener, None)]
        self.remote: Remote | None = None

    def offer(self, remote: Remote) -> Remote:
        """Serve over TCP as well; returns the address with the port that was taken. StoreError."""
        listener = listen(remote, MAX_CLIENTS)
        self.remote = replace(remote, port=listener.getsockname()[1])
        self._listeners.append(listener)
        self._threads.append(self._accepting(listener, remote.secret))
        return self.remote

    def _accepting(self, listener: socket.socket, secret: bytes | None) -> threading.Thread:
        thread = threading.Thread(
            target=self._accept, args=(listener, secret), name="store-rpc", daemon=True
        )
        thread.start()
        return thread

    def add(self, name: str, method: Callable[..., Any]) -> None:
        """Offer one more method; its arguments and result are plain msgpack types."""
        self._methods[name] = method

    def close(self) -> None:
        """Stop listening, end all connections and remove the socket file."""
        self._closing = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                # close() alone does not wake a thread that is blocked in accept().
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._outlet.close_all()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _import(self, path: str, owner: str | None = None) -> dict[str, Any]:
        return self._store.import_conversation(Path(path), owner)

    def _find_state(self, turn_id: str, nearest: bool = False) -> dict[str, Any] | None:
        find = self._store.nearest_state if nearest else self._store.find_state
        ref = find(turn_id)
        return None if ref is None else ref.to_dict()

    def _longest_prefix(self, ids: bytes, owner: str = "", beyond: int = 0) -> int:
        found = self._store.longest_prefix(unpack_ids(ids), owner, beyond)
        return 0 if found is None else found.tokens

    def _accept(self, listener: socket.socket, secret: bytes | None) -> None:
        while not self._closing:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._clients) >= MAX_CLIENTS
                if not full:
                    self._clients.add(client)
            if full:
                log.warning("refused a client: %d are connected", MAX_CLIENTS)
                client.close()
                continue
            threading.Thread(
                target=self._serve, args=(client, secret), name="store-rpc-client", daemon=True
            ).start()

    def _serve(self, client: socket.socket, secret: bytes | None) -> None:
        try:
            if secret is not None and not admit(client, secret):
                return
            client.settimeout(IDLE_SECONDS)
            while (request := _receive(client, MAX_REQUEST)) is not None:
                _send(client, self._answer(request, far=secret is not None))
        except (OSError, ValueError) as error:
            if not self._closing:
                log.info("a client's connection ended: %s", error)
        finally:
            with self._lock:
                self._clients.discard(client)
            client.close()

    def _answer(self, request: bytes, *, far: bool) -> bytes:
        try:
            name, arguments = msgpack.unpackb(request)
            if far and name not in REMOTE_METHODS:
                raise StoreError(f"{str(name)[:40]!r} is not served to other machines")
            result = self._methods[name](**arguments)
            return bytes(msgpack.packb([True, result]))
        except StoreError as error:
            return bytes(msgpack.packb([False, type(error).__name__, str(error)]))
        except (KeyError, TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
            log.warning("a request that cannot be served: %r", error)
            return bytes(msgpack.packb([False, "StoreError", f"bad request: {error!r}"]))
        except Exception as error:
            log.exception("a request failed")
            return bytes(msgpack.packb([False, "StoreError", f"the owner failed: {error!r}"]))


def serve(store: Store, socket_path: Path) -> Server:
    """Start serving `store` on a unix socket; close the result before the store."""
    return Server(store, socket_path)


class StoreClient:
    """The store's read methods and the keeping of conversations, from another process.

    Thread-safe. Connects when first used and again after a failure. Raises StoreUnavailable when
    the owner cannot be reached or does not answer within `timeout` seconds, and the owner's own
    StoreError otherwise. A write whose answer was lost may have happened; all writes here may be
    repeated.
    """

    def __init__(
        self,
        socket_path: Path,
        timeout: float = 10.0,
        elsewhere: Callable[[], Remote | None] = lambda: None,
    ) -> None:
        """`elsewhere()` says where the store is served over TCP, asked for each new connection
        where there is no socket of this machine."""
        self.path = socket_path
        self._elsewhere = elsewhere
        self.timeout = timeout
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def patient(self, timeout: float) -> StoreClient:
        """Another client of the same store, which waits for so many seconds; to be closed."""
        return StoreClient(self.path, timeout, self._elsewhere)

    def call(self, method: str, **arguments: Any) -> Any:
        """Call any served method."""
        request = msgpack.packb([method, arguments])
        if len(request) > MAX_REQUEST:
            raise StoreError(f"a request of {len(request)} bytes is over {MAX_REQUEST}")
        with self._lock:
            answer = self._exchange(request)
        if answer[0]:
            return answer[1]
        raise _ERRORS.get(answer[1], StoreError)(answer[2])

    def put_turn(self, turn: Turn) -> None:
        """As `Store.put_turn`."""
        self.call("put_turn", turn=turn.to_dict())

    def get_turn(self, turn_id: str) -> Turn | None:
        """As `Store.get_turn`."""
        found = self.call("get_turn", turn_id=turn_id)
        return None if found is None else Turn.from_dict(found)

    def path_of(self, turn_id: str) -> list[Turn]:
        """As `Store.path`."""
        return [Turn.from_dict(turn) for turn in self.call("path", turn_id=turn_id)]

    def turn_ids(self, turn_id: str) -> list[int]:
        """As `Store.turn_ids`."""
        result: list[int] = self.call("turn_ids", turn_id=turn_id)
        return result

    def find_state(self, turn_id: str, *, nearest: bool = False) -> dict[str, Any] | None:
        """The fields of a StateRef: of this turn or, with `nearest`, of an ancestor."""
        result: dict[str, Any] | None = self.call("find_state", turn_id=turn_id, nearest=nearest)
        return result

    def longest_prefix(self, ids: Sequence[int], owner: str = "", beyond: int = 0) -> int:
        """Tokens of the longest stored beginning of a prompt that this owner's states have; 0 for
        none. As `Store.longest_prefix`."""
        result: int = self.call("longest_prefix", ids=pack_ids(ids), owner=owner, beyond=beyond)
        return result

    def create_conversation(
        self,
        ident: str,
        owner: str = "",
        metadata: dict[str, Any] | None = None,
        items: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """As `Store.create_conversation`."""
        result: dict[str, Any] = self.call(
            "create_conversation",
            ident=ident, owner=owner, metadata=metadata or {}, items=items or [],
        )  # fmt: skip
        return result

    def get_conversation(self, ident: str) -> dict[str, Any] | None:
        """As `Store.get_conversation`."""
        result: dict[str, Any] | None = self.call("get_conversation", ident=ident)
        return result

    def list_conversations(
        self,
        owner: str | None = None,
        limit: int = 20,
        after: str | None = None,
        before: tuple[str, float] | None = None,
    ) -> list[dict[str, Any]]:
        """As `Store.list_conversations`."""
        result: list[dict[str, Any]] = self.call(
            "list_conversations", owner=owner, limit=limit, after=after, before=before
        )
        return result

    def conversation_turns(self, ident: str) -> list[str]:
        """As `Store.conversation_turns`."""
        result: list[str] = self.call("conversation_turns", ident=ident)
        return result

    def update_conversation(self, ident: str, **changes: Any) -> dict[str, Any]:
        """As `Store.update_conversation`."""
        result: dict[str, Any] = self.call("update_conversation", ident=ident, **changes)
        return result

    def delete_conversation(self, ident: str) -> bool:
        """As `Store.delete_conversation`."""
        result: bool = self.call("delete_conversation", ident=ident)
        return result

    def read_bundle(self, ident: str, file: IO[bytes]) -> int:
        """Write a bundle of conversation `ident` to `file`; returns its bytes.

        Raises OSError where `file` cannot be written.
        """
        made = self.call("export_open", ident=ident)
        name, size, done = made["name"], int(made["bytes"]), 0
        try:
            while done < size:
                part = self.call("export_read", name=name, offset=done)
                if not part:
                    raise StoreUnavailable("the export ended before its end: try again")
                done += file.write(part)
        finally:
            with contextlib.suppress(StoreError):
                self.call("export_close", name=name)
        return size

    def touch(self, turn_id: str) -> None:
        """As `Store.touch`."""
        self.call("touch", turn_id=turn_id)

    def stats(self) -> dict[str, Any]:
        """As `Store.stats`."""
        result: dict[str, Any] = self.call("stats")
        return result

    def ping(self) -> bool:
        """Whether the owner answers."""
        try:
            return bool(self.call("ping") == "pong")
        except StoreUnavailable:
            return False

    def close(self) -> None:
        """End the connection; a later call makes a new one."""
        with self._lock:
            self._drop()

    def _exchange(self, request: bytes) -> list[Any]:
        fresh = self._socket is None
        try:
            return self._attempt(request)
        except (OSError, ValueError) as error:
            self._drop()
            # A kept connection may be one to an owner that has restarted since.
            if fresh or isinstance(error, TimeoutError):
                raise self._unavailable(error) from error
        try:
            return self._attempt(request)
        except (OSError, ValueError) as error:
            self._drop()
            raise self._unavailable(error) from error

    def _attempt(self, request: bytes) -> list[Any]:
        if self._socket is None:
            remote = None if self.path.exists() else self._elsewhere()
            if remote is not None:
                self._socket = connect(remote, self.timeout)
            else:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(self.timeout)
                self._socket.connect(str(self.path))
        _send(self._socket, request)
        answer = _receive(self._socket, MAX_ANSWER)
        if answer is None:
            raise ConnectionResetError("the owner closed the connection")
        result: list[Any] = msgpack.unpackb(answer)
        return result

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(
            f"the store's owner does not answer at {self.path} ({error or 'timeout'}): "
            "is the decode worker running?"
        )


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > 100:
        raise StoreError(f"the socket path {path} is longer than 100 bytes: use a shorter one")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The caller owns the store's directory lock, so a socket left here belongs to no one.
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # before listen: no one can have connected yet
        listener.listen(MAX_CLIENTS)
    except OSError as error:
        listener.close()
        raise StoreError(f"cannot listen on {path}: {error}") from error
    return listener


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket, limit: int) -> bytes | None:
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise ValueError(f"a message of {length} bytes is over the limit of {limit}")
    body = _exactly(connection, length)
    if body is None:
        raise ConnectionResetError("the connection ended inside a message")
    return body


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            if parts:
                raise ConnectionResetError("the connection ended inside a message")
            return None
        parts += part
    return bytes(parts)
