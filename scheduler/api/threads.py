"""Finding the turn that a request repeats and goes on from, when it names none.

Clients that keep no IDs send the whole conversation with every request. Each accepted turn is
entered under a digest of the messages it answers; a request is looked up by its messages before
each answer it repeats, the last answer first, and the answer itself is compared with the stored
one. So the token ids that were generated stand in for the client's own rendering of them, and
only what is new is computed. What is found is a hint: the prompt is checked by rendering.

Where the client has changed something that came earlier, answers are found one by one: by the
response that a tool call's id names, or by a digest of what stands between an answer and the one
before it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import redis

from scheduler.api.prompt import Messages, messages_of
from scheduler.api.said import Item
from scheduler.api.tokenizer import Message

_CALL_ID = re.compile(r"call_([0-9a-f]{32})_\d{1,6}")
KEEP = 8
"""Turns remembered for one past: regenerated answers and parallel branches."""


class Threads:
    """The index in Redis; entries live for `seconds`, as job records do."""

    def __init__(self, client: redis.Redis, model: str, seconds: float) -> None:
        self._client = client
        self._model = model
        self._seconds = int(seconds)

    def enter(
        self, response: str, items: Sequence[Item], instructions: str | None, extra: Any = None
    ) -> None:
        """Remember that `response` answers these items. `extra`: what else shapes the prompt."""
        digest = _State(self._model, extra).over(messages_of(items, instructions))
        pipe = self._client.pipeline(transaction=False)
        last = max((stop for _, stop in answers(items)), default=0)
        for key in (_key(digest), self._asked(items[last:], extra)):
            pipe.lpush(key, response)
            pipe.ltrim(key, 0, KEEP - 1)
            pipe.expire(key, self._seconds)
        pipe.execute()

    def writers(
        self, items: Sequence[Item], seams: Sequence[tuple[int, int]], extra: Any = None
    ) -> list[list[str]]:
        """For each answer items[start:stop], the turns that may have written it, best first."""
        pipe = self._client.pipeline(transaction=False)
        before = [0, *(stop for _, stop in answers(items))]
        for start, _ in seams:
            asked = items[max(stop for stop in before if stop <= start) : start]
            pipe.lrange(self._asked(asked, extra), 0, -1)
        found = cast("list[list[bytes]]", pipe.execute())
        return [
            list(dict.fromkeys([*_named(items[start:stop]), *(name.decode() for name in names)]))
            for (start, stop), names in zip(seams, found, strict=True)
        ]

    def _asked(self, items: Sequence[Item], extra: Any) -> str:
        """The key of what an answer answers alone; a system prompt before it does not count."""
        messages = messages_of(items)
        if messages and messages[0]["role"] == "system":
            del messages[0]
        return f"tandem:asked:{_State(self._model, extra).over(messages)}"

    def candidates(
        self, items: Sequence[Item], instructions: str | None, extra: Any = None
    ) -> Iterator[tuple[str, int, int]]:
        """(response, start, stop) of turns that may have written items[start:stop], best first."""
        seams = [
            (start, stop)
            for start, stop in answers(items)
            # Something must follow, or there is nothing to answer.
            if start > 0 and stop < len(items)
        ]
        if not seams:
            return
        pipe = self._client.pipeline(transaction=False)
        state = _State(self._model, extra)
        # A conversation may have thousands of answers: nothing of it is looked at once for each.
        past, done = Messages(instructions), 0
        for start, _ in seams:
            past.add(items[done:start])
            done = start
            pipe.lrange(_key(state.over(past.all())), 0, -1)
        found = cast("list[list[bytes]]", pipe.execute())
        for (start, stop), names in reversed(list(zip(seams, found, strict=True))):
            for name in names:
                yield name.decode(), start, stop


def same_answer(sent: Sequence[Item], stored: Sequence[Item]) -> bool:
    """Whether the assistant's items that a client sent are those that were stored.

    White space at the ends of texts and the layout of arguments do not count; reasoning that the
    client left out does not either.
    """
    return bool(_said(sent) == _said(stored))


def _said(items: Sequence[Item]) -> Any:
    return [_content(message) for message in messages_of(items) if _content(message)]


def _named(items: Sequence[Item]) -> list[str]:
    """Responses that the ids of these items' calls name."""
    ids = (str(item.get("call_id")) for item in items if item.get("type") == "function_call")
    return ["resp_" + match.group(1) for ident in ids if (match := _CALL_ID.fullmatch(ident))]


def same_past(sent: Sequence[Message], stored: Sequence[Message]) -> bool:
    """Whether two lists of messages say the same, but for how calls and thinking are laid out."""
    return [_content(message) for message in sent] == [_content(message) for message in stored]


def _content(message: Message) -> Any:
    """What of a message counts: an assistant's comes back from clients in their own rendering."""
    if message["role"] != "assistant":
        return message
    text = str(message["content"]).strip()
    calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
    return ["assistant", text, calls] if text or calls else None


def _call(function: Mapping[str, Any]) -> tuple[str, Any]:
    arguments = function.get("arguments")
    try:
        value = arguments if isinstance(arguments, Mapping) else json.loads(str(arguments))
        arguments = json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        arguments = str(arguments)
    return str(function.get("name")), arguments


def answers(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of items that an assistant wrote."""
    start: int | None = None
    for i, item in enumerate([*items, {"type": "end"}]):
        kind = item.get("type", "message")
        written = kind in ("function_call", "reasoning") or (
            kind == "message" and item.get("role") == "assistant"
        )
        if written and start is None:
            start = i
        elif not written and start is not None:
            yield start, i
            start = None


class _State:
    """Digest of a list of messages, each of which is hashed once however often it is asked for."""

    def __init__(self, model: str, extra: Any) -> None:
        seed = json.dumps([model, extra], sort_keys=True, default=str)
        self._seed = hashlib.blake2b(seed.encode("utf-8", "replace"), digest_size=16)
        self._messages: list[Message] = []
        self._states: list[Any] = []

    def over(self, messages: Sequence[Message]) -> str:
        """The digest; cheap where `messages` begins as in the call before."""
        pairs = zip(self._messages, messages, strict=False)
        same = min(len(self._messages), len(messages))
        at = next((i for i, (a, b) in enumerate(pairs) if a is not b and a != b), same)
        del self._messages[at:], self._states[at:]
        state = (self._states[-1] if self._states else self._seed).copy()
        for message in messages[at:]:
            text = json.dumps(_content(message), sort_keys=True, ensure_ascii=False, default=str)
            state.update(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest())
            self._messages.append(message)
            self._states.append(state.copy())
        return str(state.hexdigest())


def _key(digest: str) -> str:
    return f"tandem:thread:{digest}"
