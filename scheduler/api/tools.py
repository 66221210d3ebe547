"""Function tools: what a request offers the model, and what it asks of the answer.

Templates take tools in Chat's form, {"type": "function", "function": {...}}; the Responses API has
the same fields one level higher. What is rendered is what is stored with the turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.api.faults import bad
from scheduler.api.tokenizer import Tokenizer

Tool = dict[str, Any]
MAX_TOOLS = 512
CALL_MARK = "<tool_call>"
CALL_END = "</tool_call>"
FORBIDDEN = -1e4
"""Added to the logit of a token that must not come."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether functions may, must not or must be called; `name`: which one it must be."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None

    def told(self) -> Any:
        """In the terms of the Responses API."""
        return {"type": "function", "name": self.name} if self.name else self.mode


def choice_of(value: Any, tools: Sequence[Tool]) -> Choice:
    """A request's tool_choice, in the form of either of OpenAI's APIs. Raises Fault."""
    names = [tool["function"]["name"] for tool in tools]
    if value is None or value == "auto":
        return Choice()
    if value == "none":
        return Choice("none")
    if value == "required":
        if not tools:
            raise bad("tool_choice asks for a call, but there are no tools", "tool_choice")
        return Choice("required")
    if isinstance(value, Mapping) and value.get("type") == "function":
        inner = value.get("function")
        name = inner.get("name") if isinstance(inner, Mapping) else value.get("name")
        if name not in names:
            raise bad("tool_choice names a function that is not among the tools", "tool_choice")
        return Choice("required", name)
    raise bad(
        "tool_choice is 'auto', 'none', 'required' or {\"type\": \"function\", \"name\": ...}",
        "tool_choice",
    )


def for_template(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools of the Responses API as chat templates take them. Raises Fault for equal names."""
    made: list[Tool] = []
    for tool in tools:
        function = {k: tool[k] for k in ("name", "description", "parameters") if tool.get(k)}
        function.setdefault("parameters", {"type": "object", "properties": {}})
        made.append({"type": "function", "function": function})
    names = [tool["function"]["name"] for tool in made]
    if len(set(names)) < len(names):
        raise bad("two tools have the same name: rename one", "tools")
    return made


def for_client(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools as the Responses API tells them."""
    return [
        {
            "type": "function",
            "description": None,
            "strict": False,
            **tool["function"],
        }
        for tool in tools
    ]


def takes_tools(template: str) -> bool:
    """Whether a chat template shows tools to its model at all."""
    return "tools" in template


def calls_are_json(template: str) -> bool:
    """Whether calls are one JSON object each between two marks, so that one can be asked for."""
    return (
        CALL_MARK in template
        and "tool_call.name" in template
        and "<arg_key>" not in template
        and "<function=" not in template
    )


def forbidden_call(tokenizer: Tokenizer) -> int | None:
    """The token that every call begins with, if there is one."""
    if CALL_MARK not in tokenizer.template:
        return None
    ids = tokenizer.encode(CALL_MARK)
    return ids[0] if len(ids) == 1 else None


def call_rules(
    tokenizer: Tokenizer, tools: Sequence[Tool], choice: Choice, *, several: bool
) -> str:
    """Lark rules of which `calls` is one call, or with `several` one or more."""
    wanted = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    rules = []
    for number, tool in enumerate(wanted):
        function = tool["function"]
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f'call_{number}: {head} args_{number} "}}"')
        rules.append(f"args_{number}: %json {guided(function['parameters'])}")
    names = " | ".join(f"call_{number}" for number in range(len(wanted)))
    first, last = (_literal(tokenizer, mark) for mark in (CALL_MARK, CALL_END))
    more = ' ("\\n" call)*' if several else ""
    body = f'call: {first} "\\n" ({names}) "\\n" {last}'
    return "\n".join([f"calls: call{more}", body, *rules])


def guided(schema: Mapping[str, Any]) -> str:
    """A JSON schema for the grammar engine; white space between tokens cannot go on for ever."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": r"[ \n\t]{0,16}"}})


def _literal(tokenizer: Tokenizer, mark: str) -> str:
    # The grammar engine takes added tokens in angle brackets for special ones: without quotes.
    return mark if mark in tokenizer.added else json.dumps(mark)
