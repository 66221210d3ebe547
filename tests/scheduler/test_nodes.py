"""The registry of nodes: who lives, who has gone, and waiting for one."""

from __future__ import annotations

import threading

import pytest
import redis
from jobs_kit import eventually

from scheduler.nodes import Node, Nodes, Presence


def test_a_node_is_listed_while_it_lives(client: redis.Redis, redis_url: str) -> None:
    nodes = Nodes(client)
    node = Node(
        "decode", "m3", queue="decode-m3", link="127.0.0.1:9", secret="s", facts={"slots": 8}
    )
    with Presence(redis_url, node, ttl=6) as presence:
        eventually(lambda: nodes.get("decode", "m3"), "it is not registered")
        with pytest.raises(TimeoutError, match="decode node 'm3' is starting"):
            nodes.wait_for("decode", "m3", 0.3)
        presence.update(state="ready", fingerprint="ab")
        found = nodes.wait_for("decode", "m3", 60.0)
        assert (found.fingerprint, found.facts, found.pid) == ("ab", {"slots": 8}, node.pid)
        # A machine that stalls for longer than the entry lives has it back with its next refresh.
        eventually(lambda: nodes.list() == nodes.list("decode") == [found], "it is not listed")
        assert nodes.list("prefill") == []
        # Refreshed: without a time to live it soon has one again.
        eventually(lambda: client.persist(found.key), "the entry is gone")
        eventually(lambda: client.pttl(found.key) > 0, "the entry is not refreshed")
        asked = iter(range(1000))
        presence.watch(lambda: {"pulses": next(asked)})

        def told() -> Node | None:
            node = nodes.get("decode", "m3")
            return node if node is not None and node.facts.get("pulses", 0) > 1 else None

        node = eventually(told, "facts that change by themselves are not told")
        assert node.facts["slots"] == 8
    assert nodes.list() == []
    with pytest.raises(TimeoutError, match="has not reported"):
        nodes.wait_for("decode", "m3", 0.0)


def test_a_dead_nodes_entry_expires(client: redis.Redis, redis_url: str) -> None:
    presence = Presence(redis_url, Node("prefill", "m5"), ttl=30)
    presence.start()
    eventually(lambda: Nodes(client).get("prefill", "m5"), "not registered")
    assert 0 < client.pttl("tandem:node:prefill:m5") <= 30_000
    presence.stop()


def test_an_entry_is_removed_though_redis_stalls(client: redis.Redis, redis_url: str) -> None:
    def tried() -> set[str]:
        waiting = [one for one in client.client_list() if "b" in one["flags"]]
        return {one["id"] for one in waiting if one["cmd"].startswith("eval")}

    # Only its owner removes this entry, long after the test.
    presence = Presence(redis_url, Node("prefill", "m5"), ttl=3000).start()
    eventually(lambda: Nodes(client).get("prefill", "m5"), "not registered")
    client.client_pause(600_000, all=False)
    stopping = threading.Thread(target=presence.stop)
    try:
        stopping.start()
        first = eventually(tried, "it does not try")
        eventually(lambda: tried() - first, "it does not try again")
    finally:
        client.client_unpause()
    eventually(lambda: Nodes(client).get("prefill", "m5") is None, "it is not removed")
    stopping.join()


def test_a_predecessor_does_not_remove_its_successor(client: redis.Redis, redis_url: str) -> None:
    # Neither is refreshed meanwhile, which would make the older one's entry the present one.
    with Presence(redis_url, Node("decode", "m3"), ttl=3000) as old:
        eventually(lambda: Nodes(client).get("decode", "m3"), "not registered")
        with Presence(redis_url, Node("decode", "m3"), ttl=3000) as new:
            eventually(
                lambda: (n := Nodes(client).get("decode", "m3")) and n.boot == new.node.boot,
                "not replaced",
            )
            old.stop()
            found = Nodes(client).get("decode", "m3")
            assert found is not None
            assert found.boot == new.node.boot


def test_garbage_in_the_registry_is_skipped(client: redis.Redis) -> None:
    client.set("tandem:node:decode:bad", b"\xc1")
    client.set("tandem:node:decode:odd", b"\x01")
    assert Nodes(client).list() == []
    assert Nodes(client).get("decode", "bad") is None
