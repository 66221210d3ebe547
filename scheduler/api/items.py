"""Items: what a response takes in and gives out, as OpenAI's clients know them.

Ids of a response's own output items are derived from the response's id, so that a stream, its
replay and the stored record name the same item.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id such as msg_<32 hex digits>."""
    return f"{prefix}_{uuid.uuid4().hex}"


def message_id(response: str) -> str:
    """Id of the message that `response` writes."""
    return "msg_" + response.removeprefix("resp_")


def text_part(text: str) -> Item:
    """A content part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def answer(response: str, text: str, status: str = "completed") -> Item:
    """The message that `response` wrote; `status`: completed, incomplete or in_progress."""
    content = [] if status == "in_progress" else [text_part(text)]
    return {
        "id": message_id(response),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def output_items(response: str, output: Mapping[str, Any] | None, status: str) -> list[Item]:
    """Output items of a run whose worker reported `output`: {"text": ...} or {"items": [...]}.

    Empty where nothing was written.
    """
    if not output:
        return []
    if "items" in output:
        return [dict(item) for item in output["items"]]
    text = str(output.get("text", ""))
    if not text and status not in ("completed", "incomplete"):
        return []
    return [answer(response, text, "completed" if status == "completed" else "incomplete")]


def split(response: str, items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """(input items, output items) of a turn that stores both in one list."""
    own = response.removeprefix("resp_")
    for i, item in enumerate(items):
        if own in str(item.get("id", "")):
            return list(items[:i]), list(items[i:])
    return list(items), []
