"""What moves between decode nodes is bounded, and what a move leaves behind is tidied up."""

from __future__ import annotations

from contextlib import closing

import pytest
from decode_kit import LONG
from moving_kit import SECRET, TALK, Pair, first_turn
from redis_kit import eventually

from scheduler.homes import Homes, key_of
from scheduler.leaving import Stays
from scheduler.nodes import Node, Nodes, Presence
from store.errors import StoreError
from store.remote import Remote
from store.rpc import StoreClient
from store.serving import serve
from store.store import Store
from worker_decode.moving import clear_strays


def test_what_comes_in_is_bounded(pair: Pair) -> None:
    with closing(StoreClient(pair.dir / "m4")) as there:
        for size in (0, -5, 1 << 60):
            with pytest.raises(StoreError, match="no room"):
                there.call("import_open", nbytes=size)
        name = there.call("import_open", nbytes=10)
        with pytest.raises(StoreError, match="longer"):
            there.call("import_write", name=name, data=b"x" * 11)
        there.call("import_write", name=name, data=b"x" * 9)
        with pytest.raises(StoreError, match="shorter"):
            there.call("import_end", name=name)
        there.call("import_write", name=name, data=b"x")
        with pytest.raises(StoreError, match="undamaged bundle"):
            there.call("import_end", name=name)
        there.call("import_close", name=name)
        names = [there.call("import_open", nbytes=1) for _ in range(4)]
        with pytest.raises(StoreError, match="try again later"):
            there.call("import_open", nbytes=1)
        for one in names:
            there.call("import_close", name=one)
        assert list((pair.other.store.environment.path / "imports").iterdir()) == []


def test_copies_that_a_move_has_left_go_at_the_next_start(pair: Pair) -> None:
    first, _ = first_turn(pair)
    pair.mover.prepare(first, "m4")
    nodes, homes = Nodes(pair.client), Homes(pair.client)
    homes.begin(TALK, "m3")
    store = pair.leaving.store
    assert clear_strays(store, homes, nodes, "m3", lambda turns: None) == 0
    other = pair.other.store
    assert clear_strays(other, homes, nodes, "m4", lambda turns: None) == 0, "on its way there"
    assert other.conversation_turns(TALK) == [first.id]
    homes.release(TALK)
    assert clear_strays(pair.other.store, homes, nodes, "m4", lambda turns: None) == 1
    assert pair.other.store.get_conversation(TALK) is None
    homes.begin(TALK, "m4")
    assert clear_strays(store, homes, nodes, "m3", lambda turns: None) == 0, "the only copy"
    pair.mover.prepare(first, "m4")
    gone: list[str] = []
    assert clear_strays(store, homes, nodes, "m3", gone.extend) == 1
    assert gone == [first.id]
    assert store.get_conversation(TALK) is None
    assert homes.claim(TALK, "m4"), "nothing holds it any more"
    assert homes.clearing(TALK, "m4")
    assert not homes.claim(TALK, "m3")
    with pytest.raises(Stays, match="old copy"):
        pair.mover.prepare(first, "m4")
    homes.release(TALK)
    pair.client.delete(key_of(TALK))


def test_a_copy_at_one_node_is_none_at_another(pair: Pair, redis_url: str) -> None:
    """Who takes over may change between the first copy and the step that moves the conversation."""
    first, _ = first_turn(pair)
    pair.mover.prepare(first, "m4")
    third = Store.open(pair.dir / "5" / "store", 32 << 20)
    rpc = serve(third, pair.dir / "m5")
    entry = Node(
        "decode", "m5", state="ready", secret=SECRET.hex(),
        rpc=str(rpc.offer(Remote("127.0.0.1", 0, SECRET))),
    )  # fmt: skip
    presence = Presence(redis_url, entry, LONG).start()
    nodes = Nodes(pair.client)
    eventually(lambda: nodes.get("decode", "m5") is not None, "the node is not published")
    try:
        with pair.mover.still(first, "m5"):
            assert third.conversation_turns(TALK) == [first.id]
    finally:
        presence.stop()
        rpc.close()
        third.close()
