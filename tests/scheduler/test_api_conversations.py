"""Conversations as wholes: forks, files, and the commands for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_stack import Stack
from openai import OpenAI
from redis_kit import Server

from scheduler.cli import main


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    api: Any = {"max_bundle_mb": 1}
    with Server() as server, Stack(server.url, api=api) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client() as made:
        yield made


def talk(client: OpenAI, *texts: str) -> tuple[str, list[Any]]:
    """(conversation, responses)."""
    conversation = client.conversations.create(metadata={"title": "Sky"}).id
    return conversation, [
        client.responses.create(model="test-model", input=text, conversation=conversation)
        for text in texts
    ]


def texts(client: OpenAI, conversation: str) -> list[str]:
    items: Any = client.conversations.items.list(conversation, order="asc")
    return [item.content[0].text for item in items]


def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/conversations/{path}", json=body, timeout=120)


def test_a_fork_goes_on_with_the_exact_ids(stack: Stack, client: OpenAI) -> None:
    origin, (one, two) = talk(client, "Why is the sky blue?", "And at sunset?")
    whole = post(stack, f"{origin}/fork").json()
    early = post(stack, f"{origin}/fork", response_id=one.id, metadata={"title": "Early"}).json()
    assert whole["metadata"] == {"title": "Sky"}
    assert early["metadata"] == {"title": "Early"}
    assert early["forked_from"] == {"conversation": origin, "response": one.id}
    assert texts(client, whole["id"]) == texts(client, origin)
    assert texts(client, early["id"]) == texts(client, origin)[:2]
    for fork, last in ((whole, two), (early, one)):
        made = client.responses.create(
            model="test-model", input="And on Mars?", conversation=fork["id"]
        )
        past = stack.store.turn_ids(last.id)
        assert stack.workers.prompts[made.id][: len(past)] == past
    assert len(texts(client, origin)) == 4, "the origin stays as it was"
    # A fork stands by itself.
    client.conversations.delete(origin)
    after = client.responses.create(model="test-model", input="So?", conversation=whole["id"])
    prompt = stack.tokenizer.decode(stack.workers.prompts[after.id])
    assert prompt.index("sky blue") < prompt.index("sunset") < prompt.index("Mars")
    assert client.conversations.items.list(whole["id"]).data


def test_forks_that_cannot_be(stack: Stack, client: OpenAI) -> None:
    origin, _ = talk(client, "One")
    _, (other,) = talk(client, "Two")
    assert post(stack, f"{origin}/fork", response_id=other.id).status_code == 404
    assert post(stack, f"conv_{'0' * 32}/fork").status_code == 404
    assert post(stack, f"{origin}/fork", response_id=5).status_code == 400


def test_an_exported_conversation_comes_back_as_it_was(stack: Stack, client: OpenAI) -> None:
    origin, (_, two) = talk(client, "Why is the sky blue?", "And at sunset?")
    url = f"{stack.url}/v1/conversations"
    data = httpx.get(f"{url}/{origin}/export").content
    said, ids = texts(client, origin), stack.store.turn_ids(two.id)
    client.conversations.delete(origin)
    for _ in range(2):  # the second time it is here already
        back = httpx.post(f"{url}/import", content=iter([data[:100], data[100:]]), timeout=120)
        assert back.status_code == 200, back.text
        assert back.json()["id"] == origin
        assert back.json()["imported"]["turns"] == 2
    assert texts(client, origin) == said
    assert stack.store.turn_ids(two.id) == ids
    made = client.responses.create(model="test-model", input="So?", conversation=origin)
    assert stack.workers.prompts[made.id][: len(ids)] == ids
    assert list((stack.config.data_dir / "transfer").iterdir()) == []
    # Nothing is taken from a file that is damaged, and nothing of this machine is told.
    for wrong in (b"", b"x" * 50, data[:-30], data[:300] + bytes([data[300] ^ 1]) + data[301:]):
        refused = httpx.post(f"{url}/import", content=wrong, timeout=120)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "invalid_file"
        assert str(stack.config.data_dir) not in refused.text
    huge = httpx.post(f"{url}/import", content=b"x" * ((1 << 20) + 1), timeout=120)
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "request_too_large")
    parts = iter([b"x" * (1 << 19)] * 3)  # without a length
    assert httpx.post(f"{url}/import", content=parts, timeout=120).status_code == 413
    assert httpx.get(f"{url}/conv_{'0' * 32}/export").status_code == 404
    assert list((stack.config.data_dir / "transfer").iterdir()) == []


def test_a_client_that_leaves_in_the_middle(stack: Stack, client: OpenAI) -> None:
    origin, _ = talk(client, "One")
    data = httpx.get(f"{stack.url}/v1/conversations/{origin}/export").content
    client.conversations.delete(origin)
    going = threading.Event()

    def parts() -> Iterator[bytes]:
        yield data[:50]
        going.set()
        raise ConnectionError("the client has gone")

    with pytest.raises(ConnectionError):
        httpx.post(f"{stack.url}/v1/conversations/import", content=parts(), timeout=120)
    assert going.is_set()
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(origin)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["conversations", *words])
    told = capsys.readouterr()
    return status, told.out or told.err


def test_the_commands(
    stack: Stack,
    client: OpenAI,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TANDEM_URL", stack.url)
    origin, (one, _) = talk(client, "Why is the sky blue?", "And at sunset?")
    status, out = run(capsys, "show", origin)
    assert status == 0
    assert "sky blue" in out
    assert "sunset" in out
    status, out = run(capsys, "fork", origin, "--at", one.id)
    fork = out.strip()
    assert (status, texts(client, fork)) == (0, texts(client, origin)[:2])
    assert f"a fork that goes on after {one.id}" in run(capsys, "show", fork)[1]
    (row,) = (line for line in run(capsys)[1].splitlines() if line.startswith(fork))
    assert "0 after 2 items" in row
    assert json.loads(run(capsys, "fork", origin, "--json")[1])["forked_from"]["response"]
    file = tmp_path / "sky.tandem"
    status, out = run(capsys, "export", origin, str(file))
    assert status == 0, out
    assert f"{file.stat().st_size:,} bytes" in out
    assert file.stat().st_mode & 0o777 == 0o600
    status, out = run(capsys, "export", origin, str(file))
    assert (status, "exists already" in out) == (2, True)
    assert list(tmp_path.iterdir()) == [file]
    assert run(capsys, "delete", origin, "--yes")[0] == 0
    status, out = run(capsys, "import", str(file))
    assert status == 0, out
    assert out.startswith(f"{origin}: 2 turns, 0 states")
    assert run(capsys, "show", origin)[0] == 0
    stack.store.delete_conversation(origin)
    stack.store.create_conversation(origin, "somebody")
    status, out = run(capsys, "import", str(file))
    assert status == 0, out
    assert f"its id in the file, {origin}, is taken" in out
    assert texts(client, out.partition(":")[0])[0] == "Why is the sky blue?"
    for words in (
        ("show", "resp_1"), ("fork", "x"), ("import", str(tmp_path / "none")),
        ("export", f"conv_{'0' * 32}", str(tmp_path / "a")),
    ):  # fmt: skip
        status, out = run(capsys, *words)
        assert status == 2, out
        assert len(out.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file]
