"""Asking the store's owner from another process: length-prefixed msgpack over a unix socket.

Requests are [method, {arguments}], answers [true, result] or [false, kind, message]; what is served
is in `store.serving`. Over TCP (`store.remote`) the same, once both ends have proved a secret.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgpack

from store.errors import MapFull, OverBudget, StoreError, StoreFull, StoreStuck, StoreUnavailable
from store.remote import Remote, connect
from store.turns import Turn, pack_ids

MAX_REQUEST = 80 << 20
MAX_ANSWER = 512 << 20
_LENGTH = struct.Struct(">I")
_ERRORS = {kind.__name__: kind for kind in (StoreError, StoreFull, MapFull, OverBudget, StoreStuck)}


class StoreClient:
    """The store's read methods and the keeping of conversations, from another process.

    Thread-safe. Connects when first used and again after a failure. Raises StoreUnavailable when
    the owner cannot be reached or does not answer within `timeout` seconds, or has not come to
    this call in that time, and the owner's own StoreError otherwise. A write whose answer was lost
    may have happened; all writes here may be repeated.
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
        # One connection, one call at a time: a line of others' slow ones has an end as well.
        if not self._lock.acquire(timeout=self.timeout):
            raise StoreUnavailable(
                f"the store's owner has answered others for {self.timeout:g} s: try again shortly"
            )
        try:
            answer = self._exchange(request)
        finally:
            self._lock.release()
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
        send(self._socket, request)
        answer = receive(self._socket, MAX_ANSWER)
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


def send(connection: socket.socket, body: bytes) -> None:
    """Send one message. Raises OSError."""
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket, limit: int) -> bytes | None:
    """The next message, or None at the connection's end.

    Raises ValueError for one of more than `limit` bytes, before it is read, and OSError.
    """
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
