"""Where a long new turn is computed: the rule, what it is fed with, what a client sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import redis
from api_stack import Stack
from hypothesis import given
from hypothesis import strategies as st
from jobs_kit import Server, new_job

from scheduler.extension import FEW, Costs, choose, measure, parse
from scheduler.jobs import Jobs
from scheduler.nodes import Node
from scheduler.record import Job
from scheduler.runs import Runs

# A 17,500-token state of a large model, an M5 that prefills 1,176 tokens/s, an M3 at a third.
PAIR: dict[str, Any] = {
    "decode_rate": 400.0,
    "prefill_rate": 1176.0,
    "link_rate": 5e9,
    "fixed": 147.6e6,
    "per_token": 11_451.0,
}


def test_few_tokens_stay_and_many_go() -> None:
    assert choose("auto", Costs(17_500, FEW, **PAIR))["extend"] == "decode"
    assert choose("auto", Costs(17_500, 70, **PAIR))["extend"] == "prefill"  # 0.175 s here
    route = choose("auto", Costs(17_500, 4000, **PAIR))
    assert route["extend"] == "prefill"
    assert route["decode_seconds"] == 10.0
    moved = 2 * 147.6e6 + 21_500 * 11_451
    assert route["bytes"] == moved
    assert route["prefill_seconds"] == round(moved / 5e9 + 4000 / 1176, 4)


@pytest.mark.parametrize(
    ("worse", "why"),
    [({"wait": 60.0}, "waiting work"), ({"link_rate": 2e7}, "a slow link"),
     ({"prefill_rate": 390.0}, "no faster"), ({"fixed": 2e10}, "a huge state")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_speaks_against_moving(worse: dict[str, float], why: str) -> None:
    assert choose("auto", Costs(17_500, 4000, **{**PAIR, **worse}))["extend"] == "decode", why


def test_on_one_machine_nothing_is_moved() -> None:
    route = choose("auto", Costs(17_500, 4000, **PAIR, together=True))
    assert route == {"extend": "decode", "reason": "both nodes are on one machine"}
    assert choose("prefill", Costs(17_500, 4000, **PAIR, together=True))["extend"] == "prefill"


@pytest.mark.parametrize("name", ["decode_rate", "prefill_rate", "link_rate", "per_token"])
def test_what_is_not_known_stays(name: str) -> None:
    route = choose("auto", Costs(17_500, 4000, **{**PAIR, name: 0.0}))
    assert route["extend"] == "decode"
    assert "not known yet" in route["reason"]


COSTS = st.builds(
    Costs, st.integers(1, 200_000), st.integers(1, 200_000), st.floats(0, 1e5), st.floats(0, 1e5),
    st.floats(0, 1e11), st.floats(0, 1e4), st.floats(0, 1e9), st.floats(0, 1e6),
)  # fmt: skip


@given(COSTS)
def test_the_choice_is_the_sooner_one(costs: Costs) -> None:
    route = choose("auto", costs)
    if "prefill_seconds" in route:
        sooner = costs.prefill_seconds < costs.decode_seconds
        assert route["extend"] == ("prefill" if sooner else "decode")
    else:
        assert route["extend"] == "decode"


def test_rates_are_those_that_were_measured_or_those_of_the_profiles(client: redis.Redis) -> None:
    jobs = Jobs(client)
    nodes = [
        Node("prefill", "m5", state="ready", facts={"prefill_rate": 1000.0}, host="a"),
        Node("decode", "m3", state="ready", facts={"prefill_rate": 300.0}, host="b"),
    ]
    costs = measure(jobs, nodes, "m3", 500, 200, "", "normal")
    assert (costs.prefill_rate, costs.decode_rate, costs.link_rate) == (1000.0, 300.0, 0.0)
    Runs(client).publish_budget("m3", 1 << 30, 1000, 5.0)
    client.mset({"tandem:rate:prefill": 800, "tandem:rate:link:m3": 1e9})
    client.set("tandem:rate:extend:m3", 250)
    jobs.accept(new_job(tokens=1600))
    costs = measure(jobs, nodes, "m3", 500, 2000, "", "batch")
    assert costs == Costs(500, 2000, 250.0, 800.0, 1e9, costs.wait, 1000.0, 5.0)
    assert costs.wait == pytest.approx(2.0)
    assert not costs.together
    one = [replace(node, host="a") for node in nodes]
    assert measure(jobs, one, "m3", 500, 2000, "", "batch") == replace(costs, together=True)
    draining = [Node("prefill", "m5", state="draining"), nodes[1]]
    assert measure(jobs, draining, "m3", 500, 200, "", "normal").prefill_rate == 0


def take(runs: Runs, queue: str) -> Job:
    job = runs.take(queue, "w", f"{queue}:x")
    assert job is not None
    return job


def test_the_rates_are_learned_from_what_was_done(client: redis.Redis) -> None:
    jobs, runs = Jobs(client), Runs(client)
    jobs.accept(new_job(tokens=300, stage="decode", node="m3", held_tokens=100, previous="resp_x"))
    alone = take(runs, "decode-m3")
    runs.append(alone, alone.events, [b"\x80"], tokens=True)
    assert float(client.get("tandem:rate:extend:m3") or 0) > 0
    extended = new_job(
        tokens=300, node="m3", held_tokens=280, previous="resp_x", route={"extend": "prefill"}
    )
    jobs.accept(extended)
    jobs.accept(new_job(tokens=25, node="m3"))
    job = take(runs, "prefill")
    assert (job.id, job.extends) == (extended.id, True)  # 20 tokens are less work than 25
    facts = {"path": "tcp", "bytes": 5, "link_rate": 3e8}
    runs.finish_prefill(job, facts, "decode-m3", 299)
    assert float(client.get("tandem:rate:link:m3") or 0) == 3e8
    before = client.get("tandem:rate:extend:m3")
    decoding = take(runs, "decode-m3")
    runs.append(decoding, decoding.events, [b"\x80"], tokens=True)
    assert client.get("tandem:rate:extend:m3") == before  # it was not extended there


def test_a_state_that_is_gone_is_not_counted_again(client: redis.Redis) -> None:
    jobs, runs = Jobs(client), Runs(client)
    new = new_job(tokens=300, held_tokens=280, previous="resp_x", route={"extend": "prefill"})
    jobs.accept(new)
    runs.finish_prefill(take(runs, "prefill"), {"path": "tcp"}, "decode", 299)
    runs.send_back(take(runs, "decode"))
    assert not take(runs, "prefill").extends


@pytest.mark.parametrize("value", ["", "Prefill", 5, None])
def test_an_unknown_mode_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="not one of auto, decode, prefill"):
        parse(value)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url) as running:
        yield running


def ask(stack: Stack, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/responses", json=body, timeout=120)


def test_a_request_may_say_where_and_sees_where(stack: Stack) -> None:
    first = ask(stack, input="Hello there").json()
    assert "route" not in first["tandem"]
    more: dict[str, Any] = {"previous_response_id": first["id"], "input": "and more"}
    here = ask(stack, **more).json()["tandem"]
    assert here["route"]["extend"] == "decode"
    assert here["attempts"]["prefill"] == 0
    there = ask(stack, **more, metadata={"tandem_extend": "prefill"}).json()["tandem"]
    assert there["route"] == {"extend": "prefill", "reason": "asked for: prefill"}
    assert there["attempts"]["prefill"] == 1
    refused = ask(stack, **more, metadata={"tandem_extend": "m5"})
    assert refused.status_code == 400
    assert "metadata.tandem_extend is 'm5'" in refused.json()["error"]["message"]
    long = ask(stack, previous_response_id=first["id"], input="word " * 300).json()["tandem"]
    assert long["route"] == {"extend": "decode", "reason": "both nodes are on one machine"}
