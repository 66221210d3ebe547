"""One script in Redis decides who may form a link and which epoch is valid."""

from __future__ import annotations

import threading

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_redis import LIFE, client, redis_socket

from transport.epochs import Epochs
from transport.errors import LinkError
from transport.rendezvous import side_channel

__all__ = ["client", "redis_socket"]


NONCE = bytes(range(16))


def test_an_epoch_forms_stands_and_ends(client: redis.Redis) -> None:
    sender, receiver = Epochs(client, "p"), Epochs(client, "d")
    assert sender.record("p", "d").state == "none"
    epoch = sender.form("d", receiver.boot, NONCE)
    assert epoch == 1
    receiver.join("p", epoch, NONCE)
    sender.up("p", "d", epoch)
    assert sender.record("p", "d").state == "forming"
    receiver.up("p", "d", epoch)
    assert sender.record("p", "d").state == "up"
    assert receiver.over("p", "d", epoch, "cable out")
    assert sender.record("p", "d").reason == "cable out"
    with pytest.raises(LinkError, match="is over"):
        sender.up("p", "d", epoch)
    assert sender.form("d", receiver.boot, NONCE) == 2


def test_a_late_word_about_an_old_epoch_changes_nothing(client: redis.Redis) -> None:
    sender, receiver = Epochs(client, "p"), Epochs(client, "d")
    old = sender.form("d", receiver.boot, NONCE)
    new = sender.form("d", receiver.boot, bytes(16))
    assert not receiver.over("p", "d", old, "late")
    with pytest.raises(LinkError, match="epoch 1 is over"):
        receiver.join("p", old, NONCE)
    with pytest.raises(LinkError, match="not the epoch"):
        receiver.join("p", new, NONCE)
    receiver.join("p", new, bytes(16))
    assert sender.record("p", "d").state == "forming"


def test_only_live_boots_form(client: redis.Redis) -> None:
    receiver = Epochs(client, "d")
    first = Epochs(client, "p")
    second = Epochs(client, "p")  # the node has restarted
    with pytest.raises(LinkError, match="the sender is not alive here"):
        first.form("d", receiver.boot, NONCE)
    client.delete("tandem:link:alive:d")
    with pytest.raises(LinkError, match="the receiver is not alive"):
        second.form("d", receiver.boot, NONCE)
    restarted = Epochs(client, "d")
    epoch = second.form("d", restarted.boot, NONCE)
    with pytest.raises(LinkError, match="not the epoch"):
        receiver.join("p", epoch, NONCE)


def test_links_of_other_pairs_are_not_touched(client: redis.Redis) -> None:
    nodes = {name: Epochs(client, name) for name in ("p1", "p2", "d1", "d2")}
    for p in ("p1", "p2"):
        for d in ("d1", "d2"):
            assert nodes[p].form(d, nodes[d].boot, NONCE) == 1
    nodes["p1"].over("p1", "d1", 1, "broken")
    states = [nodes[p].record(p, d).state for p in ("p1", "p2") for d in ("d1", "d2")]
    assert states == ["over", "forming", "forming", "forming"]


def test_the_sign_of_life_lapses(client: redis.Redis) -> None:
    Epochs(client, "p")
    left = client.pttl("tandem:link:alive:p")
    assert 0 < left <= LIFE * 1000


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["form", "join", "up", "over", "restart"]), max_size=12))
def test_an_epoch_never_comes_back(client: redis.Redis, steps: list[str]) -> None:
    client.flushall()
    sender, receiver = Epochs(client, "p"), Epochs(client, "d")
    epoch, dead = 0, False
    for step in steps:
        before = sender.record("p", "d")
        try:
            if step == "form":
                epoch = sender.form("d", receiver.boot, NONCE)
                dead = False
                assert epoch == before.epoch + 1
            elif step == "join":
                receiver.join("p", epoch, NONCE)
                assert not dead
            elif step == "up":
                sender.up("p", "d", epoch)
                assert not dead
            elif step == "over":
                dead = receiver.over("p", "d", epoch, "x") or dead
            else:
                receiver = Epochs(client, "d")
        except LinkError:
            assert sender.record("p", "d") == before
        after = sender.record("p", "d")
        assert after.epoch >= before.epoch
        if dead:
            assert after.state == "over"


def meet(url: str, deadline: float, ranks: list[int]) -> list[object]:
    """Two steps of an all-gather by the given ranks of a group of two, at once."""
    results: list[object] = [None, None]
    setting = {
        "redis_url": url,
        "link": "p:d",
        "epoch": 3,
        "nonce": NONCE.hex(),
        "deadline": deadline,
    }

    def run(rank: int) -> None:
        try:
            gather = side_channel(setting)(rank, 2)
            results[rank] = [gather(bytes([rank]) * 4, 4), gather(bytes([rank + 10]) * 3, 3)]
        except LinkError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def test_ranks_meet_over_redis(client: redis.Redis, redis_socket: object) -> None:
    both = [b"\0\0\0\0\1\1\1\1", b"\n\n\n\x0b\x0b\x0b"]
    assert meet(f"unix://{redis_socket}", 60, [0, 1]) == [both, both]


def test_a_rank_that_does_not_come_is_named(client: redis.Redis, redis_socket: object) -> None:
    alone, _ = meet(f"unix://{redis_socket}", 0.3, [0])
    assert isinstance(alone, LinkError)
    assert "rank 1 did not come" in str(alone)
