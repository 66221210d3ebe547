"""Function tools: what a request offers the model, and what it asks of the answer.

Templates take tools in Chat's form, {"type": "function", "function": {...}}; the Responses API has
the same fields one level higher. What is rendered is what is stored with the turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    """Whether functions may, must not or must be called.

    `name`: which one it must be; `allowed`: which ones it may be, where not all.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] = ()

    def told(self) -> Any:
        """In the terms of the Responses API."""
        if self.allowed:
            tools = [{"type": "function", "name": name} for name in self.allowed]
            return {"type": "allowed_tools", "mode": self.mode, "tools": tools}
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
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools", value), names)
    raise bad(
        "tool_choice is 'auto', 'none', 'required', {\"type\": \"function\", \"name\": ...} or "
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}',
        "tool_choice",
    )


def _allowed(value: Any, names: Sequence[str]) -> Choice:
    """Some of the tools, as either of OpenAI's APIs names them. Raises Fault."""
    mode = value.get("mode") if isinstance(value, Mapping) else None
    listed = value.get("tools") if isinstance(value, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise bad(
            "tool_choice.allowed_tools needs a mode ('auto' or 'required') and a list of tools",
            "tool_choice",
        )
    chosen = []
    for one in listed:
        inner = one.get("function", one) if isinstance(one, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if name not in names:
            raise bad("tool_choice allows a function that is not among the tools", "tool_choice")
        chosen.append(str(name))
    return Choice(mode, allowed=tuple(dict.fromkeys(chosen)))


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


def for_client(tools: Sequence[Mapping[str, Any]], strict: Sequence[str] = ()) -> list[Tool]:
    """Tools as the Responses API tells them; `strict`: those whose arguments follow the schema."""
    return [
        {
            "type": "function",
            "description": None,
            "strict": tool["function"]["name"] in strict,
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


def can_hold(tokenizer: Tokenizer) -> bool:
    """Whether calls between free text can be held to a grammar: their marks are tokens."""
    marks = {CALL_MARK, CALL_END}
    return calls_are_json(tokenizer.template) and marks <= tokenizer.added


def chosen(tools: Sequence[Tool], choice: Choice) -> list[Tool]:
    """The tools that may be called."""
    names = choice.allowed or ((choice.name,) if choice.name else None)
    return [tool for tool in tools if names is None or tool["function"]["name"] in names]


def loosened(
    tools: Sequence[Tool], strict: Sequence[str], problem: Callable[[str], str]
) -> list[Tool]:
    """The tools, with any object for arguments whose schema cannot be followed and need not be.

    `problem` tells what is wrong with a schema.
    """
    made: list[Tool] = []
    for tool in tools:
        function = tool["function"]
        if function["name"] not in strict and problem(guided(function["parameters"])):
            function = {**function, "parameters": {"type": "object"}}
        made.append({**tool, "function": function})
    return made


def free_rules(tokenizer: Tokenizer, tools: Sequence[Tool], *, several: bool) -> str:
    """A Lark grammar of free text with calls in it, at most one unless `several`."""
    rules = call_rules(tokenizer, tools, several=False)
    more = "*" if several else "?"
    return f"start: free (calls free){more}\nfree: /(.|\\n)*/\n{rules}"


def call_rules(tokenizer: Tokenizer, wanted: Sequence[Tool], *, several: bool) -> str:
    """Lark rules of which `calls` is one call, or with `several` one or more."""
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
