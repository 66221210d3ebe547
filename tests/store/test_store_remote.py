"""The store over TCP: both ends prove the secret, sizes stay bounded, fewer methods are there."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made_states import make_turn
from redis_kit import eventually

from store.errors import StoreError, StoreUnavailable
from store.remote import Remote, connect, listen, parse_address
from store.rpc import MAX_REQUEST, StoreClient
from store.serving import Server, serve
from store.store import Store

SECRET = b"a secret of the two machines"
PATIENCE = 300.0
"""Seconds that both ends wait here: a machine that stalls is no stranger that says nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("store.remote.HELLO_SECONDS", PATIENCE)
    store = Store.open(tmp_path / "store", 64 << 20)
    folder = Path(tempfile.mkdtemp(prefix="sr"))
    made = serve(store, folder / "s")
    made.offer(Remote("127.0.0.1", 0, SECRET))
    yield made
    made.close()
    store.close()
    folder.rmdir()


def client(server: Server, secret: bytes = SECRET) -> StoreClient:
    """As on another machine, where no socket lies."""
    assert server.remote is not None
    remote = replace(server.remote, secret=secret)
    return StoreClient(Path("/nowhere/s"), PATIENCE, lambda: remote)


def test_the_same_methods_answer(server: Server) -> None:
    far = client(server)
    assert far.ping()
    turn = make_turn([1, 2, 3], [4], conversation="conv_a")
    far.put_turn(turn)
    assert far.turn_ids(turn.id) == [1, 2, 3, 4]
    record = far.get_conversation("conv_a")
    assert record is not None
    assert record["owner"] == "anna"
    assert far.longest_prefix([1, 2, 3]) == 0
    far.close()
    assert far.delete_conversation("conv_a"), "it connects again"
    far.close()


@pytest.mark.parametrize("method", ["export", "import", "check", "evict", "drop_state", "nothing"])
def test_what_concerns_the_owners_machine_is_not_served(server: Server, method: str) -> None:
    far = client(server)
    with pytest.raises(StoreError, match="not served to other machines"):
        far.call(method, path="/etc/passwd")
    assert far.ping()
    far.close()


def test_a_wrong_secret_is_refused_on_both_sides(server: Server) -> None:
    with pytest.raises(StoreUnavailable):
        client(server, b"another secret of two machines").call("stats")
    known = client(server)
    assert known.ping(), "others are served all the same"
    known.close()
    # A server that does not know the secret learns nothing from a client and is left.
    with socket.create_server(("127.0.0.1", 0)) as rogue:
        remote = Remote("127.0.0.1", rogue.getsockname()[1], SECRET)

        def answer() -> None:
            peer, _ = rogue.accept()
            with peer:
                peer.sendall(b"TNDMRPC1" + bytes(32))
                peer.recv(64, socket.MSG_WAITALL)
                peer.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            connect(remote, PATIENCE)
        thread.join()


def test_what_somebody_sends_before_is_not_taken_for_a_request(server: Server) -> None:
    assert server.remote is not None
    address = (server.remote.host, server.remote.port)
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        struct.pack(">I", 1 << 31) + bytes(80),
    ):
        with socket.create_connection(address, PATIENCE) as stranger:
            assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
            stranger.sendall(data)
            with contextlib.suppress(OSError):  # it may have been left already
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(64) == b""
    eventually(lambda: not server._clients, "a stranger's connection stays")


def test_a_large_request_of_a_known_client_is_bounded(server: Server) -> None:
    assert server.remote is not None
    connection = connect(server.remote, PATIENCE)
    connection.sendall(struct.pack(">I", MAX_REQUEST + 1))
    assert connection.recv(16) == b""
    connection.close()


def test_addresses_and_secrets() -> None:
    assert parse_address("tcp://10.0.0.1:8422", SECRET) == Remote("10.0.0.1", 8422, SECRET)
    assert parse_address("tcp://[fe80::1]:9", SECRET) == Remote("fe80::1", 9, SECRET)
    for text in ("", "/run/tandem/s", "tcp://", "tcp://host", "tcp://host:x", "tcp://host:70000"):
        assert parse_address(text, SECRET) is None
    assert "secret" not in repr(Remote("h", 1, SECRET))
    with pytest.raises(StoreError, match="16 bytes"):
        Remote("h", 1, b"short")
    with pytest.raises(StoreError, match=r"store\.rpc_host"):
        listen(Remote("203.0.113.7", 1, SECRET), 1)
