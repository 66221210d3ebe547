"""What a stack has served, as JSON lines: written from the records of ended jobs, read to replay.

A line holds lengths, times and places, never what was said: ids become numbers in order of arrival,
owners and conversations as well.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import redis

from scheduler.record import Job, JobError, parse

#: States whose records say how a request went from start to end.
ENDED = ("completed", "incomplete")
_WORKER = re.compile(r"prefill-(.+)-\d+-[0-9a-f]{6}\Z")


@dataclass(frozen=True, slots=True)
class Past:
    """One request that was served.

    `at`: seconds since the first one's arrival. `prompt_tokens` of which `cached_tokens` were held
    in some state; `new_tokens` are the rest. `previous`: the `id` of the turn that it continues, or
    None. `stage`: where it began, `prefill` or `decode`. `times`: seconds since its own arrival
    until it was `prefilling`, `handing_off`, `decoding`, `first_token` and `ended`, so far as it
    was. `bytes`, `wire_s`, `exposed_s`: of the hand-off.
    """

    id: int
    at: float
    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    priority: str = "normal"
    owner: int = 0
    conversation: int | None = None
    previous: int | None = None
    stage: str = "prefill"
    path: str = ""
    status: str = "completed"
    prefill_node: str = ""
    decode_node: str = ""
    bytes: int = 0
    wire_s: float = 0.0
    exposed_s: float = 0.0
    link: str = ""
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, or None where there was none."""
        return self.times.get("first_token")

    @property
    def ended(self) -> float | None:
        """Seconds to the end."""
        return self.times.get("ended")


def collect(client: redis.Redis, window: float | None = None) -> list[Past]:
    """Requests that ended within the last `window` seconds (all that is recorded without one).

    In order of arrival. Raises JobError where there are none.
    """
    now = float(client.time()[0])
    since = "-inf" if window is None else now - window
    names: list[str] = []
    for status in ENDED:
        found = client.zrangebyscore(f"tandem:jobs:{status}", since, "+inf")
        names += [name.decode() for name in cast("list[bytes]", found)]
    rows: list[tuple[Job, str]] = []
    for part in range(0, len(names), 500):
        pipe = client.pipeline(transaction=False)
        for name in names[part : part + 500]:
            pipe.hgetall(f"tandem:job:{name}")
        for name, raw in zip(names[part:], pipe.execute(), strict=False):
            if raw:
                worker = _WORKER.match(raw.get(b"p_worker", b"").decode())
                rows.append((parse(name, raw), worker.group(1) if worker else ""))
    if not rows:
        span = "is recorded" if window is None else f"ended within the last {window:g} s"
        raise JobError(f"no request {span}: results are kept for jobs.result_days")
    rows.sort(key=lambda row: (row[0].created_at, row[0].id))
    return list(_pasts(rows))


def _pasts(rows: Sequence[tuple[Job, str]]) -> Iterator[Past]:
    first = rows[0][0].created_at
    numbers = {job.id: number for number, (job, _) in enumerate(rows)}
    owners: dict[str, int] = {}
    talks: dict[str, int] = {}
    for number, (job, worker) in enumerate(rows):
        usage, moved = job.usage or {}, job.handoff or {}
        cached = int(usage.get("cached_tokens", job.path.get("cached_tokens", 0)))
        times: dict[str, float] = {
            name: round(job.times[name] - job.created_at, 4)
            for name in ("prefilling", "handing_off", "decoding")
            if name in job.times
        }
        if job.first_token_at is not None:
            times["first_token"] = round(job.first_token_at - job.created_at, 4)
        times["ended"] = round(job.times[job.status] - job.created_at, 4)
        yield Past(
            id=number,
            at=round(job.created_at - first, 4),
            prompt_tokens=job.prompt_tokens,
            new_tokens=job.prompt_tokens - cached,
            output_tokens=int(usage.get("output_tokens", 0)),
            cached_tokens=cached,
            priority=job.priority,
            owner=owners.setdefault(job.owner, len(owners)),
            conversation=(
                talks.setdefault(job.conversation, len(talks)) if job.conversation else None
            ),
            previous=numbers.get(job.previous or ""),
            stage="prefill" if job.attempts_by_stage["prefill"] else "decode",
            path=str(job.path.get("path", "")),
            status=job.status,
            prefill_node=worker,
            decode_node=job.node,
            bytes=int(moved.get("bytes", 0)),
            wire_s=round(float(moved.get("seconds", 0.0)), 4),
            exposed_s=round(float(moved.get("exposed_seconds", 0.0)), 4),
            link=str(moved.get("path", "")),
            times=times,
        )


def write(path: Path, pasts: Iterable[Past]) -> int:
    """Write one line a request, for this user alone; returns how many."""
    count = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            for past in pasts:
                file.write(json.dumps(asdict(past)) + "\n")
                count += 1
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from None
    return count


def read(path: Path) -> list[Past]:
    """The requests of an exported history, by arrival. Raises JobError, naming the bad line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise JobError(f"the history {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise JobError(f"the history {path} cannot be read: it is no text") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw: dict[str, Any] = json.loads(line)
            past = Past(**raw)
            good = (
                past.at >= 0
                and past.prompt_tokens >= past.new_tokens >= 0
                and past.prompt_tokens > 0
                and past.output_tokens >= 0
            )
        except (ValueError, TypeError):
            good = False
        if not good:
            raise JobError(f"{path}, line {number}: not a request of an exported history")
        found.append(past)
    if not found:
        raise JobError(f"{path} holds no requests")
    return sorted(found, key=lambda past: (past.at, past.id))
