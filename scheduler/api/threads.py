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
from bisect import bisect_right
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
        digest = digest_of(messages_of(items, instructions), self._model, extra)
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
            asked = items[before[bisect_right(before, start) - 1] : start]
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
        return f"tandem:asked:{digest_of(messages, self._model, extra)}"

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
        # A conversation may have thousands of answers: nothing of it is looked at once for each.
        past, done = Past(self._model, instructions, extra), 0
        for start, _ in seams:
            past.add(items[done:start])
            done = start
            pipe.lrange(_key(past.digest()), 0, -1)
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


class Past:
    """The digest of messages whose items are given bit by bit, as `digest_of` has it of all.

    However often it is asked for, each message is hashed once, and once more while it is the last.
    """

    def __init__(self, model: str, instructions: str | None, extra: Any = None) -> None:
        self._messages = Messages(instructions)
        self._state = _seed(model, extra)  # over the messages that no longer change
        self._final = -1  # how many of the others these are, after the system message
        self._leading = _hash(_SYSTEM[0])
        self._told = 0  # texts of the system message that are hashed

    def add(self, items: Sequence[Item]) -> None:
        """Further items."""
        self._messages.add(items)

    def digest(self) -> str:
        """The digest of all messages so far."""
        rest = self._messages.rest
        if self._final < 0:
            state = self._begun()
            if not rest:
                return str(state.hexdigest())
            self._state, self._final = state, 0
        for message in rest[self._final : -1]:
            self._state.update(_digest(message))
        self._final = len(rest) - 1
        state = self._state.copy()
        state.update(_digest(rest[-1]))
        return str(state.hexdigest())

    def _begun(self) -> Any:
        """The digest of the system message, whose texts are hashed as the JSON of it has them."""
        state = self._state.copy()
        for text in self._messages.leading[self._told :]:
            between = "\\n\\n" if self._told else ""
            self._leading.update(_bytes(between + json.dumps(text, ensure_ascii=False)[1:-1]))
            self._told += 1
        if self._told:
            whole = self._leading.copy()
            whole.update(_bytes(_SYSTEM[1]))
            state.update(whole.digest())
        return state


_SYSTEM = ('{"content": "', '", "role": "system"}')
"""What stands around a system message's text, as `_digest` writes it."""


def digest_of(messages: Sequence[Message], model: str, extra: Any = None) -> str:
    """The digest of messages for this model; `extra`: what else shapes the prompt."""
    state = _seed(model, extra)
    for message in messages:
        state.update(_digest(message))
    return str(state.hexdigest())


def _seed(model: str, extra: Any) -> Any:
    return _hash(json.dumps([model, extra], sort_keys=True, default=str))


def _digest(message: Message) -> bytes:
    text = json.dumps(_content(message), sort_keys=True, ensure_ascii=False, default=str)
    return bytes(_hash(text).digest())


def _hash(text: str) -> Any:
    return hashlib.blake2b(_bytes(text), digest_size=16)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _key(digest: str) -> str:
    return f"tandem:thread:{digest}"
