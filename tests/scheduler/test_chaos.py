"""Processes are killed and frozen at named points of a seeded plan; every job still ends once.

Every victim (prefill worker, decode worker, Redis, API, supervisor) is hit at every named point of
`chaos_kit.POINTS`, by SIGKILL and by SIGSTOP: a worker that comes to the point sends the signal. In
the runs of the API and the supervisor all is real but the workers' engines: `tandem up` with its
Redis and its API, and a client that speaks HTTP and asks again. `TANDEM_SOAK=1` makes 208 runs,
otherwise a few, others each day; `TANDEM_SEED` chooses them. The seed is printed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from api_kit import make_model_dir
from chaos_kit import Client, Plan, Thaw, keep_redis, keep_stack, keep_worker, plans
from jobs_kit import Server, answer, answer_token, assert_idle, eventually, new_job, oracle
from ports_kit import own_port

from scheduler.api.prompt import build
from scheduler.api.schema import items_of
from scheduler.api.tokenizer import Tokenizer
from scheduler.config import Config
from scheduler.host import data_dir
from scheduler.jobs import Jobs
from scheduler.record import NewJob, response_id
from scheduler.redis_client import connect
from store.serving import serve
from store.store import Store

SOAK = bool(os.environ.get("TANDEM_SOAK"))
PLANS = plans()
RUNS = 208
SAMPLE = 3
JOBS = 6
#: A process that was started anew just now has no handler yet: the signal itself ends it.
STOPPED = {0, -signal.SIGTERM}


@pytest.mark.parametrize("slot", range(RUNS if SOAK else SAMPLE))
def test_every_job_ends_once_whatever_dies(slot: int, tmp_path: Path) -> None:
    rotation = int(os.environ.get("TANDEM_SEED") or time.time() // 86_400)
    seed = slot if SOAK else rotation * SAMPLE + slot
    plan = PLANS[seed % len(PLANS)]
    print(f"seed {seed}: {plan}")
    if plan.victim in ("api", "supervisor"):
        _whole_stack(plan, random.Random(seed), tmp_path)
    else:
        _workers_and_redis(plan, random.Random(seed), tmp_path)
    assert (tmp_path / "fired").exists(), "nobody came to the point"


def _workers_and_redis(plan: Plan, chance: random.Random, folder: Path) -> None:
    with Server(durable=True) as server, connect(server.url, patience=120) as client:
        jobs = Jobs(client)
        workers = [keep_worker(role, server.url, folder, plan) for role in ("prefill", "decode")]
        redis = keep_redis(server, folder)
        for keeper in (*workers, redis):
            keeper.start()
        news = [_random_job(chance, number) for number in range(JOBS)]
        cancelled = set()
        try:
            for new in news:
                jobs.accept(new)
            if chance.random() < 0.5:
                victim = chance.choice(news)
                jobs.cancel(victim.id)
                cancelled.add(victim.id)
            for new in news:
                _check(client, jobs, new.id, oracle(new), new.id in cancelled)
            eventually(lambda: not client.exists("tandem:leases"), "leases are left")
            assert_idle(client)
        finally:
            codes = [keeper.close() for keeper in workers]
            redis.close()
        assert set(codes) <= STOPPED


def _random_job(chance: random.Random, number: int) -> NewJob:
    locked = chance.random() < 0.5
    return new_job(
        tokens=chance.choice((12, 40, 90)),
        answer=chance.randint(1, 12),
        # The first four come to every point of the prefill.
        stage="decode" if number > 3 and chance.random() < 0.5 else "prefill",
        conversation=f"conv_{number}" if locked else None,
        lock=locked,
        priority=chance.choice(("interactive", "normal", "batch")),
    )


def _whole_stack(plan: Plan, chance: random.Random, folder: Path) -> None:
    model = make_model_dir(folder / "m")
    config = Config.model_validate(
        {
            "data_dir": str(folder / "d"),
            "model": "test-model",
            "model_dir": str(model),
            "api": {"port": own_port()},
            "jobs": {"lease_seconds": 3, "max_attempts": 20, "drain_seconds": 5},
        }
    )
    data_dir.prepare(config)
    store = Store.open(folder / "store", 64 << 20)
    rpc = serve(store, config.store_socket)
    tokenizer = Tokenizer.load(model)
    keeper = keep_stack(config, folder, plan)
    keeper.start()
    thaw = Thaw(folder / "api.pid", folder / "fired")
    if plan.victim == "api" and plan.act == "stop":
        thaw.start()
    http = Client(config)
    client = connect(config.redis_url, patience=120)
    jobs = Jobs(client)
    try:
        wanted: dict[str, list[int]] = {}
        cancelled = set()
        for number in range(JOBS):
            text = f"{chance.random()} " * chance.choice((1, 3))
            ids = build(tokenizer, items_of(text)).ids
            count = chance.randint(1, 12)
            background = number == 0 or chance.random() < 0.6
            body = {"input": text, "max_output_tokens": count, "background": background}
            key = f"key {number}"
            resp = http.create(key, body)
            assert resp == response_id("", key), "a repeated submission names the same job"
            wanted[resp] = [answer_token(ids, position) for position in range(count)]
            if background and not cancelled and chance.random() < 0.2:
                http.cancel(resp)
                cancelled.add(resp)
        for resp, right in wanted.items():
            _check(client, jobs, resp, right, resp in cancelled)
        records = {key.decode() for key in client.scan_iter("tandem:job:*", count=1000)}
        assert records == {f"tandem:job:{resp}" for resp in wanted}, "each was accepted once"
        eventually(lambda: not client.exists("tandem:leases"), "leases are left")
        eventually(lambda: not client.exists("tandem:abandoned"), "a client is still missed", 60)
        assert_idle(client)
    finally:
        thaw.done.set()
        status = keeper.close()
        http.close()
        client.close()
        rpc.close()
        store.close()
    assert status in STOPPED, (folder / "stack.log").read_text()


def _check(client: Any, jobs: Jobs, resp: str, right: list[int], was_cancelled: bool) -> None:
    job = jobs.wait(resp, 180)
    said = answer(client, resp)
    if was_cancelled and job.status == "cancelled":
        assert said == right[: len(said)], "what was said before the cancel is right"
    else:
        assert job.status == "completed", job.error
        assert said == right
