"""How many of a prompt's tokens are a preamble that other conversations are likely to share.

That is what stands before the first user's words: instructions, system messages, descriptions of
tools. Where it ends in tokens is learnt from the chat template, and compared with the prompt.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from scheduler.api.prompt import common_prefix, messages_of
from scheduler.api.said import Item
from scheduler.api.tokenizer import TemplateError, Tokenizer

LEAST_TOKENS = 64
"""A shorter one is not worth a state of its own."""
_KEPT = 32
_MARK = "Q0question5c2a8e3f0Q"


class Preambles:
    """Token ids of the latest preambles, so that each is rendered once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(
        self,
        ids: Sequence[int],
        items: Sequence[Item],
        *,
        instructions: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> int:
        """Leading ids of the prompt of `items` that are its preamble; 0 where it is short."""
        first = list(takewhile(_is_preamble, items))
        if not (first or instructions or tools):
            return 0
        told = json.dumps([first, instructions, tools, options], default=str).encode()
        key = hashlib.blake2b(told, digest_size=16).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:
            known = self._rendered(first, instructions, tools, options)
            with self._lock:
                self._known[key] = known
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        count = common_prefix(known, ids)
        return count if count >= LEAST_TOKENS else 0

    def _rendered(
        self,
        first: list[Item],
        instructions: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> list[int]:
        question = {"type": "message", "role": "user", "content": _MARK}
        messages = messages_of([*first, question], instructions)
        try:
            rendering = self._tokenizer.render(messages, tools=tools, options=options)
        except TemplateError:
            return []
        at = rendering.text.find(_MARK)
        return [] if at <= 0 else self._tokenizer.encode(rendering.cut(0, at))


def _is_preamble(item: Item) -> bool:
    return item.get("type", "message") == "message" and item.get("role") in ("system", "developer")
