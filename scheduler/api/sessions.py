"""Sessions that agents name in headers: they steer node and retention, and say nothing of who asks.

A new conversation of a session goes to the decode node of the session's latest one, and the state
of the latest turn counts as used whenever the session asks anything, so that it is not the first to
be evicted while a side question runs. What a session may see and share is as without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.faults import Fault
from scheduler.api.schema import ResponseRequest
from scheduler.homes import takes_new
from store.errors import StoreError

HEADERS = ("x-claude-code-session-id", "session-id", "x-session-id")
"""Looked for in this order; after them `prompt_cache_key`."""
MAX_NAME = 256
KEEP = 86_400
"""Seconds for which a session's node and latest turn are remembered."""
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


def session_of(headers: Mapping[str, str], body: ResponseRequest) -> str | None:
    """The session that a request names, or None."""
    names = [headers.get(name) for name in HEADERS] + [body.prompt_cache_key]
    for name in names:
        plain = _UNPRINTABLE.sub("", name or "").strip()[:MAX_NAME]
        if plain:
            return plain
    return None


def steer(backend: Backend, owner: str, session: str | None, fields: dict[str, Any]) -> None:
    """Choose the node of a new job's fields, and keep what the session had last."""
    if session is None:
        return
    with contextlib.suppress(RedisError):
        known = backend.redis.hgetall(key_of(owner, session))
        node, turn = (_text(known, name) for name in (b"node", b"turn"))
        ready = {node.name for node in backend.present() if takes_new(node)}
        free = not fields["held_tokens"] and fields["previous"] is None and not fields["home"]
        if node in ready and free:
            fields["node"] = node
        if turn and turn != fields["previous"]:
            with contextlib.suppress(StoreError, Fault), backend.store() as store:
                store.touch(turn)


def note(backend: Backend, owner: str, session: str | None, response: str, node: str) -> None:
    """Remember what the session asked last, and where."""
    if session is None:
        return
    with contextlib.suppress(RedisError):
        pipe = backend.redis.pipeline(transaction=False)
        pipe.hset(key_of(owner, session), mapping={"node": node, "turn": response})
        pipe.expire(key_of(owner, session), KEEP)
        pipe.execute()


def key_of(owner: str, session: str) -> str:
    """The key under which a session of an owner is remembered."""
    digest = hashlib.blake2b(digest_size=16, person=b"tandem-session")
    digest.update(f"{len(owner)}:{owner}{session}".encode("utf-8", "replace"))
    return f"tandem:session:{digest.hexdigest()}"


def _text(known: Any, name: bytes) -> str:
    return bytes(known.get(name, b"")).decode("utf-8", "replace")
