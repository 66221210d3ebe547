"""Server-sent events as bytes; what stays the same from token to token is encoded once."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from scheduler.api.slices import Slice
from scheduler.api.view import EventView
from scheduler.record import Job

COMMENT = b": keep-alive\n\n"

encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Compact JSON."""

# What nobody else can have written into an event: drawn when the process begins.
_TEXT = secrets.token_hex(16)
_NUMBER = secrets.randbits(128) | 1 << 128
_TEXT_DELTA = "response.output_text.delta"


def frame(data: Mapping[str, Any]) -> bytes:
    """One server-sent event, with its name."""
    return f"event: {data['type']}\ndata: {encode(data)}\n\n".encode("utf-8", "replace")


class Spliced:
    """An event in which only a text and, perhaps, its number change.

    `make` gives the whole event for one text and one number, as it would be sent: the number, if
    there is one, before the text, and each once.
    """

    def __init__(self, make: Callable[[str, int], bytes]) -> None:
        before, self._tail = make(_TEXT, _NUMBER).decode().split(encode(_TEXT))
        head, *middle = before.split(str(_NUMBER))
        self._head = head
        self._middle = middle[0] if middle else None

    def __call__(self, text: str, number: int = 0) -> bytes:
        """The event with this text and this number."""
        where = "" if self._middle is None else f"{number}{self._middle}"
        return f"{self._head}{where}{encode(text)}{self._tail}".encode("utf-8", "replace")


class EventFrames:
    """A job's logged events as OpenAI's server-sent events, in order from the first.

    The same bytes as `frame` makes of what `EventView` renders.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._view = EventView(job)
        self._like: dict[str, Any] = {}
        self._order: tuple[str, ...] = ()
        self._spliced: Spliced | None = None

    def render(self, seq: int, data: Mapping[str, Any], ended: Job | None = None) -> bytes:
        """The event numbered `seq`; see `EventView.render`."""
        text = data.get("delta")
        if not isinstance(text, str) or data.get("logprobs"):
            return frame(self._view.render(seq, data, ended))
        like = {**data, "delta": "", "ids": None}
        order = tuple(data)  # of the fields: an event's bytes have it too
        if self._spliced is None or like != self._like or order != self._order:
            self._like, self._order = like, order
            self._spliced = Spliced(self._maker(data))
        if data["type"] == _TEXT_DELTA:
            self._view.hear(text)
        return self._spliced(text, seq)

    def render_slice(self, new: Slice) -> list[bytes]:
        """Of each event what `render` gives, none of them terminal; made once for all readers."""
        if new.told is None:
            heard = [str(d.get("delta", "")) for _, d in new if d["type"] == _TEXT_DELTA]
            new.told = [self.render(seq, data) for seq, data in new], "".join(heard)
        else:
            self._view.hear(new.told[1])
        return new.told[0]

    def _maker(self, data: Mapping[str, Any]) -> Callable[[str, int], bytes]:
        # A view of its own: the marks are no part of what was said.
        return lambda text, number: frame(
            EventView(self._job).render(number, {**data, "delta": text})
        )
