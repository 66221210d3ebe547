"""Two decode nodes behind one API: each conversation is found at its home, or its node is named."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_stack import Stack, Workers
from jobs_kit import Server, eventually

from scheduler.api import backend
from scheduler.cli import main
from scheduler.command.client import Client
from scheduler.homes import Homes, begin_at, successor
from scheduler.jobs import Jobs
from scheduler.nodes import Node, Nodes, Presence
from scheduler.record import HomeMoved, NewJob, response_id
from store.bundle import MAGIC
from store.remote import Remote
from store.serving import serve
from store.store import Store
from store.turns import Turn

SECRET = bytes(range(32))


class Far:
    """A decode node of another machine: its store over TCP, and what takes its jobs."""

    def __init__(self, stack: Stack) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="tf-"))
        self.store = Store.open(self.dir / "store", 64 << 20)
        self.rpc = serve(self.store, self.dir / "s")
        remote = self.rpc.offer(Remote("127.0.0.1", 0, SECRET))
        config = stack.config.model_copy(update={"node": "far"})
        self.workers = Workers(config, self.store, stack.tokenizer)
        self.presence = Presence(
            config.redis_url,
            Node("decode", "far", state="ready", rpc=str(remote), secret=SECRET.hex()),
            ttl=60,
        )

    def __enter__(self) -> Far:
        self.presence.start()
        self.workers.start()
        return self

    def leave(self) -> None:
        """It goes away, as when its machine is switched off."""
        self.workers.stop()
        self.presence.stop()
        self.rpc.close()

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.workers.runs.client.close()
        self.store.close()
        shutil.rmtree(self.dir, ignore_errors=True)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr(backend, "_NODES_FOR", 0.0)
    with Server() as server:
        made = Stack(server.url)
        near = Node("decode", "local", state="ready", rpc=str(made.config.store_socket))
        prefill = Node("prefill", "local", state="ready")
        made.present = [Presence(server.url, node, ttl=60) for node in (prefill, near)]
        with made as running:
            yield running


@pytest.fixture
def far(stack: Stack) -> Iterator[Far]:
    with Far(stack) as made:
        nodes = Nodes(stack.workers.runs.client)
        eventually(lambda: nodes.get("decode", "far"), "the node is not published")
        yield made


def at(stack: Stack, far: Far, node: str, number: int = 0) -> str:
    """A new conversation on a node, made as if it had been its turn."""
    store = stack.store if node == "local" else far.store
    ident = f"conv_{number:032x}"
    store.create_conversation(ident, created=1000.0 + number)
    Homes(stack.workers.runs.client).begin(ident, node)
    return ident


def answered(stack: Stack, conversation: str, text: str = "Hello") -> Any:
    with stack.client() as client:
        return client.responses.create(model="test-model", input=text, conversation=conversation)


def test_every_turn_and_look_goes_to_the_home(stack: Stack, far: Far) -> None:
    homes = {node: at(stack, far, node, k) for k, node in enumerate(("local", "far"))}
    with stack.client() as client, Client(stack.url) as command:
        for node, conversation in homes.items():
            store, other = (stack.store, far.store) if node == "local" else (far.store, stack.store)
            first = answered(stack, conversation)
            assert first.to_dict()["tandem"]["node"] == node
            second = client.responses.create(
                model="test-model", input="And?", previous_response_id=first.id
            )
            assert second.to_dict()["tandem"]["node"] == node
            assert store.conversation_turns(conversation) == [first.id, second.id]
            assert other.get_conversation(conversation) is None
            Jobs(stack.workers.runs.client).client.delete(f"tandem:job:{second.id}")
            again = client.responses.retrieve(second.id)
            assert again.output_text == second.output_text, "found in its store"
            assert command.ledger(first.id)["id"] == first.id
            assert len(command.items(conversation)) == 4
            command.update_conversation(conversation, metadata={"title": node})
            assert command.conversation(conversation)["metadata"] == {"title": node}
            fork = command.fork_conversation(conversation, None)
            assert store.get_conversation(fork["id"]) is not None
            with tempfile.TemporaryFile() as file:
                assert command.export_conversation(conversation, file) > 0
                file.seek(0)
                assert file.read(len(MAGIC)) == MAGIC
            assert command.delete_conversation(fork["id"])["deleted"]
            assert command.delete_conversation(conversation)["deleted"]
            assert store.list_conversations() == []
            with pytest.raises(openai.NotFoundError):
                client.conversations.retrieve(conversation)


def test_lists_are_those_of_all_nodes_in_their_order(stack: Stack, far: Far) -> None:
    made = [at(stack, far, ("local", "far", "far")[k % 3], k) for k in range(130)]
    far.store.create_conversation(made[0], created=1000.0)  # a copy that a move has left
    with Client(stack.url) as command:
        assert [one["id"] for one in command.conversations(200)] == made[::-1]
        assert [one["id"] for one in command.conversations(7)] == made[:-8:-1]
    page = httpx.get(f"{stack.url}/v1/conversations", params={"limit": 1}).json()
    assert "tandem" not in page
    assert page["has_more"] is True


def test_what_lies_on_a_node_that_is_away_is_not_said_to_be_gone(stack: Stack, far: Far) -> None:
    there, here = at(stack, far, "far", 1), at(stack, far, "local", 0)
    turn = answered(stack, there)
    far.leave()
    nodes = Nodes(stack.workers.runs.client)
    eventually(lambda: nodes.get("decode", "far") is None, "the node stays listed")
    with stack.client() as client:
        for ask in (
            lambda: client.conversations.retrieve(there),
            lambda: client.conversations.delete(there),
            lambda: answered(stack, there),
            lambda: client.responses.create(
                model="test-model", input="?", previous_response_id=turn.id
            ),
            lambda: client.conversations.retrieve("conv_" + "f" * 32),
        ):
            with pytest.raises(openai.InternalServerError, match="decode node far") as refused:
                ask()
            assert refused.value.status_code == 503
        page = httpx.get(f"{stack.url}/v1/conversations").json()
        assert [one["id"] for one in page["data"]] == [here]
        assert page["tandem"] == {"away": ["far"]}
        assert answered(stack, here).status == "completed"
        assert client.responses.create(model="test-model", input="new").status == "completed"
        nodes.unknow("far")
        Homes(nodes._client).forget(there)
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(there)


def test_a_conversation_without_a_pointer_is_found_with_its_latest_turn(
    stack: Stack, far: Far
) -> None:
    conversation = at(stack, far, "far")
    first = answered(stack, conversation)
    old = far.store.get_turn(first.id)
    assert old is not None
    second = answered(stack, conversation, "And?")
    stack.store.put_turn(Turn.from_dict(old.to_dict()))  # an old copy
    Homes(stack.workers.runs.client).forget(conversation)
    third = answered(stack, conversation, "Then?")
    assert third.to_dict()["tandem"]["node"] == "far"
    assert far.store.conversation_turns(conversation) == [first.id, second.id, third.id]


def test_a_prompt_goes_to_the_node_that_has_its_beginning(
    stack: Stack, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(ids: Any, owner: str = "", beyond: int = 0) -> Any:
        return type("Found", (), {"tokens": len(ids) - 8})

    text = "word " * 400
    monkeypatch.setattr(far.store, "longest_prefix", stored)
    with stack.client() as client:
        made = client.responses.create(model="test-model", input=text)
        assert made.to_dict()["tandem"]["node"] == "far"
        kept = client.responses.create(model="test-model", input="short")
        assert kept.to_dict()["tandem"]["node"] == "local"


def test_a_job_is_accepted_for_the_home_it_was_made_for_and_for_no_other(stack: Stack) -> None:
    client = stack.workers.runs.client
    stack.workers.may_prefill.clear()
    jobs, homes = Jobs(client), Homes(client)

    def job(home: str | None, node: str) -> NewJob:
        return NewJob(response_id(), "m", {"params": {}}, [1, 2], conversation="conv_x",
                      node=node, home=home)  # fmt: skip

    jobs.accept(first := job("", "m3"))
    assert homes.of("conv_x") == "m3"
    for wrong in ("", "m4"):
        with pytest.raises(HomeMoved):
            jobs.accept(job(wrong, "m4"))
    jobs.accept(second := job("m3", "m3"))
    assert client.smembers("tandem:at:conv_x") == {first.id.encode(), second.id.encode()}
    for new in (first, second):
        jobs.cancel(new.id)
    assert not client.exists("tandem:at:conv_x")


def test_a_branch_stays_with_its_past(stack: Stack, far: Far) -> None:
    """It holds the conversation that it goes on from until its own turn does."""
    past, client = at(stack, far, "far"), stack.workers.runs.client
    first = answered(stack, past)
    with stack.client() as openai_client:
        branch = openai_client.responses.create(
            model="test-model",
            input=[
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And?"},
            ],
        )
    record = client.hgetall(f"tandem:job:{branch.id}")
    assert (record[b"previous"], record[b"past"]) == (first.id.encode(), past.encode())
    assert branch.to_dict()["tandem"]["node"] == "far"
    assert not client.exists(f"tandem:at:{past}")
    jobs, homes = Jobs(client), Homes(client)

    def job(past_home: str) -> NewJob:
        return NewJob(response_id(), "m", {"params": {}}, [1, 2], conversation="conv_b",
                      node="far", home="", past=past, past_home=past_home)  # fmt: skip

    for workers in (stack.workers, far.workers):  # each would take it
        workers.may_prefill.clear()
    with pytest.raises(HomeMoved):
        jobs.accept(job("local"))
    jobs.accept(new := job("far"))
    assert not homes.switch(past, "far", "local", homes.count(past))
    jobs.cancel(new.id)
    assert homes.switch(past, "far", "local", homes.count(past))


def nodes(*rows: tuple[str, str, int, str]) -> list[Node]:
    return [
        Node("decode", name, state=state, fingerprint=model, link="h:1", rpc="r",  # type: ignore[arg-type]  # a state
             facts={"rows": busy, "slots": 8})
        for name, state, busy, model in rows
    ]  # fmt: skip


def test_where_conversations_begin_and_who_takes_over() -> None:
    some = nodes(("a", "ready", 4, "f"), ("b", "ready", 1, "f"), ("c", "draining", 0, "f"),
                 ("d", "ready", 1, "g"))  # fmt: skip
    assert begin_at(some, "a") == "b"
    assert begin_at(some, "d") == "d"
    drained = Node("decode", "e", state="ready", fingerprint="f", link="h:1", rpc="r",
                   facts={"rows": 0, "slots": 8, "drained": True})  # fmt: skip
    assert begin_at([*some, drained], "e") == "b"
    assert begin_at([drained], "a") == "e", "rather there than nowhere"
    assert successor([*some, drained], "a", "f") == some[1]
    assert successor([some[0], drained], "a", "f") == drained
    assert begin_at(nodes(("a", "starting", 0, "f")), "z") == "z"
    found = successor(some, "a", "f")
    assert found is not None
    assert found.name == "b"
    assert successor(some, "b", "f") is some[0]
    assert successor(some, "d", "g") is None


def command(stack: Stack, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    config = stack.dir / "tandem.toml"
    config.write_text(
        f'data_dir = "{stack.config.data_dir}"\n[redis]\nurl = "{stack.config.redis.url}"\n'
    )
    status = main([*words, "--config", str(config)])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_the_command_line_tells_of_nodes_that_are_away(
    stack: Stack, far: Far, capsys: pytest.CaptureFixture[str]
) -> None:
    here = at(stack, far, "local", 0)
    assert "far" in command(stack, capsys, "node", "list")[1]
    status, told = command(stack, capsys, "node", "forget", "far")
    assert status != 0
    assert "stop it first" in told
    far.leave()
    nodes = Nodes(stack.workers.runs.client)
    eventually(lambda: nodes.get("decode", "far") is None, "the node stays listed")
    assert "away" in command(stack, capsys, "node", "list")[1]
    status, told = command(stack, capsys, "conversations", "--url", stack.url)
    assert status == 0
    assert here in told
    assert "decode node far is away" in told
    assert command(stack, capsys, "node", "forget", "far") == (0, "far is forgotten\n")
    assert "is away" not in command(stack, capsys, "conversations", "--url", stack.url)[1]
    assert command(stack, capsys, "node", "forget", "far")[0] != 0


def test_the_status_page_counts_all_stores(stack: Stack, far: Far) -> None:
    for k, node in enumerate(("local", "far", "far")):
        at(stack, far, node, k)
    with contextlib.closing(stack.client()):
        text = httpx.get(f"{stack.url}/metrics").text
    assert "tandem_store_conversations 3.0" in text


def test_what_moves_while_it_is_asked_for_is_found_at_its_new_home(
    stack: Stack, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    ident = at(stack, far, "far")
    homes, of = ["local", "local"], Homes.of

    def before(self: Homes, conversation: str) -> str:
        return homes.pop() if homes else of(self, conversation)

    monkeypatch.setattr(Homes, "of", before)
    with stack.client() as client:
        homes[:] = ["local"]
        assert client.conversations.retrieve(ident).id == ident
        homes[:] = ["local"]
        stack.backend.stores.update_conversation(ident, metadata={"title": "sea"})
    record = far.store.get_conversation(ident)
    assert record is not None
    assert record["metadata"] == {"title": "sea"}
