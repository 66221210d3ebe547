"""An API that takes connections and does not answer is not waited for long, and is told apart."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scheduler.command import client as client_module
from scheduler.command.client import Client, ClientError

LOOKUPS: dict[str, Callable[[Client], Any]] = {
    "jobs": lambda client: client.jobs(),
    "conversations": lambda client: client.conversations(),
    "conversation": lambda client: client.conversation("conv_" + "0" * 32),
    "response": lambda client: client.retrieve("resp_" + "0" * 32),
    "ledger": lambda client: client.ledger("resp_" + "0" * 32),
    "items": lambda client: client.items("conv_" + "0" * 32),
}
released = threading.Event()


class HealthOnly(BaseHTTPRequestHandler):
    """Says at once that it lives, and nothing to all else until the test is over."""

    def do_GET(self) -> None:
        if self.path != "/health":
            released.wait(60)
            return
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def lives() -> Iterator[str]:
    released.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), HealthOnly) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        released.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_api_that_is_stuck_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(client_module, "LOOKUP", 0.5)
    monkeypatch.setattr(client_module, "HEALTH", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        port = stuck.getsockname()[1]
        with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(ClientError) as told:
            LOOKUPS[name](client)
    assert "takes connections but does not answer" in str(told.value)
    assert "tandem service logs api" in str(told.value)


def test_what_stands_behind_an_api_that_lives_is_named(
    monkeypatch: pytest.MonkeyPatch, lives: str
) -> None:
    monkeypatch.setattr(client_module, "LOOKUP", 0.5)
    monkeypatch.setattr(client_module, "HEALTH", 60.0)
    with Client(lives) as client, pytest.raises(ClientError, match=r"lives but did not") as told:
        client.jobs()
    assert f"{lives}/ready" in str(told.value)
