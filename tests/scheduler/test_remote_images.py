"""Images by URL: public addresses only, also after redirects and name changes, and bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scheduler.api.remote import fetch, is_public
from scheduler.images import ImageError, bytes_of, data_url

IMAGE = b"\x89PNG" + bytes(200)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"]))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        kind = {"/page": "text/html"}.get(self.path, "image/png")
        self.send_response(404 if self.path == "/gone" else 200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(IMAGE * (50 if self.path == "/large" else 1))

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def get(server: ThreadingHTTPServer, path: str, limit: int = 5000) -> str:
    """As from a public server: every name leads to this one."""
    port = server.server_address[1]
    return fetch(
        f"http://pictures.example:{port}{path}",
        limit,
        addresses=lambda host, port: ["127.0.0.1"] if host == "pictures.example" else ["10.0.0.1"],
        public=lambda address: address == "127.0.0.1",
    )


def test_an_image_becomes_data(server: ThreadingHTTPServer) -> None:
    port = server.server_address[1]
    assert bytes_of(get(server, "/x.png")) == IMAGE
    assert server.seen[-1] == ("/x.png", f"pictures.example:{port}")  # type: ignore[attr-defined]
    assert bytes_of(get(server, f"/to/http://pictures.example:{port}/y")) == IMAGE
    assert bytes_of(get(server, "/to//z")) == IMAGE


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/gone", "answers 404"),
        ("/page", "no image"),
        ("/large", "larger than 5000 bytes"),
        ("/to/http://inner.example/x", "public addresses only"),
        ("/to/http://169.254.169.254/x", "public addresses only"),
        ("/to/file:///etc/passwd", "begins with https"),
        ("/to//to//to//to//to//x", "redirects more than 3 times"),
    ],
)
def test_what_is_not_taken(server: ThreadingHTTPServer, path: str, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        get(server, path)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://localhost/x",
        "http://[::1]/x",
        "http://0.0.0.0/x",
        "http://2130706433/x",
        "http://192.168.1.1/x",
        "http://[fe80::1%25lo]/x",
        "http://[::ffff:10.0.0.1]/x",
        "ftp://example.com/x",
        "http://user:secret@example.com/x",
        "http://example.com:99999/x",
        "//x",
    ],
)
def test_no_address_of_this_network_is_asked(url: str) -> None:
    with pytest.raises(ImageError):
        fetch(url, 5000)


def test_a_name_with_one_inner_address_is_refused() -> None:
    with pytest.raises(ImageError, match="public addresses only"):
        fetch("http://x.example/", 5000, addresses=lambda host, port: ["93.184.216.34", "10.1.1.1"])


def test_public_addresses() -> None:
    assert all(map(is_public, ["93.184.216.34", "2606:2800:220:1::1"]))
    inner = ["10.0.0.1", "100.64.0.1", "169.254.1.1", "224.0.0.1", "::", "fc00::1", "ff02::1"]
    inner += ["64:ff9b::a00:1", "2002:a00:1::", "2001:0:1::1", "::ffff:127.0.0.1", "nonsense"]
    assert not any(map(is_public, inner))


def test_data_urls() -> None:
    assert bytes_of(data_url(IMAGE)) == IMAGE
    for url in (
        "data:image/png;base64,",
        "data:image/png,x",
        "http://x",
        "data:image/png;base64,*",
    ):
        with pytest.raises(ImageError):
            bytes_of(url)
