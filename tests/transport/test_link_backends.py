"""A link that stays: formed on demand and anew, by rdma while that works and by tcp otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import redis
from link_parts import (
    FINGERPRINT,
    LONG,
    SECRET,
    MemorySink,
    contents,
    link_threads,
    make_state,
    receiving,
)
from link_redis import client, redis_socket
from ports_kit import own_port

from transport.epochs import Epochs
from transport.errors import LinkError
from transport.link import REST_SECONDS, RETRY_SECONDS, Link, Rdma
from transport.outbound import Report

__all__ = ["client", "redis_socket"]

STATE = make_state([10_000, 20_000])
BROKEN = (sys.executable, "-P", "-c", "raise SystemExit(1)")


@pytest.fixture
def nodes(client: redis.Redis) -> Iterator[tuple[Epochs, Epochs]]:
    made = Epochs(client, "prefill-1"), Epochs(client, "decode-1")
    for each in made:
        each.start()
    yield made
    for each in made:
        each.stop()
    assert link_threads() == []


def pass_on(link: Link, name: str) -> Report:
    transfer = link.offer(name, fingerprint=FINGERPRINT, tokens=16, nbytes=30_000)
    transfer.send(STATE[:-1])
    return transfer.finish(STATE[-1])


def until_noticed(link: Link) -> None:
    """Wait until the sending end knows that its connection is gone (a safety net of 60 s)."""
    sender = link._sender
    assert sender is not None
    with sender.changed:
        assert sender.changed.wait_for(lambda: not sender.alive, 60)


def test_tcp_is_the_way_where_nothing_else_is_configured() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        link = Link(receiver.address, SECRET, deadline=LONG)
        assert link.status().path == ""
        assert pass_on(link, "t-1").path == "tcp"
        assert link.status().path == "tcp"
        link.close()
        with pytest.raises(LinkError, match="closed"):
            pass_on(link, "t-2")
    assert contents(sink.finished["t-1"]) == contents(STATE)


def test_a_broken_link_is_formed_anew() -> None:
    sink = MemorySink()
    with receiving(sink) as receiver:
        link = Link(receiver.address, SECRET, deadline=LONG)
        for i in range(3):
            pass_on(link, f"t-{i}")
            for session in list(receiver._sessions.values()):
                session.fail(LinkError("cable out"))
            until_noticed(link)
        link.close()
    assert sink.held == 0


def test_a_receiver_that_moved_is_an_error_until_it_is_told() -> None:
    with receiving(MemorySink(), port=own_port()) as receiver:  # nobody else's afterwards
        link = Link(receiver.address, SECRET, deadline=LONG)
        pass_on(link, "t-1")
    until_noticed(link)
    with pytest.raises(LinkError, match="cannot reach"):
        pass_on(link, "t-2")
    link.close()


def test_auto_takes_rdma_where_it_works(nodes: tuple[Epochs, Epochs]) -> None:
    sink = MemorySink()
    with receiving(sink, epochs=nodes[1]) as receiver:
        link = Link(receiver.address, SECRET, rdma=Rdma(nodes[0], "ring"), deadline=LONG)
        assert pass_on(link, "t-1").path == "rdma"
        assert pass_on(link, "t-2").path == "rdma"
        assert link.status().path == "rdma"
        link.close()
    assert contents(sink.finished["t-2"]) == contents(STATE)


def test_auto_falls_back_after_three_failures_and_tries_again_later(
    nodes: tuple[Epochs, Epochs],
) -> None:
    now = [0.0]
    with receiving(MemorySink(), epochs=nodes[1]) as receiver:
        link = Link(
            receiver.address,
            SECRET,
            rdma=Rdma(nodes[0], "ring", command=BROKEN),
            deadline=LONG,
            clock=lambda: now[0],
        )
        for i in range(3):
            assert not link.status().resting
            assert pass_on(link, f"t-{i}").path == "tcp"
            assert pass_on(link, f"u-{i}").path == "tcp"
            assert link.status().rdma_failures == (i + 1) % 3  # not tried for every offer
            now[0] += RETRY_SECONDS
        status = link.status()
        assert status.resting
        assert "rdma failed 3 times" in status.alert
        formed = nodes[0].record("prefill-1", "decode-1").epoch
        assert pass_on(link, "t-9").path == "tcp"
        assert nodes[0].record("prefill-1", "decode-1").epoch == formed  # not tried again
        now[0] += REST_SECONDS + 1
        assert not link.status().resting
        assert link.status().alert == ""
        link._rdma = Rdma(nodes[0], "ring")
        assert pass_on(link, "t-10").path == "rdma"
        link.close()


def test_rdma_alone_does_not_fall_back(nodes: tuple[Epochs, Epochs]) -> None:
    with receiving(MemorySink(), epochs=nodes[1]) as receiver:
        link = Link(
            receiver.address,
            SECRET,
            backend="rdma",
            rdma=Rdma(nodes[0], "ring", command=BROKEN),
            deadline=LONG,
        )
        with pytest.raises(LinkError):
            pass_on(link, "t-1")
        link.close()
    with pytest.raises(LinkError, match="needs epochs"):
        Link(("127.0.0.1", 1), SECRET, backend="rdma")
