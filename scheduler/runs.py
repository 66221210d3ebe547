"""Jobs as their workers see them: take, renew, append, finish, hand back.

Every step names the run that the worker holds (an RQ execution id). A run that is no longer the
record's changes nothing: its worker learns that it has lost the job. Every step may be sent twice,
because a connection that breaks leaves open whether the server acted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgpack
import redis

from scheduler import policy, scripts, shadow
from scheduler.config import JobsConfig
from scheduler.homes import KEEP
from scheduler.images import without_data
from scheduler.jobs import CANCELLED_EVENT
from scheduler.ledger.clock import Clock
from scheduler.queue import PREFILL, decode_queue
from scheduler.record import Job, Result, parse
from scheduler.serializer import pack, unpack

#: "done": this very run ended the job before. "lost": the job belongs to somebody else.
Outcome = Literal["ok", "done", "lost", "cancel", "behind"]
Release = Literal["requeued", "failed", "cancelled", "kept", "lost", "done"]
Call = tuple[str, dict[str, Any]]
Row = tuple[str, str, int, Sequence[bytes], bool]
"""Events of a run to be appended: response, run, number of the first, packed events, and whether
they carry token ids."""

IN_PROGRESS = {"type": "response.in_progress"}


class Lost(Exception):
    """The run's lease ran out and the job was given away: stop, and change nothing."""


class Cancelled(Exception):
    """The job was cancelled: stop at once."""


class Preempted(Exception):
    """A much better job waits: park this one's state at the chunk boundary and let go."""


class Drain(Exception):
    """The worker is to stop: leave the job at this chunk boundary; it will be handed back."""


class SendBack(Exception):
    """A decode cannot begin here (its state is gone): the job is to be prefilled again."""


class Ahead(NamedTuple):
    """What waits at a chunk boundary: a job that should run before the rest of the present one,
    and an interactive one that is shorter than that rest."""

    better: bool
    interactive: bool


class Runs:
    """The fenced steps of running jobs. Thread-safe.

    Steps that end a run take its notes with them (`ledger`, packed): they cost no round trip.
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: JobsConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.client = client
        self.settings = settings or JobsConfig()
        self.clock = clock or Clock()

    def take(self, queue: str, worker: str, holder: str, run: str | None = None) -> Job | None:
        """Start the next job of `queue`, or None. `worker`: RQ worker name; `holder`: role:node.

        A call repeated with the same `run` gets the same job.
        """
        args = {
            "queue": queue,
            "worker": worker,
            "holder": holder,
            "run": run or uuid.uuid4().hex,
            "lease": self.settings.lease_seconds,
            "iso": shadow.iso_now(),
            "first": [pack(IN_PROGRESS)],
            "policy": policy.arguments(self.settings),
            "blank": shadow.fields("unknown", "prefill", queue, 0),
        }
        before = time.monotonic()
        answer = scripts.call(self.client, "take", args)
        if answer is None:
            return None
        resp, flat, prompt, now = answer
        self.clock.sample(before, float(now), time.monotonic())
        return parse(resp.decode(), dict(zip(flat[::2], flat[1::2], strict=True)), prompt)

    def renew(
        self,
        queue: str,
        worker: str,
        fields: Mapping[str, Any],
        runs: Sequence[tuple[str, str, int]],
    ) -> list[Literal["ok", "lost", "cancel"]]:
        """One heartbeat: the worker's registration in RQ (`fields`) and its leases.

        `runs`: (response id, run, prefilled tokens or -1). Answers in the same order.
        """
        args = {
            "queue": queue,
            "worker": worker,
            "fields": [item for pair in fields.items() for item in pair],
            "ttl": self.settings.lease_seconds * 2 + 60,
            "lease": self.settings.lease_seconds,
            "iso": shadow.iso_now(),
            "runs": [list(entry) for entry in runs],
        }
        answers = scripts.call(self.client, "renew", args)
        return [answer.decode() for answer in answers]

    def publish_budget(self, node: str, limit: int, fixed: int, per_token: float) -> None:
        """Say how many bytes of state decode node `node` keeps for jobs that wait for it.

        A state of n tokens takes `fixed` + `per_token` * n. Holds for two leases.
        """
        key = f"tandem:budget:{node}"
        values: dict[str, float] = {"limit": limit, "fixed": fixed, "per_token": per_token}
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(key, mapping=values)  # type: ignore[arg-type]  # numbers are values to Redis
        pipe.expire(key, self.settings.lease_seconds * 2)
        pipe.execute()

    def handing_off(self, job: Job, prefilled: int = -1, begun_at: int = 0) -> Outcome:
        """The prefill is computed, from token `begun_at` to `prefilled`; its state is under way."""
        args = {"id": job.id, "run": job.run, "prefilled": prefilled, "begun_at": begun_at}
        return self._outcome("handing_off", args)

    def finish_prefill(
        self,
        job: Job,
        handoff: Mapping[str, Any],
        queue: str,
        prefilled: int = -1,
        ledger: bytes = b"",
    ) -> Outcome:
        """End the prefill stage and enqueue the decode job in `queue`, in one step.

        `handoff`: facts (bytes, seconds, path; `link_rate`, bytes per second, where it was
        measured). "cancel": it was cancelled meanwhile and has ended.
        """
        args = {
            **self._common(),
            "id": job.id,
            "run": job.run,
            "prefilled": prefilled,
            "handoff": pack(dict(handoff)),
            "link": float(handoff.get("link_rate") or 0.0),
            "queue": queue,
            "ledger": ledger,
            "shadow": shadow.fields(job.id, "decode", queue, job.prompt_tokens),
        }
        return self._outcome("prefilled", args)

    def append(self, job: Job, first: int, events: Sequence[bytes], tokens: bool) -> Outcome:
        """Append packed events, of which the first has number `first`."""
        return append_rows(self.client, [(job.id, job.run, first, events, tokens)])[0][0]

    def finish(self, job: Job, result: Result, first: int = -1, ledger: bytes = b"") -> Outcome:
        """End a decode: completed or incomplete. The event is the last of the log."""
        name, args = self.finish_call(job, result, first)
        return self._outcome(name, {**args, "ledger": ledger})

    def fail(self, job: Job, code: str, message: str, ledger: bytes = b"") -> Outcome:
        """End a job with an error that its client sees."""
        name, args = self.fail_call(job, code, message)
        return self._outcome(name, {**args, "ledger": ledger})

    def cancelled(
        self,
        job: Job,
        output: Mapping[str, Any] | None = None,
        *,
        holder: str = "",
        parked: int = 0,
        ledger: bytes = b"",
    ) -> Outcome:
        """End a job that its worker stopped because it was cancelled; `output`: what there was.

        `parked`: tokens of its prompt whose state `holder` keeps for the same prompt.
        """
        name, args = self.cancelled_call(job, output)
        return self._outcome(name, {**args, "holder": holder, "parked": parked, "ledger": ledger})

    def hand_back(
        self, job: Job, *, holder: str = "", parked: int = 0, ledger: bytes = b""
    ) -> Release:
        """Let the job wait again, first in RQ's list; no attempt is counted.

        `parked`: prompt tokens whose state `holder` keeps; it goes on from there.
        """
        return self._release(job.id, job.run, "back", job, holder, parked, ledger)

    def is_parked(self, resp: str) -> bool:
        """Whether a job waits with its state parked at some worker."""
        status, parked = self.client.hmget(f"tandem:job:{resp}", "status", "parked_by")
        return status == b"queued" and bool(parked)

    def alone(self, job: Job) -> bool:
        """Whether no other job of the conversation of `job` lives, or branches from it."""
        others = self.client.smembers(f"tandem:at:{job.conversation}") if job.conversation else ()
        return not {other.decode() for other in cast("set[bytes]", others)} - {job.id}

    def rehome(
        self, job: Job, node: str, handoff: Mapping[str, Any], ledger: bytes = b""
    ) -> Literal["ok", "kept", "done", "lost", "cancel"]:
        """Give a running answer and its conversation to decode node `node`, in one step.

        Its state and the conversation's records are there. `handoff`: the facts of its hand-offs.
        "kept": another job of the conversation lives here, so nothing has changed. No attempt is
        counted.
        """
        queue = decode_queue(node)
        args = {
            **self._common(),
            "id": job.id,
            "run": job.run,
            "from": job.node,
            "node": node,
            "queue": queue,
            "handoff": pack(dict(handoff)),
            "ledger": ledger,
            "keep_home": KEEP,
            "shadow": shadow.fields(job.id, "decode", queue, job.prompt_tokens),
        }
        answer = scripts.call(self.client, "rehome", args).decode()
        return cast('Literal["ok", "kept", "done", "lost", "cancel"]', answer)

    def waiting(self, queue: str) -> int:
        """How many jobs wait in `queue`."""
        return int(self.client.llen(f"rq:queue:{queue}"))

    def look_ahead(self, job: Job, queue: str, holder: str, prefilled: int) -> Ahead:
        """Who waits while this job has `prefilled` of its tokens."""
        args = {
            "id": job.id,
            "queue": queue,
            "holder": holder,
            "prefilled": prefilled,
            "gain": self.settings.preempt_gain,
            "policy": policy.arguments(self.settings),
        }
        better, interactive = scripts.call(self.client, "better", args)
        return Ahead(bool(better), bool(interactive))

    def send_back(self, job: Job, *, ledger: bytes = b"") -> Release:
        """Let a decode job be prefilled again. "failed" after `max_attempts` such returns."""
        return self._release(job.id, job.run, "prefill", job, ledger=ledger)

    def reclaim(self, job: Job, *, dead: bool) -> Release:
        """Take a job from a run whose lease ran out, or whose holder is `dead` for certain."""
        return self._release(job.id, job.run, "dead" if dead else "expired", job)

    # The calls that an outbox sends many of at a time.

    def finish_call(self, job: Job, result: Result, first: int) -> Call:
        """Script call of `finish`."""
        last: dict[str, Any] = {"type": f"response.{result.status}", "status": result.status}
        if result.reason:
            last["reason"] = result.reason
        fields: dict[str, Any] = {
            "output": pack(dict(result.output)),
            "usage": pack(dict(result.usage)),
            "path": pack(dict(result.path)),
            "computed_tokens": result.computed_tokens,
            "reason": result.reason,
        }
        if (bare := without_data(job.request)) is not None:
            fields["request"] = pack(bare)  # the record outlives the turn's writing by days
        packed = [pack(dict(event)) for event in (*result.events, last)]
        return self._end(job, result.status, packed, fields, first)

    def fail_call(self, job: Job, code: str, message: str) -> Call:
        """Script call of `fail`."""
        error = {"code": code, "message": message}
        last = {"type": "response.failed", "status": "failed", "error": error}
        name, args = self._end(job, "failed", [pack(last)], {"error": pack(error)}, -1)
        return name, {**args, "exception": shadow.exception_text(f"{code}: {message}")}

    def cancelled_call(self, job: Job, output: Mapping[str, Any] | None) -> Call:
        """Script call of `cancelled`."""
        fields: dict[str, Any] = {"reason": "cancelled"}
        if output is not None:
            fields["output"] = pack(dict(output))
        return self._end(job, "cancelled", [pack(CANCELLED_EVENT)], fields, -1)

    def _end(
        self, job: Job, status: str, events: list[bytes], fields: dict[str, Any], first: int
    ) -> Call:
        return "finish", {
            **self._common(),
            "id": job.id,
            "run": job.run,
            "status": status,
            "first": first,
            "events": events,
            "holder": "",
            "parked": 0,
            "parked_ttl": int(self.settings.parked_seconds) + 1,
            "fields": [item for pair in fields.items() for item in pair],
        }

    def _release(
        self,
        resp: str,
        run: str,
        mode: Literal["back", "prefill", "expired", "dead"],
        job: Job,
        holder: str = "",
        parked: int = 0,
        ledger: bytes = b"",
    ) -> Release:
        stage, queue = (job.stage, job.queue) if mode != "prefill" else ("prefill", PREFILL)
        message = (
            f"its prefilled state was lost {self.settings.max_attempts} times"
            if mode == "prefill"
            else f"its worker died or froze {job.attempts} times; "
            f"the last was {job.worker or 'unknown'}"
        )
        error = {"code": "worker_lost", "message": message}
        args = {
            **self._common(),
            "id": resp,
            "run": run,
            "mode": mode,
            "max_attempts": self.settings.max_attempts,
            "holder": holder,
            "parked": parked,
            "ledger": ledger,
            "queue": queue,
            "shadow": shadow.fields(resp, stage, queue, job.prompt_tokens),
            "error": pack(error),
            "exception": shadow.exception_text(message),
            "failed": [pack({"type": "response.failed", "status": "failed", "error": error})],
        }
        return cast(Release, scripts.call(self.client, "release", args).decode())

    def take_over(self, node: str, limit: int) -> int:
        """Have the decode node `node` prefill up to `limit` of the jobs that wait for a prefill.

        For when no prefill node is there; the oldest first, and only jobs of that node. Returns
        how many were moved.
        """
        moved = 0
        waiting = self.client.lrange(f"{shadow.PREFIX}:queue:{PREFILL}", 0, -1)
        for entry in cast("list[bytes]", waiting):
            if moved >= limit:
                break
            resp = entry.decode().rpartition("-")[0]
            queue = decode_queue(node)
            tokens = cast("bytes | None", self.client.hget(f"tandem:job:{resp}", "prompt_tokens"))
            args = {
                **self._common(),
                "id": resp,
                "node": node,
                "queue": queue,
                "shadow": shadow.fields(resp, "decode", queue, int(tokens or 0)),
            }
            moved += scripts.call(self.client, "take_over", args) == b"moved"
        return moved

    def _common(self) -> dict[str, Any]:
        return {
            "iso": shadow.iso_now(),
            "keep": int(self.settings.result_days * 86_400),
            "shadow_ttl": shadow.ttl(self.settings.result_days),
            "policy": policy.arguments(self.settings),
            "cancelled": [pack(CANCELLED_EVENT)],
        }

    def _outcome(self, name: str, args: Mapping[str, Any]) -> Outcome:
        return cast(Outcome, scripts.call(self.client, name, args).decode())


def append_rows(client: redis.Redis, rows: Sequence[Row]) -> list[tuple[Outcome, int]]:
    """Append events of several runs in one step, told in one message: outcomes and counts."""
    # Packed as it is told, so that the script need not pack it again; see `scripts._argument`.
    said = [(resp, first, events) for resp, _, first, events, _ in rows]
    args = {"runs": [row[1] for row in rows], "tokens": [row[4] for row in rows]}
    odd = scripts.call(client, "append", args, bytes(msgpack.packb(said, use_bin_type=False)))
    answers: list[tuple[Outcome, int]] = [("ok", row[2] + len(row[3])) for row in rows]
    for number, outcome, count in unpack(odd) if odd else ():
        answers[number] = (cast(Outcome, outcome), int(count))
    return answers
