"""The scheduling scripts make the same choices in the simulator as in Redis."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from scheduler import policy, scripts
from scheduler.config import JobsConfig
from scheduler.simulation.rules import Rules, name

QUEUE, HOLDER = "prefill", "prefill:a"


class InRedis:
    """What `Rules` does, through the server."""

    def __init__(self, client: redis.Redis, settings: JobsConfig, rate: float) -> None:
        self._client = client
        self._settings = settings
        self._policy = policy.arguments(settings, rate)

    def call(self, script: str, now: float, **more: Any) -> Any:
        base = {"queue": QUEUE, "holder": HOLDER, "now": now, "policy": self._policy}
        return scripts.call(self._client, script, {**base, **more})

    def take(self, now: float) -> int | None:
        found = self.call("simulate", now, arrivals=[], take=True)
        return int(found[0].decode()[5:], 16) if found else None


@pytest.mark.parametrize("budget", [0, 9e6])
def test_the_choices_are_those_of_redis(client: redis.Redis, budget: float) -> None:
    client.flushdb()
    chance = random.Random(4)
    settings = JobsConfig(horizon_seconds=60, owner_share=2.0)
    rules, server = Rules(settings, 500.0), InRedis(client, settings, 500.0)
    if budget:
        rules.set_budget("d", budget, 1000.0, 300.0)
        values: dict[str, Any] = {"limit": budget, "fixed": 1000.0, "per_token": 300.0}
        client.hset("tandem:budget:d", mapping=values)
    now, taken, sizes, choices, takes = 0.0, list[int](), dict[int, int](), [], 0
    for number in range(300):
        now += chance.expovariate(0.2)
        tokens = chance.randint(1, 20_000)
        owner = f"owner {chance.randint(0, 4)}"
        kind = chance.choice(["interactive", "normal", "batch"])
        held = chance.choice([0, tokens // 2])
        rules.arrive(QUEUE, number, now, tokens, owner, kind, held=held, node="d")
        row = [name(number), now, tokens, owner, kind, "prefill", held, "d", ""]
        server.call("simulate", now, arrivals=[row])
        sizes[number] = tokens
        if taken and chance.random() < 0.7:
            running = taken[-1]
            done = chance.randint(0, sizes[running] - 1)
            mine = rules.better(QUEUE, HOLDER, running, done, now)
            answer = server.call(
                "better", now, id=name(running), prefilled=done, gain=settings.preempt_gain
            )
            assert mine == (bool(answer[0]), bool(answer[1]))
            choices.append(mine[0])
            if mine[0]:
                rules.park(QUEUE, HOLDER, taken.pop(), done, now)
                server.call("simulate", now, arrivals=[], park=[name(running), done])
        if chance.random() < 0.8:
            mine_next = rules.take(QUEUE, HOLDER, now)
            assert mine_next == server.take(now)
            if mine_next is not None:
                taken.append(mine_next)
                takes += 1
        if taken and chance.random() < 0.5:
            ended = taken.pop(0)
            rules.release(ended, now)
            server.call("simulate", now, arrivals=[], free=[name(ended)])
    assert len(choices) + takes > 100
    assert True in choices
    assert False in choices


def test_a_command_that_is_not_known_is_named() -> None:
    rules = Rules(JobsConfig(), 1.0)
    with pytest.raises(Exception, match="knows no Redis command FLUSHALL"):
        rules._redis("FLUSHALL")
