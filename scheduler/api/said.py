"""What items say, and whether a template's words for an answer stand for what was generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]


def text_of(content: Any, between: str = "\n") -> str:
    """The text of a message's content: a string, or text parts joined by `between`."""
    if isinstance(content, str):
        return content
    parts = (p.get("text") or p.get("refusal") or "" for p in content if isinstance(p, Mapping))
    return between.join(parts)


def says(rendered: str, generated: str, answer: Sequence[Item]) -> bool:
    """Whether the template's words for an answer stand for the text that the model generated.

    A template may trim white space around an answer; the model's own tokens stand. Calls and
    thinking are laid out anew by templates; what was read from the model's text must all be there.
    """
    if rendered.strip() == generated.strip():
        return True
    if all(item.get("type", "message") == "message" for item in answer):
        return False
    if "".join(rendered.split()) == "".join(generated.split()):
        return True
    at = 0
    for item in answer:
        kind = item.get("type", "message")
        told = str(item.get("name")) if kind == "function_call" else text_of(item.get("content"))
        found = rendered.find(told.strip(), at)
        if found < 0:
            return False  # thinking that the template leaves out, for example
        at = found + len(told.strip())
    return True
