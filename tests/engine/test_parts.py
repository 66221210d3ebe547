"""Text, thinking and tool calls told apart, whatever the chunks."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parts import MAX_CALL, Part, Parts
from engine.text import TextStream

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
JSON = "<think> {{ tool_call.name }} <tool_call>"
GLM = "<think> <tool_call>{name} <arg_key>"
QWEN = "<think> <tool_call>\n<function="
MISTRAL = "[TOOL_CALLS]"
WANTED = {"city": "Bern", "days": 2}
CALLS = {
    JSON: f'<tool_call>{{"name": "weather", "arguments": {json.dumps(WANTED)}}}</tool_call>',
    GLM: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    QWEN: "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    MISTRAL: f"[TOOL_CALLS]weather[ARGS]{json.dumps(WANTED)}\n",
}


def split(parts: Parts, chunks: list[str]) -> list[Part]:
    """All parts, neighbours of one kind joined."""
    found = [part for chunk in chunks for part in parts.push(chunk)] + parts.finish()
    joined: list[Part] = []
    for part in found:
        assert part.text
        if joined and part.kind == joined[-1].kind != "call":
            part = Part(part.kind, joined.pop().text + part.text)
        joined.append(part)
    return joined


@pytest.mark.parametrize("template", [JSON, GLM, QWEN])
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 260), max_size=12))
def test_parts_do_not_depend_on_chunks(template: str, cuts: list[int]) -> None:
    text = f"<think>\nSunny?</think>\n\nLet me see. {CALLS[template]}\nDone <3."
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = split(Parts(template, TOOLS), [text[a:b] for a, b in pairwise(places)])
    assert [part.kind for part in found] == ["thinking", "text", "call", "text"]
    assert [part.text for part in found if part.kind != "call"] == [
        "Sunny?",
        "Let me see. ",
        "Done <3.",
    ]
    assert found[2].name == "weather"
    assert json.loads(found[2].text) == WANTED


def test_a_call_that_ends_with_the_answer() -> None:
    found = split(Parts(MISTRAL, TOOLS), list(CALLS[MISTRAL].rstrip()))
    assert [part.kind for part in found] == ["call"]
    assert json.loads(found[0].text) == WANTED


def test_a_prompt_may_open_the_thinking() -> None:
    found = split(Parts(JSON, thinking=True), list("Hm.</think>\nYes."))
    assert found == [Part("thinking", "Hm."), Part("text", "Yes.")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call> after",
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather"',
        "a <tool_ca",
        "<tool_call>" + "x" * (MAX_CALL + 1),
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert split(Parts(JSON, TOOLS), [text]) == [Part("text", text)]


def test_without_tools_or_a_parser_calls_are_text() -> None:
    call = CALLS[JSON]
    assert split(Parts(JSON), [call]) == [Part("text", call)]
    assert split(Parts("plain", TOOLS), [call]) == [Part("text", call)]


def test_several_calls_and_unfinished_thinking() -> None:
    found = split(Parts(JSON, TOOLS), [CALLS[JSON] + "\n" + CALLS[JSON], "<think>and so"])
    assert [part.kind for part in found] == ["call", "call", "thinking"]
    assert found[-1].text == "and so"


def test_special_tokens_can_stay_in_the_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("a<file_sep>b", add_special_tokens=False)
    for special, expected in ((False, "ab"), (True, "a<file_sep>b")):
        stream = TextStream(tokenizer, special=special)
        assert "".join(stream.push(token) for token in ids) + stream.finish() == expected
