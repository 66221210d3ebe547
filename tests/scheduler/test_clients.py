"""Who waits for a job: said twice, said too late, or never said."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from jobs_kit import assert_idle, new_job
from starlette.requests import Request
from starlette.types import Message

from scheduler import delivery
from scheduler.api import stream
from scheduler.api.backend import Backend
from scheduler.api.clients import Client, Clients
from scheduler.api.faults import Fault
from scheduler.api.stream import EventHub, EventStream
from scheduler.config import JobsConfig
from scheduler.jobs import RETRIEVED_WITHIN, Jobs
from scheduler.reclaim import Reclaimer
from scheduler.record import Job, JobNotFound, NewJob
from scheduler.redis_client import connect, connect_async
from scheduler.runs import Runs


@pytest.fixture
def jobs(client: redis.Redis) -> Jobs:
    return Jobs(client)


def waiting(client: redis.Redis, resp: str) -> set[str]:
    return {name.decode() for name in client.zrange(f"tandem:waiting:{resp}", 0, -1)}


def abandoned(client: redis.Redis) -> set[str]:
    return {name.decode() for name in client.zrange("tandem:abandoned", 0, -1)}


class Losing:
    """Jobs over a connection whose next answer is lost after its command was carried out."""

    def __init__(self, url: str, patience: float = 5.0) -> None:
        client = connect(url, patience=patience)
        pool = client.connection_pool
        losses = self.losses = [0]

        class Lossy(pool.connection_class):  # type: ignore[misc, name-defined]  # made at run time
            def read_response(self, *args: Any, **options: Any) -> Any:
                answer = super().read_response(*args, **options)
                if losses[0]:
                    losses[0] -= 1
                    self.disconnect()
                    raise redis.exceptions.ConnectionError("the answer is lost")
                return answer

        pool.connection_class = Lossy
        self.client = client
        self.jobs = Jobs(client)
        # The scripts are known, and the connection is there: the next answer is a script's.
        new = new_job(client="x")
        self.jobs.accept(new)
        self.jobs.abandon(new.id, "x")
        self.jobs.cancel(new.id)

    def lose_one(self) -> Jobs:
        self.losses[0] = 1
        return self.jobs


@pytest.fixture
def losing(redis_url: str) -> Iterator[Losing]:
    made = Losing(redis_url)
    yield made
    assert made.losses == [0], "nothing was lost"
    made.client.close()


# ---------------------------------------------------------------- said twice


def test_a_client_is_counted_once_whatever_is_lost(
    client: redis.Redis, jobs: Jobs, losing: Losing
) -> None:
    new = new_job(digest="d", client="one")
    losing.lose_one().accept(new)
    losing.lose_one().accept(replace(new, client="two"))
    assert waiting(client, new.id) == {"one", "two"}
    losing.lose_one().abandon(new.id, "one")
    assert not abandoned(client)
    jobs.abandon(new.id, "one")
    assert not abandoned(client)
    losing.lose_one().abandon(new.id, "two")
    assert abandoned(client) == {new.id}


def test_leaving_twice_does_not_put_off_the_end(client: redis.Redis, jobs: Jobs) -> None:
    new = new_job(digest="d", client="one")
    jobs.accept(new)
    jobs.abandon(new.id, "one")
    at = client.zscore("tandem:abandoned", new.id)
    Jobs(client, JobsConfig(abandon_seconds=5000)).abandon(new.id, "one")
    assert client.zscore("tandem:abandoned", new.id) == at


def test_an_equal_request_is_given_the_same_job_each_time(
    client: redis.Redis, jobs: Jobs, losing: Losing
) -> None:
    first = new_job(owner="ada", digest="d", client="one")
    jobs.accept(first)
    jobs.abandon(first.id, "one")
    equal = new_job(owner="ada", digest="d", client="two")
    assert losing.lose_one().accept(equal).id == first.id
    assert waiting(client, first.id) == {"two"}
    assert jobs.known(equal.id)
    assert not jobs.known(new_job().id)
    # By its key it comes before its first connection is missed.
    assert jobs.accept(replace(equal, client="three")).id == first.id
    jobs.abandon(first.id, "two")
    assert (waiting(client, first.id), abandoned(client)) == ({"three"}, set())
    jobs.cancel(first.id)
    assert jobs.accept(replace(equal, client="four")).id == first.id
    assert jobs.get(first.id).status == "cancelled"
    assert_idle(client)


# ---------------------------------------------------------------- said at any moment


class Watched(redis.Redis):
    """Calls `before` with the number of each command that is about to be sent."""

    before: Callable[[int], None] | None = None
    sent = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        before, self.before = self.before, None  # what it does itself does not count
        if before is not None:
            before(self.sent)
            self.sent += 1
        self.before = before
        return super().execute_command(*args, **options)


def _expired(client: redis.Redis, new: NewJob) -> None:
    Reclaimer(client).expired()


def _leaves(client: redis.Redis, new: NewJob) -> None:
    Jobs(client, JobsConfig(abandon_seconds=0)).abandon(new.id, "one")


def _by_key(jobs: Jobs, new: NewJob) -> None:
    jobs.accept(replace(new, client="two"))


def _by_equal_request(jobs: Jobs, new: NewJob) -> None:
    jobs.accept(replace(new, id=new_job().id, client="two"))


def _to_read(jobs: Jobs, new: NewJob) -> None:
    jobs.attend([(new.id, "two")])


@pytest.mark.parametrize(
    ("end", "come"),
    [
        (_expired, _by_key),
        (_expired, _by_equal_request),
        (_expired, _to_read),
        (_leaves, _by_key),
        (_leaves, _to_read),
    ],
)
def test_who_comes_before_the_cancel_prevents_it(
    client: redis.Redis,
    redis_url: str,
    end: Callable[[redis.Redis, NewJob], None],
    come: Callable[[Jobs, NewJob], None],
) -> None:
    """Somebody comes before the first, the second, ... command of what cancels the job."""
    watched = Watched.from_url(redis_url)
    jobs = Jobs(client)
    for moment in range(100):
        new = new_job(owner="ada", digest=f"d{moment}", client="one")
        jobs.accept(new)
        if end is _expired:
            jobs.abandon(new.id, "one")
            client.zadd("tandem:abandoned", {new.id: 1.0})
        before: list[str] = []

        def at(number: int, when: int = moment, new: NewJob = new, b: list[str] = before) -> None:
            if number == when:
                b.append(jobs.get(new.id).status)
                come(jobs, new)

        watched.sent, watched.before = 0, at
        end(watched, new)
        watched.before = None
        if not before:
            break
        assert [jobs.get(new.id).status] == before
    assert moment, "nobody came"
    assert jobs.get(new.id).status == "cancelled", "where nobody comes it is cancelled"
    watched.close()


# ---------------------------------------------------------------- never said


def test_a_silent_client_is_missed_when_its_lease_is_over(client: redis.Redis, jobs: Jobs) -> None:
    gone, kept, other = (new_job(digest=d, client="one") for d in ("d", "e", "f"))
    for new in (gone, kept, other):
        jobs.accept(new)
    reclaimer = Reclaimer(client)
    assert not reclaimer.expired()
    client.zadd(f"tandem:waiting:{gone.id}", {"one": 1.0})
    client.zadd("tandem:attended", {gone.id: 1.0, kept.id: 1.0})
    jobs.attend([(kept.id, "one")])
    assert dict(reclaimer.expired()) == {"silent": 1}
    assert abandoned(client) == {gone.id}
    jobs.attend([(gone.id, "one")])
    assert (waiting(client, gone.id), abandoned(client)) == ({"one"}, set())
    client.zadd("tandem:attended", {gone.id: 1.0})
    assert dict(reclaimer.expired()) == {"silent": 1}
    assert jobs.accept(new_job(digest="d")).id == gone.id
    jobs.abandon(gone.id)
    client.zadd("tandem:abandoned", {gone.id: 1.0})
    assert dict(reclaimer.expired()) == {"abandoned": 1}
    assert jobs.get(gone.id).status == "cancelled"
    assert {jobs.get(new.id).status for new in (kept, other)} == {"queued"}


def test_one_of_two_that_is_silent_keeps_nothing(client: redis.Redis, jobs: Jobs) -> None:
    new = new_job(digest="d", client="killed")
    jobs.accept(new)
    jobs.accept(replace(new, client="one"))
    client.zadd(f"tandem:waiting:{new.id}", {"killed": 1.0})
    jobs.abandon(new.id, "one")
    assert abandoned(client) == {new.id}


def test_many_are_given_up_at_once(client: redis.Redis, jobs: Jobs) -> None:
    ids = [jobs.accept(new_job(client="one")).id for _ in range(130)]
    jobs.attend([(resp, "two") for resp in ids])
    assert client.zcard(f"tandem:waiting:{ids[-1]}") == 2
    client.zadd("tandem:attended", dict.fromkeys(ids, 1.0))
    assert jobs.give_up() == (130, 0)
    client.zadd("tandem:abandoned", dict.fromkeys(ids, 1.0))
    assert jobs.give_up() == (0, 130)
    assert_idle(client)


def test_background_work_waits_for_nobody(client: redis.Redis, jobs: Jobs) -> None:
    new = new_job(background=True)
    jobs.accept(new)
    jobs.attend([(new.id, "one"), ("resp_unknown", "one")])
    assert not client.exists("tandem:attended", f"tandem:waiting:{new.id}")
    assert jobs.give_up() == (0, 0)


def test_what_is_being_cancelled_is_given_to_nobody(client: redis.Redis, jobs: Jobs) -> None:
    new = new_job(owner="ada", digest="d", client="one")
    jobs.accept(new)
    runs = Runs(client)
    run = runs.take("prefill", "a", "prefill:a")
    assert run is not None
    assert jobs.cancel(new.id) == "prefilling"
    assert jobs.accept(replace(new, client="two")).duplicate
    jobs.attend([(new.id, "three")])
    assert jobs.abandon(new.id, "one") == "prefilling"
    assert not client.exists("tandem:abandoned", "tandem:attended", f"tandem:waiting:{new.id}")
    equal = new_job(owner="ada", digest="d", client="four")
    assert jobs.accept(equal).id == equal.id
    runs.cancelled(run)
    assert jobs.get(new.id).status == "cancelled"
    assert jobs.get(equal.id).status == "queued"


# ---------------------------------------------------------------- connections


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def _gone() -> Message:
    return {"type": "http.disconnect"}


async def _send(message: Message) -> None:
    """A client that takes what comes."""


async def _closed(message: Message) -> None:
    raise OSError("the connection is closed")


async def _closes(message: Message) -> None:
    if message["type"] == "http.response.body":
        raise OSError("the connection is closed")


async def _endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"x"
        await asyncio.sleep(0)


async def _short() -> AsyncGenerator[bytes, None]:
    yield b"x"


async def _fails() -> AsyncGenerator[bytes, None]:
    raise Fault(503, "no")
    yield b"x"


class Here:
    """A job, and one client that is registered for it."""

    def __init__(self, client: redis.Redis) -> None:
        self.redis = client
        self.jobs = Jobs(client)
        self.clients = Clients(self.jobs)
        new = new_job(digest="d", client=secrets.token_hex(4))
        self.jobs.accept(new)
        self.client = Client(new.id, new.client)

    def assert_missed(self) -> None:
        assert waiting(self.redis, self.client.response) == {self.client.name}
        self.clients.tell_gone()
        assert abandoned(self.redis) == {self.client.response}
        # Nor is it said to be there any more.
        self.clients.renew()
        assert abandoned(self.redis) == {self.client.response}

    def assert_expected(self) -> None:
        """It did not go by itself: nothing is given up while it may come again."""
        self.clients.tell_gone()
        assert not abandoned(self.redis)
        lease = self.redis.zscore("tandem:attended", self.client.response)
        assert lease - self.redis.time()[0] > RETRIEVED_WITHIN - 60


async def _run(serving: Any, cancelled: bool) -> None:
    task = asyncio.ensure_future(serving)
    if cancelled:
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


WAYS: dict[str, tuple[Any, Any, Any, bool]] = {
    "before it begins": (_endless, _gone, _send, False),
    "as it begins": (_endless, _never, _closed, False),
    "while it is told": (_endless, _never, _closes, False),
    "with the last chunk": (_short, _gone, _send, False),
    "by an early end": (_short, _never, _send, False),
    "by a fault": (_fails, _never, _send, False),
    "by being cancelled": (_endless, _never, _send, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_ends_early_is_missed(client: redis.Redis, way: str) -> None:
    chunks, receive, send, cancelled = WAYS[way]
    here = Here(client)
    during = here.clients.serving(here.client)
    served = EventStream(chunks(), during=during)({"type": "http"}, receive, send)
    asyncio.run(_run(served, cancelled))
    if cancelled:
        here.assert_expected()
    else:
        here.assert_missed()


def test_a_stream_whose_response_has_ended_says_nothing_more(client: redis.Redis) -> None:
    here = Here(client)
    here.client.over = True
    during = here.clients.serving(here.client)
    asyncio.run(_run(EventStream(_short(), during=during)({"type": "http"}, _never, _send), False))
    here.clients.tell_gone()
    assert not abandoned(client)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LISTEN_WITHIN", 0.01)
    monkeypatch.setattr(stream, "LOST_AFTER", -1.0)


@asynccontextmanager
async def _backend(here: Here, url: str) -> AsyncIterator[Backend]:
    """What delivers needs of a backend; nobody tells its hub of events."""
    heard = connect_async(url, patience=0)
    config = SimpleNamespace(jobs=JobsConfig())
    made = SimpleNamespace(hub=EventHub(heard), clients=here.clients, config=config)
    yield cast(Backend, made)
    await heard.aclose()


NOWHERE = "unix:///nowhere/r.sock"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["gone", "cancelled", "lost", "ended"])
def test_a_waiting_request_that_ends_early_is_missed(
    client: redis.Redis, redis_url: str, way: str
) -> None:
    here = Here(client)
    if way == "ended":
        here.jobs.cancel(here.client.response)

    async def waits() -> None:
        async with _backend(here, NOWHERE if way == "lost" else redis_url) as backend:
            receive = _gone if way == "gone" else _never
            request = Request({"type": "http"}, receive)
            await _run(delivery.wait(backend, here.client, request), way == "cancelled")

    asyncio.run(waits())
    assert here.client.over is (way == "ended")
    if way == "ended":
        here.clients.tell_gone()
        assert not abandoned(client)
        return
    if way == "gone":
        here.assert_missed()
        return
    # Who was told to retrieve it later, or was cut off by us, has the time to do so.
    here.assert_expected()


class Plain:
    """A view that shows events as they are."""

    def render(self, seq: int, data: Mapping[str, Any], ended: Job | None = None) -> str:
        return str(data["type"])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["lost", "ended"])
def test_a_followed_stream_says_whether_it_was_to_the_end(
    client: redis.Redis, redis_url: str, way: str
) -> None:
    here = Here(client)
    if way == "ended":
        here.jobs.cancel(here.client.response)
    job = here.jobs.get(here.client.response)

    async def follows() -> list[str]:
        async with _backend(here, NOWHERE if way == "lost" else redis_url) as backend:
            batches = delivery.follow(backend, job, Plain(), client=here.client)
            return [said async for batch in batches for said in batch]

    last = "error" if way == "lost" else "response.incomplete"
    assert asyncio.run(follows())[-1] == last
    assert here.client.over is (way == "ended")
    assert here.client.returns is (way == "lost")


def test_who_goes_just_as_events_are_heard_is_let_go(client: redis.Redis, redis_url: str) -> None:
    here = Here(client)

    async def follows() -> None:
        heard = connect_async(redis_url, patience=0)
        hub = EventHub(heard)

        async def read() -> None:
            async for _ in hub.follow(here.client.response):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        hub._hearing.set()
        await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait({reading}, timeout=20)
        await heard.aclose()
        assert done, "it reads on"
        assert reading.cancelled()

    asyncio.run(follows())


def test_those_that_are_there_are_told_of_again(client: redis.Redis) -> None:
    here = Here(client)
    with here.clients.serving(here.client):
        client.zadd("tandem:attended", {here.client.response: 1.0})
        assert here.jobs.give_up() == (1, 0)
        assert abandoned(client) == {here.client.response}
        here.clients.renew()
        assert not abandoned(client)
        assert waiting(client, here.client.response) == {here.client.name}


def test_who_goes_while_redis_is_away_is_missed_later(client: redis.Redis, redis_url: str) -> None:
    here = Here(client)
    losing = Losing(redis_url, patience=0)
    clients = Clients(losing.jobs)
    with clients.serving(here.client):
        pass
    losing.losses[0] = 1
    with pytest.raises(redis.exceptions.ConnectionError):
        clients.tell_gone()
    here.jobs.attend([(here.client.response, here.client.name)])  # as if it had not arrived
    clients.tell_gone()
    assert abandoned(client) == {here.client.response}
    losing.client.close()


def test_when_the_process_stops_all_may_come_again(client: redis.Redis) -> None:
    here, also = Here(client), Here(client)
    here.clients.start()
    with here.clients.serving(here.client), here.clients.serving(also.client):
        here.clients.close()
        for one in (here, also):
            one.assert_expected()


def test_who_will_return_outlasts_who_leaves(client: redis.Redis) -> None:
    here = Here(client)
    here.jobs.attend([(here.client.response, "another")])
    here.client.returns = True
    with here.clients.serving(here.client):
        pass
    here.clients.tell_gone()
    here.jobs.attend([(here.client.response, "another")])
    here.jobs.abandon(here.client.response, "another")
    here.assert_expected()


def test_silent_clients_have_time_to_return(client: redis.Redis) -> None:
    """Redis' clock went ahead, or the API was killed: whoever is there says so before long."""
    hasty = Jobs(client, JobsConfig(abandon_seconds=0))
    new = new_job(client="one")
    hasty.accept(new)
    client.zadd("tandem:attended", {new.id: 1.0})
    assert hasty.give_up() == (1, 0)
    assert hasty.give_up() == (0, 0)
    left = client.zscore("tandem:abandoned", new.id) - client.time()[0]
    assert left > RETRIEVED_WITHIN - 60
    hasty.attend([(new.id, "one")])
    assert not abandoned(client)


def test_names_of_clients_do_not_stay_for_ever(client: redis.Redis, jobs: Jobs) -> None:
    """Workers of before these were known end jobs without removing them."""
    new = new_job(client="one")
    jobs.accept(new)
    assert 0 < client.ttl(f"tandem:waiting:{new.id}") < 2 * 86_400


def test_what_is_only_asked_for_again_makes_no_job(client: redis.Redis, jobs: Jobs) -> None:
    new = new_job(client="one")
    with pytest.raises(JobNotFound):
        jobs.accept(replace(new, known=True))
    assert not client.exists(f"tandem:job:{new.id}", f"tandem:waiting:{new.id}")
    jobs.accept(new)
    assert jobs.accept(replace(new, known=True)).duplicate
