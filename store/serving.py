"""The store's owner answers other processes on a unix socket, and over TCP where it is asked to.

Only the methods listed here exist; sizes are bounded before anything is read; the socket file is
0600. Over TCP (`store.remote`) fewer methods are served, once both ends have proved a secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from store.capacity import capacity
from store.errors import StoreError
from store.outlet import Inlet, Outlet
from store.remote import REMOTE_METHODS, Remote, admit, listen
from store.rpc import MAX_REQUEST, receive, send
from store.statistics import residency
from store.store import Store
from store.turns import Turn, unpack_ids

log = logging.getLogger(__name__)
MAX_CLIENTS = 64
IDLE_SECONDS = 600.0
END_SECONDS = 10.0
"""Time for the requests that are being answered when the server closes."""
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
        inlet = Inlet(store, store.environment.path / "imports")
        self._methods["import_open"] = inlet.open
        self._methods["import_write"] = inlet.write
        self._methods["import_end"] = inlet.end
        self._methods["import_close"] = inlet.close
        self._clients: dict[socket.socket, threading.Thread] = {}
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
        """Stop listening, end all connections and remove the socket file.

        Waits up to `END_SECONDS` for requests in flight: they read the store, which is closed next.
        """
        self._closing = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                # close() alone does not wake a thread that is blocked in accept().
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(5)
        with self._lock:
            clients = dict(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + END_SECONDS
        for thread in clients.values():
            thread.join(max(0.0, end - time.monotonic()))
        if late := sum(thread.is_alive() for thread in clients.values()):
            log.warning("%d requests to the store are not answered: it closes now", late)
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
            thread = threading.Thread(
                target=self._serve, args=(client, secret), name="store-rpc-client", daemon=True
            )
            with self._lock:
                refused = f"{MAX_CLIENTS} are connected" * (len(self._clients) >= MAX_CLIENTS)
                if not refused:
                    try:
                        thread.start()
                        self._clients[client] = thread
                    except RuntimeError as error:  # no thread is to be had
                        refused = str(error)
            if refused:
                log.warning("refused a client: %s", refused)
                client.close()

    def _serve(self, client: socket.socket, secret: bytes | None) -> None:
        try:
            if secret is not None and not admit(client, secret):
                return
            client.settimeout(IDLE_SECONDS)
            while (request := receive(client, MAX_REQUEST)) is not None:
                send(client, self._answer(request, far=secret is not None))
        except (OSError, ValueError) as error:
            if not self._closing:
                log.info("a client's connection ended: %s", error)
        finally:
            with self._lock:
                self._clients.pop(client, None)
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
