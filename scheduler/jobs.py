"""Jobs as their clients see them: accept, look at, cancel, wait for.

Used by the API and the CLI. What workers do to jobs is in `scheduler.runs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import redis
from redis.exceptions import OutOfMemoryError

from scheduler import events, policy, scripts, shadow
from scheduler.config import JobsConfig
from scheduler.homes import KEEP
from scheduler.ledger.clock import Clock
from scheduler.ledger.notes import FIELD
from scheduler.owners import MARK
from scheduler.queue import PREFILL, first_queue
from scheduler.record import (
    LISTED,
    RESPONSE_ID,
    STATUSES,
    Accepted,
    ConversationBusy,
    Forecast,
    HomeMoved,
    IdempotencyConflict,
    Job,
    JobError,
    JobNotFound,
    NewJob,
    QueueFull,
    Status,
    pack_ids,
    parse,
    prompt_digest,
    unpack_ids,
)
from scheduler.serializer import pack

#: What is told last about a cancelled job; OpenAI's clients know no event of that name.
CANCELLED_EVENT = {"type": "response.incomplete", "status": "cancelled", "reason": "cancelled"}

#: Waiting jobs that a forecast looks at: it is asked for often, and Redis does nothing else then.
_FORECAST = 250

CLIENT_LEASE = 60.0
"""Seconds for which a client that is not heard of again counts as waiting."""
RETRIEVED_WITHIN = 600.0
"""Seconds for which a foreground job goes on whose clients had to leave it without having failed:
the API was stopped or killed, or told them to retrieve the answer later."""
_AT_ONCE = 100
"""Jobs and clients that one call deals with: Redis does nothing else then."""

_LISTED = [name.encode() for name in LISTED]

#: Seconds for which the record of a job that is not to be stored outlives it, so that its client
#: gets the answer; one of the background is asked for only later, one of a batch by its driver.
BRIEF, BRIEF_BACKGROUND, BRIEF_BATCH = 60, 600, 2 * 86_400


def _brief(new: NewJob) -> dict[str, int]:
    if new.request.get("store", True):
        return {}
    about = (new.request.get("params") or {}).get("about") or {}
    if about.get("batch"):
        return {"brief": BRIEF_BATCH}
    return {"brief": BRIEF_BACKGROUND if new.background else BRIEF}


class Jobs:
    """Accept, find, cancel and list jobs. Thread-safe; every call is one round trip or two."""

    def __init__(self, client: redis.Redis, settings: JobsConfig | None = None) -> None:
        self.client = client
        self.settings = settings or JobsConfig()
        self.clock = Clock()

    def accept(self, new: NewJob) -> Accepted:
        """Record a job, its prompt and first events and put it into its first queue, atomically.

        The same id again is a duplicate: nothing changes. Raises IdempotencyConflict when its
        digest differs, HomeMoved where `home` or `past_home` is not so any more. A foreground
        request that equals one whose clients have all gone (see `abandon`), and that is not being
        cancelled, is given that one, under its id, and gets it again when it is repeated. Raises
        ConversationBusy with `lock` while the conversation has a live turn, QueueFull, JobNotFound
        with `known` where the job is gone, and JobError when Redis is out of memory.
        """
        if not RESPONSE_ID.match(new.id):
            raise JobError(f"{new.id!r} is not a response id: use response_id()")
        if new.lock and not new.conversation:
            raise JobError("lock=True needs a conversation to lock")
        extend = str(new.route.get("extend", ""))
        prompt = pack_ids(new.prompt_ids)
        tokens = len(prompt) // 4
        if not tokens:
            raise JobError("the prompt is empty: send at least one token")
        if not 0 <= new.held_tokens < tokens:
            raise JobError(
                f"held_tokens={new.held_tokens} does not fit a prompt of {tokens} tokens"
            )
        queue = first_queue(new.stage, new.node)
        owned = new.owner.startswith(MARK)
        self._refuse_long_wait(new, tokens, queue)
        fields: dict[str, Any] = {
            "stage": new.stage,
            "queue": queue,
            "owner": new.owner,
            "model": new.model,
            "request": pack(dict(new.request)),
            "conversation": new.conversation or "",
            "previous": new.previous or "",
            **({"past": new.past} if new.past else {}),
            **_brief(new),
            "node": new.node,
            "background": int(new.background),
            "priority": new.priority,
            "digest": new.digest,
            "prompt_tokens": tokens,
            "held_tokens": new.held_tokens,
            **({"route": pack(dict(new.route)), "extend": extend} if new.route else {}),
            # Unfinished work for a prompt is found by it.
            "prompt_digest": prompt_digest(prompt, new.owner),
            "cancel": 0,
        }
        args = {
            "id": new.id,
            "digest": new.digest,
            "owner": new.owner,
            "conversation": new.conversation or "",
            "home": new.home,
            "past": new.past,
            "past_home": new.past_home,
            "node": new.node,
            "keep_home": KEEP,
            "adopt": not new.background,
            "known": new.known,
            "client": new.client,
            "client_lease": CLIENT_LEASE,
            "prompt": fields["prompt_digest"],
            "locked": new.conversation if new.lock and new.conversation else "",
            "stage": new.stage,
            "queue": queue,
            "max_waiting": self.settings.max_waiting,
            "owner_waiting": new.owner_waiting,
            "theirs": new.owner if owned else "",
            "keep": int(self.settings.result_days * 86_400),
            "policy": policy.arguments(self.settings),
            "deadline": new.deadline,
            "fields": [item for pair in fields.items() for item in pair],
            "events": [pack(dict(event)) for event in new.events],
            "shadow": shadow.fields(new.id, new.stage, queue, tokens),
        }
        if new.ledger:
            args["fields"] += [FIELD + "api", new.ledger]
        before = time.monotonic()
        try:
            answer, detail = scripts.call(self.client, "accept", args, prompt)
        except OutOfMemoryError:
            raise JobError(
                "Redis has no memory left for another job: raise its maxmemory or wait"
            ) from None
        match answer.decode():
            case "gone":
                raise JobNotFound(f"no job {new.id} any more")
            case "busy":
                raise ConversationBusy(str(new.conversation), detail.decode())
            case "moved":
                raise HomeMoved(f"conversation {new.conversation} has moved: send it again")
            case "conflict":
                raise IdempotencyConflict(
                    f"the idempotency key of {new.id} was used with another request: use a new key"
                )
            case "full":
                raise QueueFull(
                    f"{self.settings.max_waiting} jobs wait in {queue!r} already: try again later"
                )
            case "paused":
                raise QueueFull(f"nothing is accepted now: {detail.decode()}", retry_after=15.0)
            case "owner full":
                raise QueueFull(
                    f"{new.owner_waiting} of your jobs wait already, which is your limit: try "
                    "again when some have begun"
                )
            case "adopted":
                return Accepted(detail.decode(), True, new.client)
            case "accepted":
                self.clock.sample(before, float(detail), time.monotonic())
                return Accepted(new.id, False, new.client)
            case outcome:
                return Accepted(new.id, outcome == "duplicate", new.client)

    def _refuse_long_wait(self, new: NewJob, tokens: int, queue: str) -> None:
        """Interactive jobs are refused rather than left waiting; others are always accepted."""
        limit = self.settings.max_wait_seconds
        if not limit or new.priority != "interactive" or new.background:
            return
        reused = new.stage == "decode" or new.route.get("extend") == "prefill"
        left = tokens - (new.held_tokens if reused else 0)
        wait = self.predicted_wait(left, owner=new.owner, priority=new.priority, queue=queue)
        if wait > limit and not self.known(new.id):
            raise QueueFull(
                f"the predicted wait is {wait:.0f} s and {limit:g} s are allowed: "
                "try again later, or send it with background=true",
                retry_after=wait - limit,
            )

    def known(self, resp: str) -> bool:
        """Whether a request with this id was accepted, and its job is still kept."""
        if self.client.exists(f"tandem:job:{resp}"):
            return True
        found = cast("bytes | None", self.client.get(f"tandem:adopted:{resp}"))
        return found is not None and bool(self.client.exists(f"tandem:job:{found.decode()}"))

    def get(self, resp: str, *, prompt: bool = False) -> Job:
        """The present record, with the prompt's token ids on request. Raises JobNotFound."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(f"tandem:job:{resp}")
        if prompt:
            pipe.get(f"tandem:prompt:{resp}")
        answers = pipe.execute()
        return parse(resp, answers[0], (answers[1] or b"") if prompt else b"")

    def prompt_ids(self, resp: str) -> list[int]:
        """Token ids of a job's prompt. Raises JobNotFound."""
        data = cast("bytes | None", self.client.get(f"tandem:prompt:{resp}"))
        if data is None:
            raise JobNotFound(f"no prompt of {resp}: check the id")
        return unpack_ids(data)

    def cancel(self, resp: str) -> Status:
        """Cancel a job and return its status after the call.

        "cancelled" at once where nothing runs. A running one keeps its status until its worker
        acts, at the next chunk or step; one that has ended stays as it is. Raises JobNotFound.
        """
        return self._stop("cancel", resp)

    def _stop(self, script: str, resp: str, **args: Any) -> Status:
        status = scripts.call(self.client, script, {"id": resp, **self._last_words, **args})
        if not status:
            raise JobNotFound(f"no job {resp}: check the id")
        return cast(Status, status.decode())

    @property
    def _last_words(self) -> dict[str, Any]:
        """What a script needs to cancel jobs."""
        return {
            "iso": shadow.iso_now(),
            "cancelled": [pack(CANCELLED_EVENT)],
            "keep": int(self.settings.result_days * 86_400),
            "shadow_ttl": shadow.ttl(self.settings.result_days),
        }

    def note(self, resp: str, name: str, piece: bytes) -> None:
        """Add packed notes to the record of an ended job, where there still is one."""
        scripts.call(self.client, "note", {"id": resp, "name": name, "ledger": piece})

    def let_go(self, job: Job) -> None:
        """The answer of an ended job is written down elsewhere; one not to be stored goes now."""
        if not job.request.get("store", True):
            pipe = self.client.pipeline(transaction=False)
            for key in (f"tandem:job:{job.id}", f"tandem:prompt:{job.id}", events.key(job.id)):
                pipe.expire(key, BRIEF)
            pipe.execute()

    def attend(self, clients: Sequence[tuple[str, str]], lease: float = CLIENT_LEASE) -> None:
        """Clients wait, or still wait, for jobs: pairs of a job's id and a client.

        Each counts for `lease` seconds more. Background jobs wait for nobody, and one that is
        being cancelled is not kept.
        """
        for begin in range(0, len(clients), _AT_ONCE):
            args = {"clients": clients[begin : begin + _AT_ONCE], "client_lease": lease}
            scripts.call(self.client, "attend", args)

    def abandon(self, resp: str, client: str = "") -> Status:
        """A client waits no longer for a foreground job; returns the job's status.

        When none does, it is cancelled after jobs.abandon_seconds unless the same request comes
        again: clients that time out send it again, and must not begin anew. May be said twice.
        Raises JobNotFound.
        """
        grace = self.settings.abandon_seconds
        return self._stop("abandon", resp, client=client, grace=grace)

    def give_up(self) -> tuple[int, int]:
        """Cancel the jobs that all clients have left for long enough.

        Those that are silent may be there still, where the clock was set or the API hears nothing
        of Redis, or were cut off with the API: they have RETRIEVED_WITHIN to come again.
        Returns of how many the clients were found to be silent, and how many were cancelled.
        """
        grace = max(RETRIEVED_WITHIN, self.settings.abandon_seconds)
        args = {**self._last_words, "grace": grace, "most": _AT_ONCE}
        silent = cancelled = 0
        more = True
        while more:
            found = scripts.call(self.client, "give_up", args)
            silent, cancelled = silent + found[0], cancelled + found[1]
            more = max(found) == _AT_ONCE
        return silent, cancelled

    def list(
        self, states: Iterable[Status] | None = None, limit: int = 50, owner: str | None = None
    ) -> list[Job]:
        """At most `limit` jobs in the given states (all by default), last accepted first.

        Without their answers. Only what is shown is fetched. `owner`: only jobs of an owner with
        a token.
        """
        wanted = tuple(states) if states is not None else STATUSES
        if owner is not None:
            return _theirs(self.client, frozenset(wanted), limit, owner)
        pipe = self.client.pipeline(transaction=False)
        for status in wanted:
            pipe.zrevrange(f"tandem:jobs:{status}", 0, limit - 1)
        ids = [member.decode() for members in pipe.execute() for member in members]
        if len(ids) > limit:
            for resp in ids:
                pipe.hget(f"tandem:job:{resp}", "created_at")
            ages = [float(at or 0) for at in pipe.execute()]
            newest = sorted(zip(ages, ids, strict=True), reverse=True)[:limit]
            ids = [resp for _, resp in newest]
        for resp in ids:
            pipe.hmget(f"tandem:job:{resp}", LISTED)
        found = []
        for resp, values in zip(ids, pipe.execute(), strict=True):
            raw = {k: v for k, v in zip(_LISTED, values, strict=True) if v is not None}
            if b"status" in raw:
                found.append(parse(resp, raw))
        return sorted(found, key=lambda job: job.created_at, reverse=True)

    def counts(self) -> dict[Status, int]:
        """How many jobs are in each state (terminal ones: within their lifetime)."""
        pipe = self.client.pipeline(transaction=False)
        for status in STATUSES:
            pipe.zcard(f"tandem:jobs:{status}")
        return dict(zip(STATUSES, pipe.execute(), strict=True))

    def position(self, resp: str) -> int | None:
        """How many jobs would go before this one now; None where it does not wait."""
        found = self.forecast_of(resp)
        return found.place if found else None

    def forecast_of(self, resp: str) -> Forecast | None:
        """Place and predicted start of one job; None where it does not wait."""
        job = self.get(resp)
        if job.ended or job.run:
            return None
        return self.forecast(job.queue).get(resp)

    def forecast(self, queue: str = PREFILL) -> dict[str, Forecast]:
        """Place and predicted start of what waits in a queue (of the smallest 250 there)."""
        flat = self._forecast(queue)[1]
        return {
            resp.decode(): Forecast(place, float(start))
            for place, (resp, start) in enumerate(zip(flat[::2], flat[1::2], strict=True))
        }

    def predicted_wait(
        self, tokens: int, *, owner: str = "", priority: str = "normal", queue: str = PREFILL
    ) -> float:
        """Seconds until a job of `tokens` new tokens would begin if it came now."""
        asked = {"tokens": max(1, tokens), "owner": owner, "priority": priority}
        return float(self._forecast(queue, **asked)[0])

    def _forecast(self, queue: str, **asked: Any) -> Any:
        args = {
            "queue": queue,
            "limit": _FORECAST,
            "policy": policy.arguments(self.settings),
            **asked,
        }
        return scripts.call(self.client, "forecast", args)

    def wait(self, resp: str, timeout: float) -> Job:
        """The job once it has ended. Raises TimeoutError after `timeout` s, and JobNotFound."""
        deadline = time.monotonic() + timeout
        job = self.get(resp)
        after = job.events - 1
        while not job.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{resp} is still {job.status} after {timeout:g} s")
            new = events.read(self.client, resp, after, block=left)
            after = new[-1].seq if new else after
            if new and not events.is_terminal(new[-1].data):
                continue
            job = self.get(resp)
        return job


def _theirs(client: redis.Redis, wanted: frozenset[Status], limit: int, owner: str) -> list[Job]:
    """An owner's jobs in the wanted states, last accepted first."""
    found: list[Job] = []
    start = 0
    while len(found) < limit:
        key = f"tandem:theirs:{owner}"
        ids = [i.decode() for i in cast("list[bytes]", client.zrevrange(key, start, start + 199))]
        pipe = client.pipeline(transaction=False)
        for resp in ids:
            pipe.hmget(f"tandem:job:{resp}", LISTED)
        for resp, values in zip(ids, pipe.execute(), strict=True):
            raw = {k: v for k, v in zip(_LISTED, values, strict=True) if v is not None}
            if b"status" in raw and raw[b"status"].decode() in wanted:
                found.append(parse(resp, raw))
        if len(ids) < 200:
            break
        start += 200
    return found[:limit]
