"""Jobs of workers that are gone: taken back, and given to those that are there.

Three cases. At boot a worker holds the lock of its node and role, so whatever its predecessor ran
is free at once. While running, a lease that ran out frees its job. And a waiting job whose RQ entry
vanished is put back into its queue.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import cast

import redis

from scheduler import policy, scripts, shadow
from scheduler.config import JobsConfig
from scheduler.jobs import Jobs
from scheduler.record import JobError, JobNotFound, Stage
from scheduler.runs import Runs

log = logging.getLogger("tandem.reclaim")

Report = Counter[str]


class NodeLock:
    """An flock that one process per node and role holds for as long as it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises JobError when another process holds it."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise JobError(
                f"another process serves {self.path.stem} (lock {self.path}): "
                "stop it, or give this node another name"
            ) from None
        self._file = handle

    def release(self) -> None:
        """Give the lock back; the death of the process does the same."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Reclaimer:
    """Finds jobs that nobody runs although their record says so."""

    def __init__(self, client: redis.Redis, settings: JobsConfig | None = None) -> None:
        self._runs = Runs(client, settings)
        self._jobs = Jobs(client, settings)
        self._client = client
        self._server = b""
        self._steady_since = float("-inf")

    def at_boot(self, holder: str) -> Report:
        """Take back what an earlier process of `holder` (role:node) ran.

        The caller holds the NodeLock of that holder: nobody else can be running those jobs.
        """
        report: Report = Counter()
        for resp in self._leased(float("inf")):
            if self._client.hget(f"tandem:job:{resp}", "holder") == holder.encode():
                report[self._reclaim(resp, dead=True)] += 1
        return report

    def expired(self) -> Report:
        """Take back jobs whose lease ran out, and give up those whose clients have gone.

        Does nothing in the first lease after an outage: workers that could not renew because Redis
        was away have done nothing wrong.
        """
        report: Report = Counter()
        seconds, micros = self._client.time()
        if not self._steady():
            return report
        now = seconds + micros / 1e6
        silent, cancelled = self._jobs.give_up()
        report += Counter(silent=silent, abandoned=cancelled)
        for resp in self._leased(now):
            report[self._reclaim(resp, dead=False)] += 1
        return report

    def reconcile(self) -> Report:
        """Put waiting jobs back into the queue that lost them."""
        report: Report = Counter()
        listed: dict[str, set[bytes]] = {}
        for resp in self._waiting():
            key = f"tandem:job:{resp}"
            stage, queue, run, tokens = cast(
                "list[bytes]", self._client.hmget(key, "stage", "queue", "run", "prompt_tokens")
            )
            if run or not (stage and queue):
                continue
            name, at = queue.decode(), cast(Stage, stage.decode())
            entry = shadow.shadow_id(resp, at)
            if name not in listed:
                indexed = set(
                    cast("list[bytes]", self._client.zrange(f"tandem:size:{name}", 0, -1))
                )
                members = self._client.lrange(f"{shadow.PREFIX}:queue:{name}", 0, -1)
                listed[name] = {
                    entry
                    for entry in cast("list[bytes]", members)
                    if entry.rpartition(b"-")[0] in indexed
                }
            if entry.encode() in listed[name]:
                continue
            args = {
                "id": resp,
                "stage": at,
                "iso": shadow.iso_now(),
                "policy": policy.arguments(self._runs.settings),
                "shadow": shadow.fields(resp, at, name, int(tokens or 0)),
            }
            report[scripts.call(self._client, "restore", args).decode()] += 1
        return report

    def release_promises(self) -> Report:
        """Free memory promised for jobs that neither run nor wait to be decoded."""
        report: Report = Counter()
        for name in self._client.scan_iter("tandem:promised:*", count=500):
            for member in cast("list[bytes]", self._client.zrange(name, 0, -1)):
                key = f"tandem:job:{member.decode()}"
                run, stage = cast("list[bytes | None]", self._client.hmget(key, "run", "stage"))
                if not run and stage != b"decode":
                    report["released"] += int(self._client.zrem(name, member))
        return report

    def outage(self) -> None:
        """Tell that Redis was away: leases get one full length of grace."""
        self._steady_since = time.monotonic()

    def _steady(self) -> bool:
        server = cast("dict[str, str]", self._client.info("server"))["run_id"].encode()
        if self._server and server != self._server:
            self.outage()
        self._server = server
        return time.monotonic() - self._steady_since > self._runs.settings.lease_seconds

    def _leased(self, until: float) -> list[str]:
        top = "+inf" if until == float("inf") else f"{until:.6f}"
        members = self._client.zrangebyscore("tandem:leases", 0, top)
        return [member.decode() for member in cast("list[bytes]", members)]

    def _reclaim(self, resp: str, *, dead: bool) -> str:
        try:
            job = self._jobs.get(resp)
        except JobNotFound:
            self._client.zrem("tandem:leases", resp)
            return "stale"
        outcome = self._runs.reclaim(job, dead=dead)
        if outcome not in ("kept", "lost"):
            log.warning("%s of %s: %s", resp, job.worker, outcome)
        if outcome in ("done", "lost") and not job.run:
            self._client.zrem("tandem:leases", resp)
        return outcome

    def _waiting(self) -> list[str]:
        found: list[str] = []
        for status in ("queued", "handing_off"):
            members = self._client.zrange(f"tandem:jobs:{status}", 0, -1)
            found += [member.decode() for member in cast("list[bytes]", members)]
        return found
