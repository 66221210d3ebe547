"""Batches: groups of jobs that somebody wants by tomorrow, as records in Redis.

The record says what was asked for and how far it is. What has become of each line stands in a
journal on disk (`scheduler.api.batch_journal`); one driver in the API advances a batch and is the
only one that changes its status.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import redis

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
Endpoint = Literal["/v1/responses", "/v1/chat/completions"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
ENDED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))
WINDOW_SECONDS = 86_400
KEEP_SECONDS = 30 * 86_400
"""How long the record of an ended batch is kept."""
_ALL, _OPEN = "tandem:batches", "tandem:batches:open"


@dataclass(frozen=True, slots=True)
class Batch:
    """A snapshot of a batch's record. `at`: when it entered each status; `home`: the node whose
    disk has its files; `keep`: seconds for which its output files are kept; `ending`: the status
    that follows finalizing."""

    id: str
    owner: str
    endpoint: Endpoint
    input_file: str
    home: str
    status: Status
    created: float
    expires: float
    keep: float
    metadata: dict[str, str] = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    errors: list[dict[str, Any]] | None = None
    usage: dict[str, int] | None = None
    model: str | None = None
    cancelling: float | None = None
    ending: Status | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of it can change any more."""
        return self.status in ENDED

    @property
    def shown(self) -> Status:
        """The status as its owner sees it."""
        asked = self.cancelling is not None and self.status in ("validating", "in_progress")
        return "cancelling" if asked else self.status


class Batches:
    """The batches' records. Thread-safe."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def create(
        self,
        *,
        owner: str,
        endpoint: Endpoint,
        input_file: str,
        home: str,
        keep: float,
        metadata: dict[str, str],
    ) -> Batch:
        """Record a new batch, to be taken up by the driver of its home."""
        ident, now = f"batch_{secrets.token_hex(16)}", time.time()
        fields = {
            "owner": owner,
            "endpoint": endpoint,
            "input_file": input_file,
            "home": home,
            "status": "validating",
            "created": now,
            "expires": now + WINDOW_SECONDS,
            "keep": keep,
            "metadata": json.dumps(metadata),
        }
        pipe = self._client.pipeline()
        pipe.hset(_key(ident), mapping=cast("dict[Any, Any]", fields))
        for index in (_ALL, f"{_ALL}:of:{owner}"):
            pipe.zadd(index, {ident: now})
        pipe.sadd(_OPEN, ident)
        pipe.execute()
        made = self.get(ident)
        assert made is not None
        return made

    def get(self, ident: str) -> Batch | None:
        """The batch as it is now, or None."""
        if not ident.startswith("batch_") or len(ident) != 38:
            return None
        return _parse(ident, cast("dict[bytes, bytes]", self._client.hgetall(_key(ident))))

    def newest(self, owner: str | None = None) -> Iterator[Batch]:
        """All batches, or an owner's, newest first."""
        index, start = _ALL if owner is None else f"{_ALL}:of:{owner}", 0
        while ids := cast("list[bytes]", self._client.zrevrange(index, start, start + 199)):
            pipe = self._client.pipeline(transaction=False)
            for ident in ids:
                pipe.hgetall(_key(ident.decode()))
            gone = []
            for ident, raw in zip(ids, pipe.execute(), strict=True):
                if (batch := _parse(ident.decode(), raw)) is not None:
                    yield batch
                else:
                    gone.append(ident)
            if gone:  # its record has expired
                self._client.zrem(index, *gone)
            start += 200 - len(gone)

    def unfinished(self, home: str) -> list[Batch]:
        """Batches of this home that have not ended, oldest first."""
        ids = cast("set[bytes]", self._client.smembers(_OPEN))
        found = [batch for ident in ids if (batch := self.get(ident.decode())) is not None]
        return sorted((b for b in found if b.home == home), key=lambda b: (b.created, b.id))

    def cancel(self, batch: Batch) -> None:
        """Ask for an end: what runs is cancelled, what has ended stays."""
        self._client.hsetnx(_key(batch.id), "cancelling", str(time.time()))

    def count(self, batch: Batch, completed: int, failed: int) -> None:
        """Say how many lines have ended."""
        self._client.hset(_key(batch.id), mapping={"completed": completed, "failed": failed})

    def move(self, batch: Batch, status: Status, **fields: Any) -> Batch:
        """Give it a new status, with whatever else is known by then; returns what it is now."""
        mapping = {name: _text(value) for name, value in fields.items() if value is not None}
        mapping |= {"status": status, f"at_{status}": str(time.time())}
        pipe = self._client.pipeline()
        pipe.hset(_key(batch.id), mapping=cast("dict[Any, Any]", mapping))
        if status in ENDED:
            pipe.srem(_OPEN, batch.id)
            pipe.expire(_key(batch.id), KEEP_SECONDS)
            pipe.delete(_sent(batch.id))
        pipe.execute()
        return self.get(batch.id) or batch

    def mark_sent(self, batch: Batch, line: int) -> None:
        """Remember that a line was submitted, for the day when its job's record is gone."""
        self._client.setbit(_sent(batch.id), line, 1)

    def sent(self, batch: Batch) -> bytes:
        """Bitmap of the lines that were submitted, most significant bit first."""
        return cast("bytes | None", self._client.get(_sent(batch.id))) or b""


def is_sent(bitmap: bytes, line: int) -> bool:
    """Whether a line stands in such a bitmap."""
    return line // 8 < len(bitmap) and bool(bitmap[line // 8] & (0x80 >> line % 8))


def _key(ident: str) -> str:
    return f"tandem:batch:{ident}"


def _sent(ident: str) -> str:
    return f"tandem:batch:{ident}:sent"


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _parse(ident: str, raw: Mapping[bytes, bytes]) -> Batch | None:
    if b"status" not in raw:
        return None
    text = {name.decode(): value.decode() for name, value in raw.items()}
    return Batch(
        id=ident,
        owner=text["owner"],
        endpoint=cast(Endpoint, text["endpoint"]),
        input_file=text["input_file"],
        home=text["home"],
        status=cast(Status, text["status"]),
        created=float(text["created"]),
        expires=float(text["expires"]),
        keep=float(text["keep"]),
        metadata=json.loads(text["metadata"]),
        at={name[3:]: float(value) for name, value in text.items() if name.startswith("at_")},
        total=int(text.get("total", 0)),
        completed=int(text.get("completed", 0)),
        failed=int(text.get("failed", 0)),
        output_file=text.get("output_file"),
        error_file=text.get("error_file"),
        errors=json.loads(text["errors"]) if "errors" in text else None,
        usage=json.loads(text["usage"]) if "usage" in text else None,
        model=text.get("model"),
        cancelling=float(text["cancelling"]) if "cancelling" in text else None,
        ending=cast("Status | None", text.get("ending")),
    )
