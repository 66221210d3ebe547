"""Prompt heads that a client changes on every request: named, and normalised where that is wanted.

A counter, a time or a line of attribution in front of a long prompt makes every stored state of it
useless. Where little of a prompt can be gone on from, its token ids are compared with those of the
session's and the owner's latest requests: the same tail after a change within the head is reported
with what it costs. `api.normalise_head` has patterns whose matches are taken out of instructions
and leading system messages before anything else is done; without it nothing is ever changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.faults import Fault
from scheduler.api.prompt import common_prefix
from scheduler.api.schema import MessageItem, ResponseRequest, TextPart
from scheduler.api.tokenizer import Tokenizer
from scheduler.record import JobError
from store.errors import StoreError

LATEST = 4
"""Latest requests that a prompt is compared with."""
KEEP = 3600
"""Seconds for which they are remembered: as long as their token ids are."""
CHANGE = 256
"""The longest change, in tokens, that is looked past."""
ALIKE = 16
"""So many equal tokens after a change are no accident."""
COST = 64
"""Fewer tokens computed in vain are not worth a word."""
HEAD_SHARE = 0.5
"""A change beyond this part of the prompt is no change of its head."""
EXCERPT = 80


def normalise(patterns: Sequence[str], body: ResponseRequest) -> tuple[ResponseRequest, int]:
    """The request without what the patterns match in its head, and how much was taken out."""
    if not patterns:
        return body, 0
    found = 0

    def clean(text: str) -> str:
        nonlocal found
        for pattern in patterns:
            text, count = re.subn(pattern, "", text)
            found += count
        return text

    changes: dict[str, Any] = {}
    if body.instructions:
        changes["instructions"] = clean(body.instructions)
    if not isinstance(body.input, str):
        items = list(body.input)
        for number, item in enumerate(items):
            if not isinstance(item, MessageItem) or item.role not in ("system", "developer"):
                break
            content = item.content
            items[number] = item.model_copy(
                update={
                    "content": clean(content)
                    if isinstance(content, str)
                    else [
                        part.model_copy(update={"text": clean(part.text)})
                        if isinstance(part, TextPart)
                        else part
                        for part in content
                    ]
                }
            )
        changes["input"] = items
    return (body.model_copy(update=changes), found) if found else (body, 0)


def describe(
    backend: Backend, owner: str, session: str | None, past: Sequence[int], fields: dict[str, Any]
) -> None:
    """Add to a new job's fields what its client has changed in the head, if that costs anything.

    `past`: token ids of the turn that the request continues, empty where there is none.
    """
    ids = fields["prompt_ids"]
    held = fields["held_tokens"]
    if len(ids) - held < COST:
        return
    candidates = [past] if past else []
    with contextlib.suppress(RedisError, StoreError, Fault, JobError):
        candidates += _latest(backend, owner, session)
    best: dict[str, Any] | None = None
    for old in candidates:
        change = compare(backend.tokenizer, old, ids)
        if change is not None and (best is None or change["cost_tokens"] > best["cost_tokens"]):
            best = change
    if best is not None and best["cost_tokens"] >= COST:
        fields["request"]["prompt"]["head"] = best


def compare(tokenizer: Tokenizer, old: Sequence[int], new: Sequence[int]) -> dict[str, Any] | None:
    """What differs in the head of two prompts with the same tail, or None.

    `changed_at`: the first token that differs; `was`, `now`: excerpts; `cost_tokens`: tokens after
    it that are equal and have to be computed all the same.
    """
    first = at = common_prefix(old, new)
    if at >= min(len(old), len(new)) or at > HEAD_SHARE * len(new):
        return None
    before = at
    cost = 0
    shown: tuple[int, int] | None = None
    while (step := _realign(old[before:], new[at:])) is not None:
        gone, come = step
        if shown is None:
            shown = gone, come
        before, at = before + gone, at + come
        alike = common_prefix(old[before:], new[at:])
        cost += alike
        before, at = before + alike, at + alike
    if shown is None:
        return None
    lead = max(0, first - 8)
    return {
        "changed_at": first,
        "was": _excerpt(tokenizer, old[lead : first + shown[0] + 2]),
        "now": _excerpt(tokenizer, new[lead : first + shown[1] + 2]),
        "cost_tokens": cost,
    }


def _realign(old: Sequence[int], new: Sequence[int]) -> tuple[int, int] | None:
    """How many tokens of each to pass over until both go on alike, or None."""
    places: dict[tuple[int, ...], int] = {}
    for j in range(min(CHANGE, max(0, len(new) - ALIKE)) + 1):
        window = tuple(new[j : j + ALIKE])
        if len(window) == ALIKE:
            places.setdefault(window, j)
    for i in range(min(CHANGE, max(0, len(old) - ALIKE)) + 1):
        found = places.get(tuple(old[i : i + ALIKE]))
        if found is not None and (i or found):
            return i, found
    return None


def _excerpt(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text = " ".join(tokenizer.decode(ids).split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def _latest(backend: Backend, owner: str, session: str | None) -> list[list[int]]:
    """Token ids of the latest requests of the session, else of the owner."""
    names: list[bytes] = []
    for key in _keys(owner, session):
        found: Any = backend.redis.lrange(key, 0, LATEST - 1)
        names += [name for name in found if name not in names]
    ids: list[list[int]] = []
    for name in names[:LATEST]:
        response = name.decode()
        if backend.deleted(response):
            continue
        turn: list[int] = []
        with contextlib.suppress(StoreError, Fault), backend.store() as store:
            turn = store.turn_ids(response)
        with contextlib.suppress(JobError):
            ids.append(turn or backend.jobs.prompt_ids(response))
    return ids


def remember(backend: Backend, owner: str, session: str | None, response: str) -> None:
    """A request was accepted: later ones are compared with it."""
    with contextlib.suppress(RedisError):
        pipe = backend.redis.pipeline(transaction=False)
        for key in _keys(owner, session):
            pipe.lpush(key, response)
            pipe.ltrim(key, 0, LATEST - 1)
            pipe.expire(key, KEEP)
        pipe.execute()


def _keys(owner: str, session: str | None) -> list[str]:
    keys = []
    for name in ([f"s{session}"] if session else []) + ["o"]:
        digest = hashlib.blake2b(digest_size=16, person=b"tandem-latest")
        digest.update(f"{len(owner)}:{owner}{name}".encode("utf-8", "replace"))
        keys.append(f"tandem:latest:{digest.hexdigest()}")
    return keys
