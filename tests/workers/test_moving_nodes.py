"""`tandem node`: conversations brought from node to node from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from decode_kit import LONG, asking, make_job
from moving_kit import Pair
from redis_kit import eventually
from test_late_engine import ids

from engine.model import Model
from scheduler.cli import main
from scheduler.homes import Homes
from scheduler.nodes import Node, Nodes, Presence
from scheduler.redis_client import connect
from store.errors import StoreError
from store.rpc import StoreClient
from worker_decode.evening import Evening


def test_a_node_is_drained_from_the_command_line(
    pair: Pair, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.rpc[0].add("move_conversation", pair.mover.move)
    told_new: list[bool] = []
    pair.rpc[0].add("take_new", lambda yes: told_new.append(yes))
    idents = [f"conv_{k:032x}" for k in range(3)]
    for ident in idents:
        job = make_job(ids(), request=asking(2), conversation=ident)
        pair.leaving.answer(job)
    pair.leaving.settle()
    busy = idents[1]
    pair.client.sadd(f"tandem:at:{busy}", "resp_1")
    pair.client.hset("tandem:job:resp_1", "status", "decoding")
    config = pair.dir / "tandem.toml"
    config.write_text(f'data_dir = "{pair.dir}/d"\n[redis]\nurl = "{redis_url}"\n')

    def tandem(*words: str) -> tuple[int, str]:
        status = main(["node", *words, "--config", str(config)])
        told = capsys.readouterr()
        return status, told.out + told.err

    status, told = tandem("drain", "m3")
    assert status == 1
    assert f"{busy} stays: {busy} is busy" in told
    assert "2 conversations moved, 1 stayed" in told
    assert {one["id"] for one in pair.other.store.list_conversations()} >= {idents[0], idents[2]}
    assert [one["id"] for one in pair.leaving.store.list_conversations()] == [busy]
    pair.client.delete(f"tandem:at:{busy}")
    status, told = tandem("move", busy, "--to", "m4")
    assert status == 0
    assert f"{busy}: m3 -> m4, 1 turns, 1 states" in told
    assert tandem("move", "conv_x", "--to", "m4")[0] != 0
    assert tandem("drain", "m3") == (0, "0 conversations moved, 0 stayed\n")
    assert told_new == [False, False]
    assert tandem("drain", "m3", "--undo") == (0, "m3 takes new ones\n")
    assert told_new[-1] is True
    pair.presence[1].update(state="draining")
    eventually(lambda: pair.mover._nodes.get("decode", "m4").state == "draining", "")  # type: ignore[union-attr]  # it lives
    status, told = tandem("drain", "m3")
    assert status != 0
    assert "no other decode node" in told
    assert len(told_new) == 3


TALKS = [f"conv_{k:032x}" for k in range(10)]
Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def uneven(redis_url: str, client: redis.Redis, loaded: Model, words: Any) -> Iterator[Pair]:
    """Two small stores: ten conversations on m3, the later ones used later, and none on m4."""
    made = Pair(redis_url, client, loaded, words, size=32 << 20)
    made.rpc[0].add("move_conversation", made.mover.move)
    for k, talk in enumerate(TALKS):
        made.leaving.answer(make_job([20 + k, *ids(900)], request=asking(2), conversation=talk))
        made.leaving.store.update_conversation(talk, last_used=1000.0 + k)
    made.leaving.settle()
    made.presence[0].update(state="ready")
    eventually(lambda: made.mover._nodes.get("decode", "m3").state == "ready", "")  # type: ignore[union-attr]  # it lives
    yield made
    made.close()


@pytest.fixture
def balance(uneven: Pair, redis_url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    config = uneven.dir / "tandem.toml"
    config.write_text(f'data_dir = "{uneven.dir}/d"\n[redis]\nurl = "{redis_url}"\n')

    def run(*words: str) -> tuple[int, Any, str]:
        status = main(["node", "balance", *words, "--config", str(config)])
        told = capsys.readouterr()
        return status, json.loads(told.out) if "--json" in words else told.out, told.err

    return run


def share(pair: Pair) -> tuple[float, float]:
    return (
        pair.leaving.store.stats()["live_share"],
        pair.other.store.stats()["live_share"],
    )


def planned(told: Any) -> list[str]:
    return [one["conversation"] for one in told["plan"]]


def test_idle_conversations_go_where_there_is_room(
    uneven: Pair, balance: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, busy = TALKS[0], TALKS[2]
    uneven.leaving.store.update_conversation(pinned, pinned=True)
    uneven.client.sadd(f"tandem:at:{busy}", "resp_1")
    uneven.client.hset("tandem:job:resp_1", "status", "decoding")
    before = share(uneven)
    status, told, _ = balance("--dry-run", "--json", "--above", "0")
    order = [TALKS[1], *TALKS[3:]]
    assert (status, told["moved"]) == (0, [])
    assert planned(told) == order[: len(told["plan"])]
    assert 3 <= len(told["plan"]) <= 5
    assert {(one["from"], one["to"]) for one in told["plan"]} == {("m3", "m4")}
    assert share(uneven) == before
    bound = sum(one["bytes"] for one in told["plan"][:2]) / 1e9
    assert (
        planned(balance("--dry-run", "--json", "--above", "0", "--gb", f"{bound:.9f}")[1])
        == (order[:2])
    )

    call, moves = StoreClient.call, []

    def interrupted(self: StoreClient, method: str, **arguments: Any) -> Any:
        if method == "move_conversation":
            if len(moves) == 2:
                raise KeyboardInterrupt
            moves.append(arguments["ident"])
        return call(self, method, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "call", interrupted)
        status, told, err = balance("--json", "--above", "0")
    assert (status, told["interrupted"]) == (130, True)
    assert [one["conversation"] for one in told["moved"]] == moves == order[:2]
    assert "run it again" in err
    status, out, _ = balance("--above", "0")
    assert status == 0
    assert "m3 -> m4:" in out
    assert "0 stayed" in out
    here, there = share(uneven)
    assert abs(here - there) < before[0] / 4
    homes, gone = Homes(uneven.client), len(uneven.other.store.list_conversations())
    assert [homes.of(talk) for talk in order[:gone]] == ["m4"] * gone
    assert {pinned, busy} <= {one["id"] for one in uneven.leaving.store.list_conversations()}
    status, told, _ = balance("--json", "--above", "0")
    assert (status, told["plan"]) == (0, [])
    (turn,) = uneven.other.store.conversation_turns(order[0])
    past = uneven.other.store.turn_ids(turn)
    job = make_job([*past, *ids(20)], request=asking(6), previous=turn, conversation=order[0])
    finished = uneven.other.answer(job)
    assert finished.result is not None
    assert finished.result.path["path"] == "restored"
    assert uneven.other.said(job) == uneven.other.oracle(job)


def test_one_that_left_meanwhile_holds_up_no_other(
    uneven: Pair, balance: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = StoreClient.get_conversation

    def left(self: StoreClient, ident: str) -> Any:
        if ident == TALKS[0]:
            Homes(uneven.client).begin(ident, "elsewhere")
        return get(self, ident)

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "get_conversation", left)
        status, told, _ = balance("--json", "--gb", "0.004")
    assert status == 1
    (stayed,) = told["stayed"]
    assert (stayed["conversation"], stayed["why"]) == (
        TALKS[0], "it went to another node meanwhile",
    )  # fmt: skip
    assert [one["conversation"] for one in told["moved"]] == [TALKS[1]]


def test_a_node_that_cannot_be_asked_holds_up_no_other(
    uneven: Pair, balance: Run, redis_url: str
) -> None:
    """It serves its store to its own machine only, or nobody answers there."""
    presence = []
    for name, rpc, secret in (("m5", "/elsewhere/store", ""), ("m6", "127.0.0.1:9", "ab" * 32)):
        entry = Node("decode", name, state="ready", rpc=rpc, secret=secret)
        presence.append(Presence(redis_url, entry, LONG).start())
    nodes = Nodes(uneven.client)
    eventually(lambda: len(nodes.list("decode")) == 4, "the nodes are not published")
    status, told, _ = balance("--dry-run", "--json")
    assert status == 0
    assert sorted(one["name"] for one in told["nodes"]) == ["m3", "m4"]
    assert told["plan"]
    assert "set store.rpc_host" in told["not_asked"]["m5"]
    assert "m6" in told["not_asked"]
    assert "m5 is left out: " in balance("--dry-run")[1]
    near = Evening(connect(redis_url), "m3", 0.5, every=3600.0)
    assert near.look() > 0
    near.close()
    far = Evening(connect(redis_url), "m5", 0.5, every=3600.0)
    with pytest.raises(StoreError, match="m5"):
        far.look()
    far.close()
    for one in presence:
        one.stop()


@pytest.mark.rotate(2)
def test_what_does_not_move_is_told_with_the_reason(
    uneven: Pair, balance: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no store is fuller than 90%" in balance("--above", "90")[1]
    assert "used lately" in balance("--idle", "1e10")[1]
    call, store = StoreClient.call, uneven.leaving.store

    def meanwhile(self: StoreClient, method: str, **arguments: Any) -> Any:
        if method == "move_conversation" and arguments["ident"] == TALKS[0]:
            store.update_conversation(TALKS[1], last_used=5000.0)
            uneven.client.sadd(f"tandem:at:{TALKS[0]}", "resp_1")
            uneven.client.hset("tandem:job:resp_1", "status", "decoding")
        return call(self, method, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "call", meanwhile)
        status, told, _ = balance("--json", "--gb", "0.004")
    assert planned(told) == TALKS[:2]
    assert status == 1
    first, second = told["stayed"]
    assert (first["conversation"], second["conversation"]) == (TALKS[0], TALKS[1])
    assert "busy" in first["why"]
    assert "in use" in second["why"]
    assert told["moved"] == []
    uneven.presence[1].update(facts={"drained": True})
    eventually(lambda: uneven.mover._nodes.get("decode", "m4").facts, "")  # type: ignore[union-attr]  # it lives
    status, out, _ = balance()
    assert status == 0
    assert "takes no new conversations" in out
    assert "no other node can be given anything now" in out
    assert balance("--gb", "0")[0] != 0
    uneven.presence[1].stop()
    status, _, err = balance()
    assert status != 0
    assert "two decode nodes" in err


@pytest.mark.rotate(3)
def test_a_node_evens_out_by_itself_where_it_is_told_to(uneven: Pair, redis_url: str) -> None:
    """Only from its own store, until that is as full as it may be, and no further."""
    far = Evening(connect(redis_url), "m4", 0.5, every=3600.0)
    assert far.look() == 0
    far.close()
    assert share(uneven)[0] > 0.5
    near = Evening(connect(redis_url), "m3", 0.5, every=0.01)
    eventually(lambda: share(uneven)[0] <= 0.5, "nothing goes by itself")
    near.close()
    gone = len(uneven.other.store.list_conversations())
    assert [Homes(uneven.client).of(talk) for talk in TALKS[:gone]] == ["m4"] * gone
    assert len(uneven.leaving.store.list_conversations()) == len(TALKS) - gone
    assert share(uneven)[0] > 0.4
