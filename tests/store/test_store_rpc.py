from __future__ import annotations

import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import msgpack
import pytest
from made_states import make_state, make_turn
from redis_kit import eventually

from store.errors import StoreError, StoreUnavailable
from store.rpc import StoreClient
from store.serving import Server, serve
from store.store import Store

PATIENCE = 300.0
"""Seconds that a client waits here: a machine or a disk that stalls is no owner that is gone."""


@pytest.fixture
def short() -> Iterator[Path]:
    with TemporaryDirectory(prefix="tdm-") as path:
        yield Path(path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", 64 << 20)
    yield opened
    opened.close()


@pytest.fixture
def server(store: Store, short: Path) -> Iterator[Server]:
    running = serve(store, short / "run" / "store.sock")
    yield running
    running.close()


def test_everything_a_client_asks(store: Store, server: Server) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    client = StoreClient(server.path, PATIENCE)
    assert client.ping()
    assert client.create_conversation("conv_a", "anna", {"a": "b"})["head"] is None
    turn = make_turn([1, 2], [3], conversation="conv_a")
    client.put_turn(turn)
    second = make_turn([4], [5], conversation="conv_a", parent=turn.id)
    store.put_turn(second)
    found = client.get_turn(turn.id)
    assert found is not None
    assert (found.items, found.params, found.output_ids) == (turn.items, turn.params, [3])
    assert client.get_turn("resp_none") is None
    assert client.turn_ids(second.id) == [1, 2, 3, 4, 5]
    assert [one.id for one in client.path_of(second.id)] == [turn.id, second.id]
    assert client.conversation_turns("conv_a") == [turn.id, second.id]
    store.save_state(turn.id, *make_state([1, 2]))
    state = client.find_state(turn.id)
    assert state is not None
    assert state["tokens"] == 2
    assert client.find_state(second.id) is None
    assert client.find_state(second.id, nearest=True) == state
    record = client.update_conversation("conv_a", metadata={"x": "y"})
    assert record == client.get_conversation("conv_a")
    assert [one["id"] for one in client.list_conversations("anna")] == ["conv_a"]
    assert client.stats()["states"] == 1
    assert client.delete_conversation("conv_a")
    assert client.get_conversation("conv_a") is None
    client.close()


def test_errors_cross_the_socket(server: Server) -> None:
    client = StoreClient(server.path, PATIENCE)
    with pytest.raises(StoreError, match="no conversation conv_x"):
        client.update_conversation("conv_x", pinned=True)
    with pytest.raises(StoreError, match="bad request"):
        client.call("close")
    with pytest.raises(StoreError, match="bad request"):
        client.call("get_turn", wrong=1)
    assert client.ping()
    client.close()


def test_a_call_does_not_wait_for_others_without_end(server: Server) -> None:
    client = StoreClient(server.path, timeout=0.01)
    with client._lock, pytest.raises(StoreUnavailable, match="has answered others"):
        client.stats()
    client.timeout = PATIENCE
    assert client.ping()
    client.close()


def test_an_absent_owner_is_said_and_a_new_one_found(store: Store, short: Path) -> None:
    client = StoreClient(short / "store.sock", PATIENCE)
    with pytest.raises(StoreUnavailable, match="decode worker"):
        client.stats()
    first = serve(store, short / "store.sock")
    assert client.ping()
    first.close()
    with pytest.raises(StoreUnavailable):
        client.stats()
    second = serve(store, short / "store.sock")
    assert client.stats()["turns"] == 0
    second.close()
    third = serve(store, short / "store.sock")
    assert client.stats()["turns"] == 0  # the kept connection was to the one before
    client.close()
    third.close()


def test_a_stale_socket_is_replaced_and_a_long_path_refused(store: Store, short: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(short / "store.sock"))
    stale.close()
    server = serve(store, short / "store.sock")
    client = StoreClient(short / "store.sock", PATIENCE)
    assert client.ping()
    client.close()
    server.close()
    with pytest.raises(StoreError, match="longer than"):
        serve(store, short / ("x" * 120))


def test_a_size_over_the_bound_ends_the_connection(server: Server) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE)
        raw.connect(str(server.path))
        raw.sendall(struct.pack(">I", 0xFFFFFFFF))
        assert raw.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE)
        raw.connect(str(server.path))
        raw.sendall(struct.pack(">I", 3) + b"\xc1\xc1\xc1")
        assert raw.recv(4096)
    client = StoreClient(server.path, PATIENCE)
    assert client.ping()
    client.close()


def test_many_threads_share_one_client(server: Server) -> None:
    client = StoreClient(server.path, PATIENCE)
    client.create_conversation("conv_a")

    def ask() -> None:
        for _ in range(50):
            record = client.get_conversation("conv_a")
            assert record is not None
            results.append(record["id"])

    results: list[str] = []
    threads = [Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["conv_a"] * 400
    client.close()


def test_a_client_that_no_thread_can_serve_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = Thread.start, Event()

    def fails_once(self: Thread) -> None:
        if self.name == "store-rpc-client" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(Thread, "start", fails_once)
    with socket.socket(socket.AF_UNIX) as refused:
        refused.settimeout(60)
        refused.connect(str(server.path))
        assert refused.recv(1) == b""
    assert failed.is_set()
    client = StoreClient(server.path, PATIENCE)
    assert client.call("ping") == "pong"
    client.close()


def test_closing_waits_for_requests_in_flight(
    store: Store, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.serving.END_SECONDS", PATIENCE)
    server = serve(store, short / "store.sock")
    begun, told = Event(), []

    def slow() -> None:
        begun.set()
        eventually(lambda: server._closing, "it is not closed")
        eventually(lambda: not server._threads[0].is_alive(), "it still accepts")
        told.append(store.stats()["turns"])

    server.add("slow", slow)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(server.path))
        request = msgpack.packb(["slow", {}])
        raw.sendall(struct.pack(">I", len(request)) + request)
        assert begun.wait(PATIENCE)
        server.close()
        assert told == [0]
