"""What an answer says, as events for its log and as output items: text, reasoning, calls.

Both follow from the parts and the token ids alone, in order. A retried decode therefore makes the
events of what was said before once more, and sends only those that the log does not hold. The ids
of a token stand in the first event that it leads to, so that a log that ends anywhere never holds
an event of a token that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from scheduler.api.items import Item, message_id, text_part

Kind = Literal["text", "thinking", "call"]
Piece = tuple[Kind, str, str]
"""(kind, text, name): a delta of text or thinking, or a whole call's arguments and function."""
Event = dict[str, Any]

ADDED = "response.output_item.added"
DONE = "response.output_item.done"
PART_ADDED = "response.content_part.added"
PART_DONE = "response.content_part.done"
_STREAMS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL = "response.function_call_arguments"


class Output:
    """The items of one response under way. `plain`: the answer is one message, whatever it says."""

    def __init__(self, response: str, *, plain: bool = True) -> None:
        self._response = response
        self._own = response.removeprefix("resp_")
        self._plain = plain
        self._open: Item | None = None
        self._items: list[Item] = []
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        self._space = ""  # white space that may stand before a call, and then is no message
        self._ids: list[int] = []  # of tokens that no event has told yet
        self._waiting: list[Any] = []  # their log probabilities
        self.reasoning_tokens = 0
        self.recorded: list[list[Any]] = []
        """Log probabilities of the text deltas to come, where they were said before."""

    @property
    def text(self) -> str:
        """All text of messages so far."""
        parts = [part["text"] for item in self._items if "role" in item for part in item["content"]]
        if self._open is not None and "role" in self._open:
            parts += self._text
        return "".join(parts)

    def say(
        self, pieces: Iterable[Piece], ids: Sequence[int] = (), logprobs: Sequence[Any] = ()
    ) -> list[Event]:
        """The events of what a token adds; none while nothing can be told."""
        self._ids += ids
        self._waiting += logprobs
        events: list[Event] = []
        for kind, text, name in pieces:
            if kind == "call":
                self._call(events, name, text)
            elif kind == "thinking":
                self._go_on(events, "reasoning", text)
            elif text.strip() or self._plain or self._is_open("message"):
                text, self._space = self._space + text, ""
                self._go_on(events, "message", text)
            else:
                self._space += text
        if self._is_open("reasoning"):
            self.reasoning_tokens += len(ids)
        if not events and self._ids and (self._is_open("message") or self._is_open("reasoning")):
            assert self._open is not None
            self._go_on(events, self._open["type"], "")
        return self._told(events)

    def close(self, status: str) -> list[Event]:
        """The events that end the answer; the item that it breaks off in has its `status`."""
        events: list[Event] = []
        if self._space and not self._items and self._open is None:
            self._go_on(events, "message", self._space)
        if self._open is None and not self._items:
            self._go_on(events, "message", "")
        self._end(events, status)
        return self._told(events)

    def items(self) -> list[Item]:
        """The finished items, as they are stored and shown."""
        return self._items

    def result(self, finish: str) -> dict[str, Any]:
        """What the job's record keeps: the bare text where that is all there is."""
        text = {"text": self.text, "finish": finish}
        items = self._items
        if len(items) == 1 and "role" in items[0] and not items[0]["content"][0]["logprobs"]:
            return text
        return {**text, "items": items}

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _told(self, events: list[Event]) -> list[Event]:
        if events and self._ids:
            events[0]["ids"], self._ids = self._ids, []
            self._waiting = []
        return events

    def _at(self) -> Event:
        """Where the open item stands; nothing for the first message, which goes without saying."""
        assert self._open is not None
        index = len(self._items)
        if not index and self._open["id"] == message_id(self._response):
            return {}
        return {"output_index": index, "item_id": self._open["id"]}

    def _begin(self, events: list[Event], item: Item) -> None:
        self._end(events, "completed")
        self._open = item
        event: Event = {"type": ADDED}
        if at := self._at():
            event |= {"output_index": at["output_index"], "item": dict(item)}
        events.append(event)

    def _go_on(self, events: list[Event], kind: Literal["message", "reasoning"], text: str) -> None:
        index = len(self._items) + (self._open is not None)
        if not self._is_open(kind):
            if kind == "message":
                first = not any("role" in item for item in self._items)
                ident = message_id(self._response) + ("" if first else f"_{index}")
                item: Item = {"id": ident, "type": "message", "role": "assistant"}
                self._begin(events, {**item, "status": "in_progress", "content": []})
                events.append({"type": PART_ADDED, **self._at()})
            else:
                item = {"id": f"rs_{self._own}_{index}", "type": "reasoning", "summary": []}
                self._begin(events, {**item, "status": "in_progress", "content": []})
                part = {"type": "reasoning_text", "text": ""}
                events.append({"type": PART_ADDED, **self._at(), "part": part})
        self._text.append(text)
        event: Event = {"type": f"{_STREAMS[kind]}.delta", "delta": text, **self._at()}
        if kind == "reasoning":
            event["content_index"] = 0
        elif self.recorded:
            self._waiting = self.recorded.pop(0)
        if kind == "message" and self._waiting:
            event["logprobs"] = self._waiting
            self._logprobs += self._waiting
            self._waiting = []
        events.append(event)

    def _call(self, events: list[Event], name: str, arguments: str) -> None:
        index = len(self._items) + (self._open is not None)
        item = {
            "id": f"fc_{self._own}_{index}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{self._own}_{index}",
            "name": name,
            "arguments": "",
        }
        self._space = ""
        self._begin(events, item)
        self._text.append(arguments)
        events.append({"type": f"{_CALL}.delta", "delta": arguments, **self._at()})

    def _end(self, events: list[Event], status: str) -> None:
        """Finish the open item."""
        item = self._open
        if item is None:
            return
        text, at = "".join(self._text), self._at()
        done = {**item, "status": status}
        if item["type"] == "function_call":
            # A call is told once it is whole.
            done |= {"status": "completed", "arguments": text}
            events.append({"type": f"{_CALL}.done", "arguments": text, "name": item["name"], **at})
        elif item["type"] == "reasoning":
            done["content"] = [{"type": "reasoning_text", "text": text}]
            told = {**at, "content_index": 0}
            events.append({"type": f"{_STREAMS['reasoning']}.done", "text": text, **told})
            events.append({"type": PART_DONE, "part": done["content"][0], **told})
        else:
            part = text_part(text)
            extra: Event = {}
            if self._logprobs:
                part["logprobs"] = self._logprobs
                extra = {"logprobs": self._logprobs}
            done["content"] = [part]
            events.append({"type": f"{_STREAMS['message']}.done", "text": text, **at, **extra})
            shown: Event = {"part": part} if extra else {"text": text}
            events.append({"type": PART_DONE, **shown, **at})
        last: Event = {"type": DONE, "item": done, "output_index": len(self._items)}
        if not at and not self._logprobs:
            last = {"type": DONE, "text": text, "status": status}
        events.append(last)
        self._items.append(done)
        self._open, self._text, self._logprobs = None, [], []
