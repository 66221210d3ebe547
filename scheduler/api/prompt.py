"""From items to token ids: the prompt of a first turn, and of a turn that continues another.

Token ids are the truth. The ids of a turn that continues another are the parent's ids, exactly
as they went through the model, followed by the ids of the text that the chat template puts
between the parent's answer and the next generation prompt. Stored text is never tokenised again
to find a conversation; it is rendered only to learn that text and to check that the template
would have placed the answer where the parent's ids have it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.api import weave
from scheduler.api.said import Item, text_of
from scheduler.api.summary import unseal
from scheduler.api.tokenizer import Message, Rendering, TemplateError, Tokenizer
from scheduler.api.weave import Answer, marked
from scheduler.images import parts_of

_ANSWER = "Q0answer4d1e7a9b0Q"
"""Stands where an assistant's answer goes while the text around it is learnt."""

Encode = Callable[[Rendering, Sequence[Item], Callable[[Rendering], Rendering | None]], list[int]]
BEFORE = "A summary of what was said and done before:"


@dataclass(frozen=True, slots=True)
class Parent:
    """The turn that a new turn continues.

    `items` are all items of the conversation before the parent's answer, oldest first; `answer`
    are the parent's output items; `ids` its full token ids, prompt and answer; `generated` how
    many of them, at the end, the model produced. `instructions`, `tools` and `options` are those
    that the parent's prompt was rendered with.
    """

    items: Sequence[Item]
    answer: Sequence[Item]
    ids: Sequence[int]
    generated: int
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a turn's prompt.

    `rebased` is False where `ids` begin with all of the parent's ids. `shared` is the number of
    leading ids equal to the parent's. `dropped`: items that were left out because they did not fit.
    """

    ids: list[int]
    shared: int
    rebased: bool
    dropped: int = 0

    @property
    def delta(self) -> list[int]:
        """What the turn's record keeps: the ids beyond the parent's, or all when rebased."""
        return self.ids if self.rebased else self.ids[self.shared :]


def build(
    tokenizer: Tokenizer,
    items: Sequence[Item],
    *,
    instructions: str | None = None,
    parent: Parent | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    answers: Sequence[Answer] = (),
    most: int | None = None,
) -> Prompt:
    """The prompt of a turn whose own input is `items`, in which `answers` are known.

    Instructions are this turn's alone: another turn's are replaced, never added to. Raises
    TemplateError where the chat template refuses the messages, and TooLong where it is certain,
    before the text is tokenised, that the prompt has `most` tokens or more.
    """

    def render(messages: Sequence[Message]) -> Rendering:
        return tokenizer.render(placed(tokenizer, messages), tools=tools, options=options)

    opening = _opening(tokenizer, tools, options) if answers else ""

    def encode(
        plain: Rendering, past: Sequence[Item], around: Callable[[Rendering], Rendering | None]
    ) -> list[int]:
        def with_marks(known: Sequence[Answer]) -> Rendering | None:
            return around(render(messages_of([*past, *marked(items, known)], instructions)))

        return weave.encode(tokenizer, plain, with_marks, answers, opening, most)

    if parent is None:
        whole = render(messages_of(items, instructions))
        return Prompt(encode(whole, (), lambda text: text), 0, False)
    whole = render(messages_of([*parent.items, *parent.answer, *items], instructions))
    spliced = _splice(tokenizer, render, items, instructions, parent, whole, encode)
    if spliced is not None:
        return spliced
    ids = encode(whole, [*parent.items, *parent.answer], lambda text: text)
    return Prompt(ids, common_prefix(ids, parent.ids), True)


def _opening(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> str:
    """What the generation prompt writes of an answer that the template may not show later."""
    asked = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": _ANSWER}
    try:
        ends = tokenizer.render([asked], tools=tools, options=options).text
        shown = tokenizer.render([asked, said, asked], tools=tools, options=options).text
    except TemplateError:
        return ""
    head = shown.partition(_ANSWER)[0]
    return ends[len(head) :] if ends.startswith(head) else ""


def _splice(
    tokenizer: Tokenizer,
    render: Callable[[Sequence[Message]], Rendering],
    items: Sequence[Item],
    instructions: str | None,
    parent: Parent,
    whole: Rendering,
    encode: Encode,
) -> Prompt | None:
    """The parent's ids continued, or None where the template lays the conversation out anew."""
    if not parent.generated:
        return None
    answer = {"type": "message", "role": "assistant", "content": _ANSWER}
    try:
        around = render(messages_of([*parent.items, answer, *items], instructions))
    except TemplateError:
        return None  # it wants to see the calls that tools answer
    if around.text.count(_ANSWER) != 1:
        return None  # dropped, repeated or altered: or the client wrote our marker
    seam = around.text.index(_ANSWER)
    tail = around.text[seam + len(_ANSWER) :]
    head = tokenizer.render(
        placed(tokenizer, messages_of(parent.items, parent.instructions)),
        tools=parent.tools,
        options=parent.options,
    ).text
    if not whole.text.startswith(head) or not whole.text.endswith(tail):
        return None
    if len(whole.text) < len(head) + len(tail):
        return None
    generated = list(parent.ids[len(parent.ids) - parent.generated :])
    stopped = generated[-1] in tokenizer.eos_ids
    middle = whole.text[len(head) : len(whole.text) - len(tail)]
    spoken = generated[:-1] if stopped else generated
    if not weave.stands_for(tokenizer, middle, spoken, parent.answer):
        return None
    kept = list(parent.ids)
    rest = around.cut(seam + len(_ANSWER))
    spelling = ""
    if stopped:
        spelling = tokenizer.decode(generated[-1:])
        if tail.startswith(spelling) and not any(start == 0 for start, _ in rest.literals):
            rest = rest.cut(len(spelling))
        else:
            # The model ended its turn by another token than the template writes there. It is
            # the pending one, in no state yet, so it can be left out.
            kept.pop()
            spelling = ""

    def behind(text: Rendering) -> Rendering | None:
        at = text.text.find(_ANSWER) + len(_ANSWER)
        return text.cut(at + len(spelling)) if text.text[at:].startswith(spelling) else None

    ids = encode(rest, [*parent.items, answer], behind)
    return Prompt(kept + ids, len(kept), len(kept) < len(parent.ids))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def messages_of(items: Sequence[Item], instructions: str | None = None) -> list[Message]:
    """Chat messages, as templates take them, of items of the Responses API.

    Leading system and developer messages become one system message after `instructions`.
    Function calls and reasoning join the assistant message they belong to.
    """
    made = Messages(instructions)
    made.add(items)
    return made.all()


class Messages:
    """The messages of `messages_of`, for items that are given bit by bit.

    `leading`: the texts of the system message, which grow only until there is another one.
    `rest`: the others, of which only the last may still change. Both are to be read only.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self.leading = [instructions] if instructions else []
        self.rest: list[Message] = []

    def all(self) -> list[Message]:
        """Those of all items so far."""
        if not self.leading:
            return list(self.rest)
        return [{"role": "system", "content": "\n\n".join(self.leading)}, *self.rest]

    def add(self, items: Sequence[Item]) -> None:
        """Further items."""
        messages = self.rest
        for item in items:
            kind = item.get("type", "message")
            if kind == "function_call":
                _assistant(messages).setdefault("tool_calls", []).append(_call(item))
            elif kind == "function_call_output":
                told = {"tool_call_id": item.get("call_id")}
                messages.append(
                    {"role": "tool", **told, "content": text_of(item.get("output", ""))}
                )
            elif kind == "reasoning":
                text = text_of(item.get("content") or item.get("summary") or "")
                if text:
                    messages.append({"role": "assistant", "content": "", "reasoning_content": text})
            elif kind == "compaction":
                summary = f"{BEFORE}\n\n{unseal(str(item['encrypted_content']))}"
                messages.append({"role": "user", "content": summary})
            elif kind == "message":
                self._say(item)

    def _say(self, item: Item) -> None:
        messages = self.rest
        role = "system" if item["role"] == "developer" else str(item["role"])
        text = text_of(item.get("content") or "", "" if role == "assistant" else "\n")
        if role == "system" and not messages:
            self.leading.append(text)
        elif role == "assistant" and _open(messages):
            messages[-1]["content"] = text
        elif role == "user" and any(parts_of([item])):
            messages.append({"role": role, "content": [_part(p) for p in item["content"]]})
        else:
            messages.append({"role": role, "content": text})


def placed(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    """The messages as the template shows all of them: where it leaves out system messages that
    come after the first, or refuses them, they are the user's."""
    first, rest = list(messages[:1]), messages[1:]
    if all(m["role"] != "system" for m in rest) or tokenizer.late_system:
        return [*first, *rest]
    return [*first, *({**m, "role": "user"} if m["role"] == "system" else m for m in rest)]


def is_empty(items: Sequence[Item]) -> bool:
    """True where the items say nothing: no text but white space and no function's output."""
    return not any(
        item.get("type", "message") in ("function_call_output", "compaction")
        or text_of(item.get("content") or "").strip()
        or any(parts_of([item]))
        for item in items
    )


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message with images, as templates take it; an image has its digest beside it."""
    if part.get("type") != "input_image":
        return {"type": "text", "text": part.get("text") or ""}
    url = str(part.get("image_url"))
    return {"type": "image", "key": hashlib.blake2b(url.encode(), digest_size=16).hexdigest()}


def _open(messages: Sequence[Message]) -> bool:
    """True where the last message is an assistant's that has no text yet (only reasoning)."""
    return bool(messages) and (
        messages[-1]["role"] == "assistant"
        and not messages[-1]["content"]
        and "tool_calls" not in messages[-1]
    )


def _assistant(messages: list[Message]) -> Message:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: Item) -> dict[str, Any]:
    return {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item.get("name"), "arguments": _arguments(item.get("arguments"))},
    }


def _arguments(text: Any) -> Any:
    """Arguments as templates expect them: an object; text that is none stays text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
