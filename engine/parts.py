"""An answer's text as what it means: plain text, thinking, tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_vlm.tools import SPECS, load_tool_module

from engine.text import overlap

# Pairs that models put around their thinking; the one whose mark is in the template counts.
THINKING = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MAX_CALL = 1 << 20  # characters of one tool call; a longer one is text


@dataclass(frozen=True)
class Part:
    """A piece of an answer. `text` is the delta, of a call its arguments as one JSON object."""

    kind: Literal["text", "thinking", "call"]
    text: str
    name: str = ""


class Parts:
    """Splits a stream of text into parts, whatever its chunks are.

    Tool calls are read by mlx-vlm's parser for the model's chat template; without tools, or where
    no parser knows the template, calls stay text. What is no valid call is text too: nothing that
    the model said is lost. Marks that are special tokens must be in the text: give `TextStream`
    `special=True`.
    """

    def __init__(
        self,
        template: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool = False,
    ) -> None:
        """`thinking`: the prompt itself ends inside the model's thinking.

        `tools` are function tools as chat templates take them ({"type", "function": {...}}).
        """
        self._open, self._close = next(
            (pair for pair in THINKING if pair[0] in template or pair[1] in template), ("", "")
        )
        self._parser: Any = None
        specs = [spec for spec in SPECS if spec.matches(template)]
        if tools and specs:
            self._parser = load_tool_module(max(specs, key=lambda spec: spec.priority).name)
        self._tools = list(tools)
        self._state: Literal["text", "thinking", "call"] = "thinking" if thinking else "text"
        self._held = ""
        self._trim = False  # line ends after a closing mark belong to the mark

    @property
    def marks(self) -> list[str]:
        """The marks that are looked for; without any, everything is text."""
        marks = [self._open, self._close]
        if self._parser is not None:
            marks += [self._parser.tool_call_start, self._parser.tool_call_end]
        return [mark for mark in marks if mark]

    @property
    def thinking_marks(self) -> tuple[str, str]:
        """What opens and what closes thinking; empty where this model has no such marks."""
        return self._open, self._close

    def push(self, text: str) -> list[Part]:
        """The parts that become certain with `text`."""
        self._held += text
        found: list[Part] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Part]:
        """What was held back: the beginning of a mark, or a call without its end."""
        found = self.push("")
        held, self._held = self._held, ""
        if self._state == "call":
            if not self._parser.tool_call_end and self._call(held, found):
                return found
            held = self._parser.tool_call_start + held
        if held:
            found.append(Part("thinking" if self._state == "thinking" else "text", held))
        self._state = "text"
        return found

    def _step(self, found: list[Part]) -> bool:
        """Go on to the next mark; False when more text is needed."""
        if self._trim:
            self._held = self._held.lstrip("\n")
            self._trim = not self._held
        if self._state == "call":
            return self._read_call(found)
        marks = [self._close] if self._state == "thinking" else [self._open]
        if self._state == "text" and self._parser is not None:
            marks.append(self._parser.tool_call_start)
        places = [(self._held.find(mark), mark) for mark in marks if mark]
        places = [place for place in places if place[0] >= 0]
        if not places:
            keep = max((overlap(self._held, mark) for mark in marks if mark), default=0)
            self._show(self._held[: len(self._held) - keep], found)
            self._held = self._held[len(self._held) - keep :]
            return False
        at, mark = min(places)
        self._show(self._held[:at], found)
        self._held = self._held[at + len(mark) :]
        if self._state == "thinking":
            self._state, self._trim = "text", True
        elif mark == self._open:
            self._state, self._trim = "thinking", True
        else:
            self._state = "call"
        return True

    def _read_call(self, found: list[Part]) -> bool:
        end = self._parser.tool_call_end or "\n"
        at = self._held.find(end)
        if at < 0:
            if len(self._held) <= MAX_CALL:
                return False
            body, self._held, ending = self._held, "", ""
        else:
            body, self._held, ending = self._held[:at], self._held[at + len(end) :], end
        self._state = "text"
        if not ending or not self._call(body, found):
            self._show(self._parser.tool_call_start + body + ending, found)
        else:
            self._trim = True
        return True

    def _call(self, body: str, found: list[Part]) -> bool:
        """Read the inside of a call; False where it is none."""
        try:
            parsed = self._parser.parse_tool_call(body.strip(), self._tools)
            calls = [
                Part("call", _arguments(call["arguments"]), str(call["name"]).strip())
                for call in (parsed if isinstance(parsed, list) else [parsed])
            ]
        except Exception:  # parsers raise whatever the model's text leads them to
            return False
        found += calls
        return bool(calls)

    def _show(self, text: str, found: list[Part]) -> None:
        if not text:
            return
        kind: Literal["text", "thinking"] = "thinking" if self._state == "thinking" else "text"
        if found and found[-1].kind == kind:
            text = found.pop().text + text
        found.append(Part(kind, text))


def _arguments(value: Any) -> str:
    """Arguments as JSON text; raises `ValueError` when they are no JSON object."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not isinstance(json.loads(text), dict):
        raise ValueError("arguments are not an object")
    return text
