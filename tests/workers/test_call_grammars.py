"""Calls between free text, held to a grammar: what a model may write, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_dirs import make_model_dir

from engine.errors import ModelError
from engine.grammar import Grammar, Vocabulary
from engine.text import load_tokenizer
from scheduler.api.tokenizer import Tokenizer
from scheduler.api.tools import Choice, chosen, for_template, free_rules

TOOLS = for_template(
    [
        {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer"}},
                "required": ["days"],
                "additionalProperties": False,
            },
        },
        {"name": "clock"},
    ]
)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    path = make_model_dir(Path(tmp_path_factory.mktemp("calls")) / "m", "tools")
    tokenizer = Tokenizer.load(path)
    inner: Any = load_tokenizer(path)
    return tokenizer, Vocabulary(inner, tokenizer.vocab_size, tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("text", "several", "allowed", "fits"),
    [
        ("It is sunny in Zürich 👩‍👩‍👧.\n<b>", True, (), True),
        ("", True, (), True),
        (call("weather", '{"days": 3}'), True, (), True),
        ("I look." + call("weather", '{"days": 3}') + "\n" + call("clock", "{}"), True, (), True),
        ("I look." + call("weather", '{"days": 3}') + "\n" + call("clock", "{}"), False, (), False),
        (call("weather", '{"days": "3"}'), True, (), False),
        (call("weather", "{}"), True, (), False),
        (call("other", "{}"), True, (), False),
        (call("clock", "{}"), True, ("clock",), True),
        (call("weather", '{"days": 3}'), True, ("clock",), False),
        ("<tool_call>\nnonsense", True, (), False),
    ],
)
def test_what_may_be_written(
    parts: tuple[Tokenizer, Vocabulary],
    text: str,
    several: bool,
    allowed: tuple[str, ...],
    fits: bool,
) -> None:
    tokenizer, vocabulary = parts
    wanted = chosen(TOOLS, Choice("auto", allowed=allowed))
    rules = free_rules(tokenizer, wanted, several=several)
    grammar = Grammar(vocabulary, "lark", rules)

    def write() -> None:
        for token in [*tokenizer.encode(text), min(tokenizer.eos_ids)]:
            mask = grammar.mask()
            assert mask is not None
            if not mask[token].item():
                raise ModelError("it may not be written")
            grammar.accept(token)

    if fits:
        write()
    else:
        with pytest.raises(ModelError):
            write()
