"""Structured output: whatever the model wants to say, the answer follows the grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.decode import Batch
from engine.errors import ModelError
from engine.grammar import Grammar, Vocabulary, Words
from engine.model import Model
from engine.prefill import Prefill
from engine.rows import Event, Row
from engine.sampling import SamplingParams
from engine.text import TextStream
from store.meter import totals

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(default_model: Model, tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer, default_model.vocab_size, default_model.eos_ids)


def ask(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return ids


def run(model: Model, rows: list[Row]) -> list[list[Event]]:
    batch = Batch(model, len(rows), batched=True)
    events: dict[int, list[Event]] = {batch.add(row): [] for row in rows}
    while len(batch):
        for event in batch.step():
            events[event.uid].append(event)
    return list(events.values())


def row(
    model: Model, tokenizer: Any, ids: list[int], grammar: Grammar | None, **values: Any
) -> Row:
    params = SamplingParams(stop_ids=model.eos_ids, max_tokens=48, **values)
    text = TextStream(tokenizer)
    return Row(Prefill(model, ids).run(), ids[:-1], ids[-1:], params, text=text, grammar=grammar)


def test_json_follows_its_schema_beside_a_free_row(
    default_model: Model, tokenizer: Any, vocabulary: Vocabulary
) -> None:
    ids = ask(tokenizer, "Describe Paris as JSON.")
    held = Grammar(vocabulary, "json_schema", SCHEMA)
    free = ask(tokenizer, "What is the capital of France?")
    first, second = run(
        default_model,
        [
            row(default_model, tokenizer, ids, held, temperature=1.0, seed=4),
            row(default_model, tokenizer, free, None),
        ],
    )
    answer = json.loads("".join(event.text for event in first))
    assert set(answer) == {"city", "size"}
    assert answer["size"] in ("small", "large")
    assert len(answer["city"]) <= 12
    assert first[-1].finish == "stop"
    assert "".join(event.text for event in second) == "The capital of France is Paris."


def test_a_regular_expression_and_a_retry(
    default_model: Model, tokenizer: Any, vocabulary: Vocabulary
) -> None:
    pattern = r"[0-9]{3}-[a-f]{2}"
    ids = ask(tokenizer, "Say a code.")
    (events,) = run(
        default_model,
        [row(default_model, tokenizer, ids, Grammar(vocabulary, "regex", pattern))],
    )
    assert re.fullmatch(pattern, "".join(event.text for event in events))
    given = [event.token for event in events if event.token is not None][:3]
    again = row(default_model, tokenizer, ids, Grammar(vocabulary, "regex", pattern))
    again.emitted = given
    (rest,) = run(default_model, [again])
    assert given + [event.token for event in rest] == [event.token for event in events]


def test_a_retry_that_breaks_the_grammar_ends_in_an_error(
    default_model: Model, tokenizer: Any, vocabulary: Vocabulary
) -> None:
    ids = ask(tokenizer, "Say a code.")
    broken = row(default_model, tokenizer, ids, Grammar(vocabulary, "regex", "[0-9]"))
    broken.emitted = [500]
    (events,) = run(default_model, [broken])
    assert events[-1].finish == "error"
    assert "does not allow" in events[-1].error
    assert events[-1].ids == ids
    assert events[-1].pending == [500]


def test_thinking_is_free_until_its_end(tokenizer: Any, vocabulary: Vocabulary) -> None:
    (end,) = tokenizer.encode("<file_sep>", add_special_tokens=False)
    grammar = Grammar(vocabulary, "regex", "[0-9]", after=end)
    assert grammar.mask() is None
    grammar.accept(1234)
    assert not grammar.active
    grammar.accept(end)
    mask = grammar.mask()
    assert mask is not None
    allowed = [index for index, ok in enumerate(mask.tolist()) if ok]  # type: ignore[arg-type, union-attr]  # MLX's tolist has no type
    assert {tokenizer.decode([token]) for token in allowed} == set("0123456789")
    with pytest.raises(ModelError, match="does not allow"):
        grammar.accept(end)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", '{"type": "nonsense"}'), ("regex", "("), ("lark", "start: missing")],
)
def test_what_cannot_be_followed_is_refused(vocabulary: Vocabulary, kind: Any, text: str) -> None:
    with pytest.raises(ModelError, match=f"the {kind} cannot be followed") as caught:
        Grammar(vocabulary, kind, text)
    assert "\n" not in str(caught.value)


def test_a_huge_schema_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(ModelError, match="larger than"):
        Grammar(vocabulary, "json_schema", " " * (2 << 20))


def test_the_vocabulary_is_made_once_and_ahead(small: Model, tokenizer: Any) -> None:
    before = totals()["work"].get("vocabularies", 0)
    words = Words(tokenizer, small.vocab_size, frozenset({0}))
    words.prepare().join(60)
    assert words() is words()
    assert totals()["work"]["vocabularies"] == before + 1


def test_a_vocabulary_that_cannot_be_made_is_told_to_who_asks() -> None:
    words = Words(object(), 10, frozenset({0}))
    words.prepare().join(60)
    for _ in range(2):
        with pytest.raises(Exception, match="object"):
            words()
