"""The event log of a response: a Redis stream, written once, read as often as anyone likes.

Event number k is the entry with id `k+1-0`, so "after event k" is a stream position, a stale
writer cannot write over what is there, and a reader that comes back misses and repeats nothing.
The log is complete until it expires: it is never trimmed, because clients may replay it from 0.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import redis
import redis.asyncio

from scheduler.redis_client import MAX_BLOCK
from scheduler.serializer import unpack

#: Types after which a log gets no further event.
TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})

_TEXT_DELTA = "response.output_text.delta"
_OPENING = frozenset({"response.created", "response.queued", "response.in_progress"})


class Event(NamedTuple):
    """One entry of a log: its number from 0, and its data with at least "type"."""

    seq: int
    data: dict[str, Any]


class Logged(list[Event]):
    """Events as they were read from a log; `size`: the bytes that they take there."""

    __slots__ = ("size",)

    def __init__(self, new: Iterable[Event] = (), size: int = 0) -> None:
        super().__init__(new)
        self.size = size


@dataclass(frozen=True, slots=True)
class Replay:
    """What a response has said so far: a retried decode goes on from here.

    `ids`: token ids of all events, in order; `text`: the text of all text deltas, `logprobs` the
    log probabilities of each; `types`: event types seen; `seq`: how many events there are, `said`:
    how many of them tell of the answer.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    types: frozenset[str] = frozenset()
    seq: int = 0
    said: int = 0
    logprobs: list[list[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, logged: Iterable[Mapping[str, Any]]) -> Replay:
        """What these events, a log from its beginning, have said."""
        ids: list[int] = []
        text: list[str] = []
        logprobs: list[list[Any]] = []
        types: set[str] = set()
        count = said = 0
        for event in logged:
            count += 1
            kind = str(event.get("type"))
            types.add(kind)
            said += kind not in _OPENING
            ids.extend(event.get("ids") or ())
            if kind == _TEXT_DELTA:
                text.append(str(event.get("delta", "")))
                logprobs.append(list(event.get("logprobs") or ()))
        return cls(ids, "".join(text), frozenset(types), count, said, logprobs)


def key(resp: str) -> str:
    """Redis key of the log."""
    return f"tandem:events:{resp}"


def is_terminal(data: Mapping[str, Any]) -> bool:
    """True for the last event of a log."""
    return data.get("type") in TERMINAL_EVENTS


def read(
    client: redis.Redis, resp: str, after: int = -1, block: float = 0.0, count: int = 500
) -> Logged:
    """At most `count` events with a number above `after`, waiting up to `block` s for the first."""
    deadline = time.monotonic() + block
    while True:
        wait = min(deadline - time.monotonic(), MAX_BLOCK)
        answer = client.xread(
            {key(resp): f"{after + 1}-0"},
            count=count,
            block=int(wait * 1000) + 1 if wait > 0 else None,
        )
        events = _events(answer)
        if events or time.monotonic() >= deadline:
            return events


async def aread(
    client: redis.asyncio.Redis, resp: str, after: int = -1, block: float = 0.0, count: int = 500
) -> Logged:
    """`read` for asyncio."""
    deadline = time.monotonic() + block
    while True:
        wait = min(deadline - time.monotonic(), MAX_BLOCK)
        answer = await client.xread(
            {key(resp): f"{after + 1}-0"},
            count=count,
            block=int(wait * 1000) + 1 if wait > 0 else None,
        )
        events = _events(answer)
        if events or time.monotonic() >= deadline:
            return events


async def afollow(
    client: redis.asyncio.Redis, resp: str, after: int = -1, *, keepalive: float = 15.0
) -> AsyncIterator[Event | None]:
    """Events after `after` as they come, to the terminal one; None where `keepalive` s were silent.

    Ends as well when the log does not exist (expired, or never there).
    """
    while True:
        events = await aread(client, resp, after, block=keepalive)
        if not events:
            if not await client.exists(key(resp)):
                return
            yield None
            continue
        for event in events:
            yield event
            after = event.seq
            if is_terminal(event.data):
                return


def replay(client: redis.Redis, resp: str, known: int | None = None) -> Replay:
    """Everything that a response has said so far; where nobody says more, `known` is how many
    events that is, and spares a look for the next."""
    return Replay.of(_all(client, resp, known))


def _all(client: redis.Redis, resp: str, known: int | None) -> Iterator[dict[str, Any]]:
    after = -1
    while known is None or after + 1 < known:
        events = read(client, resp, after, count=2000)
        if not events:
            return
        for event in events:
            yield event.data
        after = events[-1].seq


def _events(answer: Any) -> Logged:
    if not answer:
        return Logged()
    _, entries = answer[0]
    return Logged(
        (
            Event(int(entry.split(b"-")[0]) - 1, cast("dict[str, Any]", unpack(data[b"e"])))
            for entry, data in entries
        ),
        sum(len(data[b"e"]) for _, data in entries),
    )
