"""Where a prompt is likely to be changed: at the last of the user's messages.

A client that lets its user edit the last message, or sends it again with another question, repeats
all of the prompt before it. Where that ends in tokens is learnt from the chat template: what it
puts behind the last message is short, and holds no answer whose exact ids stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.api.prompt import messages_of, placed
from scheduler.api.said import Item, text_of
from scheduler.api.tokenizer import TemplateError, Tokenizer
from scheduler.images import parts_of

LEAST_TOKENS = 256
"""Less before a message is computed again rather than found again."""
_MARK = "Q0edited9b3f61d7e2Q"


def before_last(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    items: Sequence[Item],
    held: int = 0,
    *,
    instructions: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Leading ids of the prompt of `items` that stand before its last user message, or a token or
    two less; 0 where that is few beyond the `held` that have a state, or cannot be told."""
    if len(ids) - held <= LEAST_TOKENS:
        return 0
    at = max((i for i, item in enumerate(items) if _is_users(item)), default=-1)
    if at < 0 or any(any(parts_of([item])) for item in items[at:]):
        return 0  # an image has other ids in the prompt than the template writes
    message = items[at]
    text = text_of(message.get("content") or "", "\n")
    marked = [*items[:at], {**message, "content": _MARK}, *items[at + 1 :]]
    try:
        messages = placed(tokenizer, messages_of(marked, instructions))
        shown = tokenizer.render(messages, tools=tools, options=options)
    except TemplateError:
        return 0
    place = shown.text.rfind(_MARK)
    if place < 0:
        return 0
    rest = tokenizer.encode(shown.cut(place + len(_MARK)))
    before = len(ids) - len(tokenizer.encode_text(text)) - len(rest)
    return before if before - held >= LEAST_TOKENS else 0


def _is_users(item: Item) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"
