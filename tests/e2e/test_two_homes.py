"""A second decode node joins; conversations and an answer under way go there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack_kit import Running, running, short_directory

from scheduler.cli import main
from scheduler.config import Config, resolved_environment
from scheduler.nodes import Nodes
from scheduler.redis_client import connect
from store.rpc import StoreClient

pytestmark = pytest.mark.rotate(7)


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Running]:
    yield from running(model_dir, jobs={"drain_seconds": 60.0})


@pytest.fixture(scope="module")
def far(stack: Running) -> Iterator[tuple[Config, subprocess.Popen[bytes]]]:
    """A decode worker with a store of its own, as on another machine."""
    directory = short_directory()
    changes: dict[str, Any] = {
        "data_dir": directory,
        "node": "far",
        "redis": stack.config.redis.model_copy(update={"url": stack.config.redis_url}),
        "store": stack.config.store.model_copy(update={"balance_above": 0.9}),
    }
    config = stack.config.model_copy(update=changes)
    log = (stack.config.data_dir / "logs" / "far.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "worker_decode"],
        env=resolved_environment(config), stdout=log, stderr=log,
    )  # fmt: skip
    with connect(stack.config.redis_url) as client:
        ready(stack, Nodes(client), "far")
    yield config, process
    process.kill()
    process.wait()
    log.close()
    shutil.rmtree(directory, ignore_errors=True)


def ready(stack: Running, nodes: Nodes, name: str) -> None:
    def look() -> bool:
        node = nodes.get("decode", name)
        return node is not None and node.state == "ready" and bool(node.link)

    stack.until(look, f"decode node {name} to be ready")


def begun(stack: Running, **body: Any) -> str:
    """A long answer under way, at a decode node that stands still."""

    def there(response: str) -> bool:
        found = stack.get(response)
        return found["status"] == "in_progress" and "first_token" in found["tandem"]["times"]

    return stack.standing("decode", there, max_output_tokens=150, **body)


def test_an_idle_conversation_is_moved_from_the_command_line(
    stack: Running,
    far: tuple[Config, subprocess.Popen[bytes]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversation = stack.http.post("/v1/conversations", json={}).json()["id"]
    first = stack.post(input="Name a river.", conversation=conversation, max_output_tokens=8)
    assert first["tandem"]["node"] == "local"
    file = tmp_path / "tandem.toml"
    file.write_text(f'data_dir = "{tmp_path}/d"\n[redis]\nurl = "{stack.config.redis_url}"\n')
    assert main(["node", "move", conversation, "--to", "far", "--config", str(file)]) == 0
    capsys.readouterr()
    assert main(["node", "balance", "--json", "--config", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told["nodes"]] == ["far", "local"]
    for one in told["nodes"]:  # as real nodes tell it
        assert one["given_nothing"] == ""
        assert one["slots"] == stack.config.decode.slots
        assert 0 < one["stored"] < one["size"]
        assert one["memory_limit"] == int(stack.config.store.hot_gb * 1e9)
    assert told["plan"] == []
    again = stack.post(input="And a sea.", conversation=conversation, max_output_tokens=8)
    assert again["tandem"]["node"] == "far"
    assert again["tandem"]["path"] == "restored"
    assert again["tandem"]["cached_tokens"] > 0
    assert stack.store.get_conversation(conversation) is None
    renamed = stack.http.post(f"/v1/conversations/{conversation}", json={"metadata": {"a": "b"}})
    assert renamed.json()["metadata"] == {"a": "b"}
    near, stack.store = stack.store, StoreClient(far[0].store_socket)
    assert stack.output_ids(again["id"]) == stack.solo(again["id"])
    stack.store.close()
    stack.store = near


def test_an_answer_and_its_conversation_go_on_at_the_other_node(
    stack: Running, far: tuple[Config, subprocess.Popen[bytes]]
) -> None:
    config = far[0]
    near, other = stack.store, StoreClient(config.store_socket)
    conversation = stack.http.post("/v1/conversations", json={}).json()["id"]
    first = stack.post(input="Tell me of the sea.", conversation=conversation, max_output_tokens=12)
    assert first["tandem"]["node"] == "local"
    second = begun(stack, input="And a long story of it.", conversation=conversation)
    old = stack.pid("decode")
    os.kill(old, signal.SIGTERM)
    stack.go_on("decode")
    done = stack.ended(second)
    moved = done["tandem"]["handoff"]["moved"]
    assert [(one["from"], one["to"], one["path"]) for one in moved] == [("local", "far", "tcp")]
    assert 0 < moved[0]["at_token"] < 150
    assert done["tandem"]["node"] == "far"
    assert done["usage"]["input_tokens_details"]["cached_tokens"] > 0
    events = stack.events(second)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    stack.store = other
    assert stack.output_ids(second) == stack.solo(second)
    turns = other.conversation_turns(conversation)
    assert [turns[0], turns[-1]] == [first["id"], second]  # and what was over too soon
    third = stack.post(input="Shorter.", conversation=conversation, max_output_tokens=8)
    assert third["tandem"]["node"] == "far"
    assert third["tandem"]["path"] in ("hot", "restored")
    stack.wait_back("decode", old)
    with connect(stack.config.redis_url) as client:
        ready(stack, Nodes(client), "local")
    assert near.get_conversation(conversation) is None
    listed = stack.http.get("/v1/conversations").json()
    assert [one["id"] for one in listed["data"]].count(conversation) == 1
    ledger = stack.http.get(f"/v1/responses/{second}/ledger").json()
    assert ["node", "far"] in [[fork["fork"], fork["took"]] for fork in ledger["forks"]]
    stack.store = near
    other.close()
