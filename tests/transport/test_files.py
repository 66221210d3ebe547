"""Pushing a directory of model files: whole or not at all, on after a break, never unverified."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_kit import eventually
from small_disk import small_disk

from transport import files, manifest
from transport.errors import LinkError
from transport.files import FileServer, listing, verify
from transport.manifest import Entry, check_entry, digest, measure
from transport.push import FileClient

SECRET = secrets.token_bytes(32)
SMALL = 1 << 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 KiB, so that small files have several."""
    for module in (manifest, files):
        monkeypatch.setattr(module, "CHUNK", SMALL)
    monkeypatch.setattr(files, "SPARE_BYTES", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three files of 0, 10 and 300,000 bytes, one of them behind a link, one in a folder."""
    path = tmp_path / "here" / "glm"
    (path / "parts").mkdir(parents=True)
    (path / "config.json").write_text('{"a": 1}\n')
    (tmp_path / "blob").write_bytes(secrets.token_bytes(300_000))
    (path / "model.safetensors").symlink_to(tmp_path / "blob")
    (path / "parts" / "empty.txt").touch()
    (path / ".hidden").write_text("stays")
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    made = FileServer("127.0.0.1", SECRET, tmp_path / "there")
    yield made
    made.close()


def push(server: FileServer, model: Path, name: str = "glm", stop_after: int = 0) -> list[str]:
    """Push; returns the stages reported. `stop_after`: break off after so many sent bytes."""
    client = FileClient(server.address, SECRET)
    stages: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stop_after and stage == "sending" and done >= stop_after:
            raise KeyboardInterrupt

    try:
        found = client.push(model, name, report)
        assert found == digest(measure(model))
    finally:
        client.close()
    return stages


def test_a_push_arrives_whole(server: FileServer, model: Path, tmp_path: Path) -> None:
    stages = push(server, model)
    assert "sending" in stages
    assert "verifying" in stages
    there = tmp_path / "there" / "glm"
    assert digest(measure(there)) == digest(measure(model))
    assert (there / "parts" / "empty.txt").stat().st_size == 0
    assert not (there / ".hidden").exists()
    assert not there.with_name("glm.push").exists()
    assert [entry["name"] for entry in listing(tmp_path / "there")] == ["glm"]
    assert verify(there) == (digest(measure(model)), [])


def test_the_same_again_is_compared_and_another_is_refused(server: FileServer, model: Path) -> None:
    push(server, model)
    assert set(push(server, model)) <= {"checking", "verifying"}
    (model / "config.json").write_text('{"a": 2}\n')
    with pytest.raises(LinkError, match=r"another model of the name glm.*--name"):
        push(server, model)
    push(server, model, "glm-2")


def test_it_goes_on_where_it_was_broken_off(
    server: FileServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        push(server, model, stop_after=3 * SMALL)
    assert listing(tmp_path / "there")[0]["partial"] is True
    sent: list[int] = []
    monkeypatch.setattr(
        FileClient, "_send",
        lambda self, head, data: (sent.append(len(data)),
                                  files.send(self._connection, head, memoryview(data))),
    )  # fmt: skip
    push(server, model)
    assert 0 < sum(sent) <= 300_010 - 2 * SMALL
    assert digest(measure(tmp_path / "there" / "glm")) == digest(measure(model))


def test_a_source_that_changed_meanwhile_is_sent_again(
    server: FileServer, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        push(server, model, stop_after=3 * SMALL)
    (tmp_path / "blob").write_bytes(secrets.token_bytes(300_000))
    push(server, model)
    assert digest(measure(tmp_path / "there" / "glm")) == digest(measure(model))


def test_what_the_disk_gives_back_wrongly_is_not_taken(
    server: FileServer, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        push(server, model, stop_after=300_000)
    partial = tmp_path / "there" / "glm.push" / "model.safetensors"
    eventually(lambda: partial.exists() and partial.stat().st_size == 300_000, "nothing arrives")
    with partial.open("r+b") as file:
        file.write(b"\0" * 100)
    with pytest.raises(LinkError, match="read back from disk, model"):
        push(server, model)
    assert not (tmp_path / "there" / "glm").exists()
    push(server, model)  # everything is sent again
    assert digest(measure(tmp_path / "there" / "glm")) == digest(measure(model))


def test_verify_names_what_differs(server: FileServer, model: Path, tmp_path: Path) -> None:
    push(server, model)
    there = tmp_path / "there" / "glm"
    data = bytearray((there / "model.safetensors").read_bytes())
    data[200_000] ^= 1
    (there / "model.safetensors").write_bytes(data)
    (there / "config.json").unlink()
    (there / "new.json").write_text("{}")
    client = FileClient(server.address, SECRET)
    found, problems = client.digest("glm", lambda *_: None)
    client.close()
    assert found != digest(measure(model))
    assert problems == [
        "config.json is missing",
        f"model.safetensors differs in 1 of 5 chunks of {SMALL} bytes",
        "new.json was not there before",
    ]


def test_strangers_and_names_that_lead_out(server: FileServer, model: Path) -> None:
    with pytest.raises(LinkError):
        FileClient(server.address, secrets.token_bytes(32))
    with pytest.raises(LinkError, match="name has letters"):
        push(server, model, "../etc")
    for path in ("../a", "/a", "a//b", ".ssh/x", "a/../b", "a/b/c/d/e", "", "a\0b"):
        with pytest.raises(LinkError):
            check_entry(path, 1)
    for size in (-1, True, 1 << 60, "1"):
        with pytest.raises(LinkError):
            check_entry("a", size)
    assert check_entry("parts/model-00001-of-00002.safetensors", 5) == Entry(
        "parts/model-00001-of-00002.safetensors", 5
    )


def test_a_chunk_that_was_not_offered_ends_the_push(server: FileServer) -> None:
    client = FileClient(server.address, SECRET)
    files.send(client._connection, {"type": "push", "name": "x", "files": [["a", 5]]})
    assert files.receive(client._connection)["state"] == "part"
    head = {"type": "chunk", "file": 3, "chunk": 0, "hash": ""}
    files.send(client._connection, head, memoryview(b"hello"))
    with pytest.raises(LinkError, match="not offered"):
        files.receive(client._connection)
    client.close()


def test_bytes_that_are_damaged_on_the_way(server: FileServer, tmp_path: Path) -> None:
    client = FileClient(server.address, SECRET)
    files.send(client._connection, {"type": "push", "name": "x", "files": [["a", 5]]})
    files.receive(client._connection)
    head = {"type": "chunk", "file": 0, "chunk": 0, "hash": manifest.digest_chunk(b"hello")}
    files.send(client._connection, head, memoryview(b"jello"))
    with pytest.raises(LinkError, match="damaged on the way"):
        files.receive(client._connection)
    client.close()
    assert not (tmp_path / "there" / "x").exists()


def test_two_pushes_of_one_name(
    server: FileServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FileClient(server.address, SECRET)
    files.send(first._connection, {"type": "push", "name": "glm", "files": [["a", 5]]})
    files.receive(first._connection)
    monkeypatch.setattr(files, "TAKE_OVER_SECONDS", 0.0)
    with pytest.raises(LinkError, match="another push of glm"):
        push(server, model)
    monkeypatch.setattr(files, "TAKE_OVER_SECONDS", 60.0)
    monkeypatch.setattr(files, "SILENT_SECONDS", 0.0)
    push(server, model)  # the first one says nothing, so this one takes over
    with pytest.raises(LinkError):
        files.receive(first._connection)
    first.close()


def test_no_room_is_said_before_anything_is_sent(model: Path) -> None:
    with small_disk(1) as disk:
        server = FileServer("127.0.0.1", SECRET, disk.path / "there")
        (model / "parts" / "big").write_bytes(bytes(2 << 20))
        try:
            with pytest.raises(LinkError, match="GB are to come: free some there"):
                push(server, model)
        finally:
            server.close()
