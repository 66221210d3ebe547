"""From tokens to what they mean: text, thinking and tool calls of one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.names import SEEN
from engine.parts import Part, Parts
from engine.rows import Event
from engine.text import REPLACEMENT, TextStream
from scheduler.api.output import Piece
from scheduler.record import Job

_TAIL = 16  # tokens at the prompt's end that may hold the mark that opens thinking


class Reader:
    """How one job's tokens are read. `plain`: they are text, whatever they say."""

    def __init__(self, job: Job, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        template = template_of(tokenizer)
        tools = job.request.get("tools") or ()
        parts = Parts(template, tools)
        opening, closing = parts.thinking_marks
        self.thinking = bool(opening) and self._ends_with(job.prompt_ids, opening)
        if self.thinking:
            parts = Parts(template, tools, thinking=True)
        self._parts = parts if parts.marks else None
        self._special = bool(specials(tokenizer).intersection(parts.marks))
        self._closing = closing

    @property
    def plain(self) -> bool:
        """Whether the answer can be nothing but one text."""
        return self._parts is None

    def stream(self) -> TextStream:
        """A new stream of this answer's text."""
        return TextStream(self._tokenizer, self._stop, special=self._special)

    def thought(self) -> int | None:
        """The token that ends the thinking which the prompt has begun, if one token does."""
        if not self.thinking:
            return None
        ids = self._tokenizer.encode(self._closing, add_special_tokens=False)
        return int(ids[0]) if len(ids) == 1 else None

    def read(self, text: str, *, end: bool = False) -> list[Piece]:
        """The pieces that become certain with `text`, and at the answer's `end` all of them."""
        if self._parts is None:
            return [("text", text, "")]
        found = self._parts.push(text)
        if end:
            found += self._parts.finish()
        return [_piece(part) for part in found]

    def _ends_with(self, ids: Sequence[int], mark: str) -> bool:
        last = [token for token in ids[-_TAIL:] if token < SEEN]
        tail = self._tokenizer.decode(last, skip_special_tokens=False)
        return str(tail).rstrip().endswith(mark)


def template_of(tokenizer: Any) -> str:
    """The chat template that shows how calls are written."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return str(template or "")


def specials(tokenizer: Any) -> frozenset[str]:
    """Spellings of the tokens that are left out of text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(str(token.content) for token in added.values() if token.special)


def _piece(part: Part) -> Piece:
    return part.kind, part.text, part.name


# --- log probabilities --------------------------------------------------------------------------


def logprobs_of(event: Event, tokenizer: Any) -> list[dict[str, Any]]:
    """The log probability of an event's token, in OpenAI's shape; empty where none was asked."""
    if event.token is None or event.logprob is None:
        return []
    top = [_told(token, value, tokenizer) for token, value in event.top]
    return [{**_told(event.token, event.logprob, tokenizer), "top_logprobs": top}]


def _told(token: int, logprob: float, tokenizer: Any) -> dict[str, Any]:
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    # What a mask or a bias forbids has no probability: JSON has no infinity.
    return {
        "token": text,
        "bytes": _bytes(token, text, tokenizer),
        "logprob": max(logprob, -9999.0),
    }


def _bytes(token: int, text: str, tokenizer: Any) -> list[int]:
    """A token's bytes, also where they are no whole character."""
    if REPLACEMENT not in text:
        return list(text.encode())
    spelling = str(tokenizer.convert_ids_to_tokens(token))
    if len(spelling) == 6 and spelling.startswith("<0x"):
        return [int(spelling[3:5], 16)]
    found = [_BYTES.get(char) for char in spelling]
    return [byte for byte in found if byte is not None] if None not in found else []


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as (as GPT-2 does)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    found = {chr(byte): byte for byte in shown}
    return found | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()
