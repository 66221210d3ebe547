"""What a request asks of the answer's form: sampling, format, tools; checked before it is queued.

What is checked here becomes the job's `params`, which the decode worker reads, and the tools and
template options that its prompt is rendered with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.api.endless import endless
from scheduler.api.faults import bad
from scheduler.api.schema import Format, ResponseRequest
from scheduler.api.tokenizer import Tokenizer
from scheduler.api.tools import (
    FORBIDDEN,
    MAX_TOOLS,
    Choice,
    Tool,
    call_rules,
    calls_are_json,
    can_hold,
    choice_of,
    chosen,
    for_template,
    forbidden_call,
    free_rules,
    guided,
    loosened,
    takes_tools,
)
from scheduler.serializer import pack

MAX_BIAS = 1024
MAX_GRAMMAR = 1 << 18
"""Bytes of a JSON schema."""
MAX_PROPERTIES, MAX_OPTIONAL = 5000, 450
"""Of a schema in all, and of those that may be left out, in a row: a parser follows about 500, and
preparing many more takes it minutes, in which nobody else's answer goes on."""
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class Shaping:
    """The form of an answer. `tools` and `options` are what the template is given."""

    tools: list[Tool] | None = None
    options: dict[str, Any] | None = None
    params: dict[str, Any] = field(default_factory=dict)


def shape(tokenizer: Tokenizer, body: ResponseRequest) -> Shaping:
    """The form that a request asks for. Raises Fault 400 for what cannot be had."""
    params: dict[str, Any] = {}
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := getattr(body, name)) is not None:
            params[name] = value
    if body.logit_bias:
        params["logit_bias"] = _bias(tokenizer, body.logit_bias)
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        params["top_logprobs"] = body.top_logprobs or 0
    tools, choice = _tools(tokenizer, body)
    if tools is not None and choice.mode == "none":
        tools = _silenced(tokenizer, tools, params)
    if body.tools:
        params["tool_choice"] = choice.told()
    strict = [tool.name for tool in body.tools or () if tool.strict]
    if tools and strict and can_hold(tokenizer):
        params["strict"] = strict
    if body.parallel_tool_calls is False:
        params["parallel_tool_calls"] = False
    wanted = body.text.format if body.text else None
    grammar = _grammar(tokenizer, body, wanted, tools, choice)
    if wanted is not None and wanted.type != "text":
        params["format"] = wanted.model_dump(by_alias=True, exclude_none=True)
    if grammar is not None:
        params["grammar"] = grammar
    _check_plain(params, "text.format")
    return Shaping(tools, _options(tokenizer, body), params)


def _bias(tokenizer: Tokenizer, bias: Mapping[str, float]) -> dict[str, float]:
    if len(bias) > MAX_BIAS:
        raise bad(f"logit_bias has {len(bias)} entries: give at most {MAX_BIAS}", "logit_bias")
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad(f"logit_bias: '{token[:40]}' is no token id", "logit_bias")
        if int(token) >= tokenizer.vocab_size:
            raise bad(
                f"logit_bias names token {token}: the vocabulary has {tokenizer.vocab_size}",
                "logit_bias",
            )
        if not -100 <= value <= 100:
            raise bad("the values of logit_bias lie between -100 and 100", "logit_bias")
    return {str(int(token)): value for token, value in bias.items()}


def _tools(tokenizer: Tokenizer, body: ResponseRequest) -> tuple[list[Tool] | None, Choice]:
    sent = [tool.model_dump() for tool in body.tools or ()]
    if len(sent) > MAX_TOOLS:
        raise bad(f"there are {len(sent)} tools: give at most {MAX_TOOLS}", "tools")
    _check_plain(sent, "tools")
    tools = for_template(sent)
    choice = choice_of(body.tool_choice, tools)
    if not tools:
        return None, choice
    if not takes_tools(tokenizer.template):
        if choice.mode == "none":
            return None, choice
        raise bad(
            "this model's chat template knows no tools: leave them out, or choose another model",
            "tools",
            "unsupported_parameter",
        )
    return tools, choice


def _silenced(tokenizer: Tokenizer, tools: list[Tool], params: dict[str, Any]) -> list[Tool] | None:
    """Tools that must not be called: shown as before, so that the prompt's head stays the same,
    where the token that begins a call can be forbidden; not shown at all elsewhere."""
    token = forbidden_call(tokenizer)
    if token is None:
        return None
    params["logit_bias"] = {**params.get("logit_bias", {}), str(token): FORBIDDEN}
    return tools


def _grammar(
    tokenizer: Tokenizer,
    body: ResponseRequest,
    wanted: Format | None,
    tools: list[Tool] | None,
    choice: Choice,
) -> dict[str, str] | None:
    """The grammar that the answer is held to, or None."""
    schema: dict[str, Any] | None = None
    if wanted is not None and wanted.type == "json_object":
        schema = {"type": "object"}
    elif wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise bad("text.format has no schema", "text.format.schema")
        schema = wanted.json_schema
    calling = tools is not None and choice.mode != "none"
    forced = calling and choice.mode == "required"
    if schema is None and not forced:
        return _held(tokenizer, body, tools, choice) if calling and tools else None
    if schema is not None and not calling:
        return _checked("json_schema", guided(schema), "text.format.schema")
    assert tools is not None
    if not calls_are_json(tokenizer.template):
        raise bad(
            "the way this model writes calls cannot be asked for: use tool_choice 'auto' without "
            "a format",
            "tool_choice" if forced else "text.format",
            "unsupported_parameter",
        )
    several = body.parallel_tool_calls is not False and choice.name is None
    rules = call_rules(tokenizer, chosen(tools, choice), several=several)
    if forced or schema is None:
        return _checked("lark", f"start: calls\n{rules}", "tools")
    _checked("json_schema", guided(schema), "text.format.schema")
    rules = f"start: calls | answer\nanswer: %json {guided(schema)}\n{rules}"
    return _checked("lark", rules, "tools")


def _held(
    tokenizer: Tokenizer, body: ResponseRequest, tools: list[Tool], choice: Choice
) -> dict[str, str] | None:
    """The grammar of calls that the model may make between free text, where one is needed: strict
    functions, only some that are allowed, or one call at most. None where calls are free."""
    strict = [tool.name for tool in body.tools or () if tool.strict]
    single = body.parallel_tool_calls is False
    if not strict and not choice.allowed and not single:
        return None
    if not can_hold(tokenizer):
        if choice.allowed:
            raise bad(
                "the way this model writes calls cannot be held to some of the tools: send those "
                "alone in tools",
                "tool_choice",
                "unsupported_parameter",
            )
        return None  # the response says that nothing is strict
    may = loosened(chosen(tools, choice), strict, lambda text: _problem("json_schema", text))
    return _checked("lark", free_rules(tokenizer, may, several=not single), "tools")


def _checked(kind: str, text: str, param: str) -> dict[str, str]:
    """A grammar that can be followed. Raises Fault."""
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR:
        raise bad(f"{param}: more than {MAX_GRAMMAR} bytes of schema: simplify it", param)
    if problem := _problem(kind, text):
        raise bad(f"{param}: this schema cannot be followed ({problem}): correct it", param)
    return {"kind": kind, "text": text}


def _problem(kind: str, text: str) -> str:
    """What is wrong with a grammar, in one line; nothing where it can be followed."""
    from llguidance import LLMatcher  # only requests with a grammar need it

    try:
        if kind == "json_schema":
            schema = json.loads(text)
            if problem := _too_many(schema) or endless(schema):
                return problem
        made = (
            LLMatcher.grammar_from_json_schema(text)
            if kind == "json_schema"
            else LLMatcher.grammar_from_lark(text)
        )
        problem = LLMatcher.validate_grammar(made, None)
    except (ValueError, TypeError) as error:
        problem = str(error) or type(error).__name__
    return problem.strip().splitlines()[0][:200] if problem else ""


def _too_many(schema: Any) -> str:
    """What is too much in a schema, in one line; nothing where it can be prepared soon."""
    total, found = 0, [schema]
    while found:
        part = found.pop()
        if isinstance(part, list):
            found += part
        if not isinstance(part, dict):
            continue
        found += part.values()
        names, needed = part.get("properties"), part.get("required")
        if not isinstance(names, dict):
            continue
        total += len(names)
        needed = {str(name) for name in needed} if isinstance(needed, list) else set()
        run = 0
        for name in names:
            run = 0 if name in needed else run + 1
            if run > MAX_OPTIONAL:
                return f"more than {MAX_OPTIONAL} properties in a row are not required"
    return f"{total} properties, at most {MAX_PROPERTIES}" if total > MAX_PROPERTIES else ""


def _options(tokenizer: Tokenizer, body: ResponseRequest) -> dict[str, Any] | None:
    """Variables of the template: thinking is switched off where the model can do without."""
    effort = body.reasoning.effort if body.reasoning else None
    if effort is None or "enable_thinking" not in tokenizer.template:
        return None
    return {"enable_thinking": effort not in ("none", "minimal")}


def _check_plain(value: Any, param: str) -> None:
    """Refuse what cannot be kept with the job: numbers beyond 64 bits, endless nesting."""
    try:
        pack(value)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise bad(f"{param}: {str(error)[:100] or 'cannot be kept'}: simplify it", param) from error
