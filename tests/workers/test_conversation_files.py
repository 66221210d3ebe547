"""Forks and files of conversations whose state a model computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_node import ApiNode
from redis_kit import Server

from engine.model import Model

TEXT = "The quick brown fox jumps over the lazy dog, and then it does so again. "


@pytest.fixture
def stack(loaded: Model, model_path: Path) -> Iterator[ApiNode]:
    with Server() as server, ApiNode(server.url, loaded, model_path) as running:
        yield running


def ask(stack: ApiNode, conversation: str, text: str) -> dict[str, Any]:
    body = {"input": text, "conversation": conversation, "max_output_tokens": 6, "temperature": 0}
    made = stack.workers.serve(
        lambda: httpx.post(f"{stack.url}/v1/responses", json=body, timeout=120)
    )
    assert made.status_code == 200, made.text
    found: dict[str, Any] = made.json()
    turn = stack.store.get_turn(found["id"])
    assert turn is not None
    assert turn.output_ids == stack.node.oracle(stack.job(found["id"]))
    stack.node.settle()
    return found


def test_state_is_shared_with_a_fork_and_travels_in_a_file(stack: ApiNode) -> None:
    url = f"{stack.url}/v1/conversations"
    origin = httpx.post(url, json={}, timeout=120).json()["id"]
    first = ask(stack, origin, TEXT * 3)
    second = ask(stack, origin, "And then?")
    assert second["tandem"]["path"] == "restored"
    # The last token was emitted and is in no state yet.
    held = len(stack.store.turn_ids(second["id"])) - 1

    fork = httpx.post(f"{url}/{origin}/fork", json={}, timeout=120).json()["id"]
    forked = ask(stack, fork, "What else?")
    assert forked["usage"]["input_tokens_details"]["cached_tokens"] == held
    early = httpx.post(
        f"{url}/{origin}/fork", json={"response_id": first["id"]}, timeout=120
    ).json()["id"]
    other = ask(stack, early, "Or else?")
    cached = other["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == len(stack.store.turn_ids(first["id"])) - 1

    data = httpx.get(f"{url}/{origin}/export", timeout=60).content
    for conversation in (origin, fork, early):
        assert httpx.delete(f"{url}/{conversation}", timeout=120).status_code == 200
    assert stack.store.find_state(second["id"]) is None
    back = httpx.post(f"{url}/import", content=data, timeout=60).json()
    assert back["imported"]["states"] == 2
    again = ask(stack, origin, "What else?")
    assert again["tandem"]["path"] == "restored"
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == held
    assert again["output"][0]["content"] == forked["output"][0]["content"]
