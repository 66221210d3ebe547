"""Random interleavings of everything that can happen to a job, by live and by stale runs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis
from jobs_kit import answer, answer_token, assert_idle, new_job, oracle

from scheduler import events
from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.reclaim import Reclaimer
from scheduler.record import Job, NewJob, Result
from scheduler.runs import Runs
from scheduler.serializer import pack

RUNS = 2000 if os.environ.get("TANDEM_SOAK") else 300
SETTINGS = JobsConfig(max_attempts=4)


class Story:
    """One job, two workers of each stage, and whatever chance does to them."""

    def __init__(self, client: redis.Redis, seed: int) -> None:
        self.chance = random.Random(seed)
        self.client = client
        self.jobs = Jobs(client, SETTINGS)
        self.runs = Runs(client, SETTINGS)
        self.new: NewJob = new_job(
            answer=4,
            digest="d",
            stage=self.chance.choice(("prefill", "decode")),
            conversation="conv_a",
            lock=True,
            client="first",
        )
        self.jobs.accept(self.new)
        self.here = ["first"]
        self.held: list[Job] = []
        self.log: list[events.Event] = []

    def step(self) -> None:
        """One random event, followed by what must always hold."""
        self.chance.choice(self._moves())()
        log = events.read(self.client, self.new.id)
        assert log[: len(self.log)] == self.log, "the past never changes"
        self.log = log
        last = [e.seq for e in log if events.is_terminal(e.data)]
        ended = self.jobs.get(self.new.id).ended
        assert last == ([len(log) - 1] if ended else [])
        self.check_clients()

    def check_clients(self) -> None:
        """A job is attended, abandoned, or nobody's concern any more; as its clients have it."""
        pipe = self.client.pipeline()
        pipe.zrange(f"tandem:waiting:{self.new.id}", 0, -1)
        pipe.zscore("tandem:attended", self.new.id)
        pipe.zscore("tandem:abandoned", self.new.id)
        waiting, attended, abandoned = pipe.execute()
        job = self.jobs.get(self.new.id)
        if job.ended:
            assert (waiting, attended, abandoned) == ([], None, None)
        elif job.cancel:
            assert (attended, abandoned) == (None, None)
        else:
            assert {name.decode() for name in waiting} == set(self.here)
            assert (attended is None, abandoned is None) == (not self.here, bool(self.here))

    def _moves(self) -> list[Callable[[], object]]:
        run = self.chance.choice(self.held) if self.held else None
        moves: list[Callable[[], object]] = [
            lambda: self.take("prefill"),
            lambda: self.take("decode"),
            lambda: Reclaimer(self.client, SETTINGS).reconcile(),
        ]
        if self.chance.random() < 0.15:
            moves += [lambda: self.jobs.cancel(self.new.id), self.fall_silent, self.give_up]
        if self.chance.random() < 0.3:
            moves += [self.come, self.go]
        if run is None:
            return moves
        runs = self.runs
        moves += [
            lambda: self.say(run),
            lambda: self.say(run),
            lambda: runs.handing_off(run, 39),
            lambda: runs.hand_back(run, holder="prefill:a", parked=self.chance.choice((0, 20))),
            lambda: runs.reclaim(run, dead=True),
            lambda: runs.renew(run.queue, run.worker, {"birth": "x"}, [(run.id, run.run, 10)]),
            lambda: self.end(run),
        ]
        if run.stage == "prefill":
            moves.append(lambda: runs.finish_prefill(run, {"bytes": 1}, "decode", 39))
        else:
            moves.append(lambda: runs.send_back(run))
        if self.chance.random() < 0.1:
            moves += [lambda: runs.fail(run, "x", "y"), lambda: runs.cancelled(run)]
        return moves

    def come(self) -> None:
        """Another client sends the same by its key, or follows; sometimes it is said twice."""
        name = f"client {self.chance.random()}"
        by_key = self.chance.random() < 0.5
        for _ in range(self.chance.choice((1, 2))):
            if by_key:
                self.jobs.accept(replace(self.new, client=name))
            else:
                self.jobs.attend([(self.new.id, name)])
        self.here.append(name)

    def go(self) -> None:
        """A client goes, perhaps one that has gone before."""
        name = self.chance.choice([*self.here, "first"])
        for _ in range(self.chance.choice((1, 2))):
            self.jobs.abandon(self.new.id, name)
        self.here = [other for other in self.here if other != name]

    def fall_silent(self) -> None:
        """The leases of all clients run out."""
        if self.here:
            leases = dict.fromkeys(self.here, 1.0)
            self.client.zadd(f"tandem:waiting:{self.new.id}", leases, xx=True)
        self.client.zadd("tandem:attended", {self.new.id: 1.0}, xx=True)
        self.jobs.give_up()
        self.here = []

    def give_up(self) -> None:
        """The grace is over, where it runs."""
        before = self.jobs.get(self.new.id)
        self.client.zadd("tandem:abandoned", {self.new.id: 1.0}, xx=True)
        self.jobs.give_up()
        job = self.jobs.get(self.new.id)
        if not before.ended and not before.cancel:
            assert (job.ended or job.cancel) is (not self.here)

    def take(self, queue: str) -> None:
        job = self.runs.take(queue, self.chance.choice("ab"), f"{queue}:a")
        if job is not None:
            self.held.append(job)

    def said(self, run: Job) -> int:
        """How many tokens the log had when `run` began, as its worker would count."""
        return sum(len(e.data.get("ids", ())) for e in self.log[: run.events])

    def say(self, run: Job) -> None:
        """The next token of a decode, as this run counts; sometimes sent twice."""
        if run.stage != "decode":
            return
        mine = [e for e in self.log[run.events :] if "ids" in e.data]
        position = self.said(run) + len(mine)
        if position >= 4:
            return
        token = answer_token(list(self.new.prompt_ids), position)
        data = pack({"type": "response.output_text.delta", "delta": "x", "ids": [token]})
        for _ in range(self.chance.choice((1, 1, 2))):
            self.runs.append(run, run.events + len(mine), [data], True)

    def end(self, run: Job) -> None:
        """Finish, where this run has said everything."""
        mine = [e for e in self.log[run.events :] if "ids" in e.data]
        if run.stage == "decode" and self.said(run) + len(mine) == 4:
            for _ in range(self.chance.choice((1, 2))):
                self.runs.finish(run, Result(), run.events + len(mine))

    def drive_to_its_end(self) -> None:
        """Whatever state it is in, two diligent workers bring it to an end."""
        for _ in range(40):
            job = self.jobs.get(self.new.id)
            if job.ended:
                return
            if job.run:
                self.runs.reclaim(job, dead=True)
                continue
            taken = self.runs.take(job.queue, "w", "x:y")
            assert taken is not None, "a waiting job can be taken"
            if taken.stage == "prefill":
                self.runs.finish_prefill(taken, {"bytes": 1}, "decode")
                continue
            self.log = events.read(self.client, self.new.id)
            for _ in range(4 - self.said(taken)):
                self.say(taken)
                self.log = events.read(self.client, self.new.id)
            self.end(taken)
        raise AssertionError("it does not end")


@pytest.mark.parametrize("block", range(10))
def test_one_end_whatever_the_order(client: redis.Redis, block: int) -> None:
    for seed in range(block * RUNS // 10, (block + 1) * RUNS // 10):
        story = Story(client, seed)
        for _ in range(story.chance.randint(1, 25)):
            story.step()
        story.drive_to_its_end()
        said = answer(client, story.new.id)
        assert said == oracle(story.new)[: len(said)]
        if story.jobs.get(story.new.id).status == "completed":
            assert len(said) == 4
        assert_idle(client)
        client.flushdb()
