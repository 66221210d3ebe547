"""An answer that moves to another batch after any of its tokens goes on as if it had not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.decode import Batch
from engine.drafters import NgramDrafter
from engine.grammar import Grammar, Vocabulary
from engine.model import Model
from engine.prefill import Prefill
from engine.rows import Event, Row
from engine.sampling import SamplingParams
from engine.text import TextStream

LENGTH = 64
PROMPT = [7 * n % 500 + 2 for n in range(40)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


@dataclass
class Form:
    """A way to answer: parameters, and whether a grammar and a drafter take part."""

    params: SamplingParams
    grammar: bool = False
    drafter: bool = False


PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
FORMS = {
    "greedy": Form(SamplingParams(max_tokens=LENGTH)),
    "seeded": Form(SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=5, **PENALISED)),
    "logprobs": Form(SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=9, top_logprobs=2)),
    "grammar": Form(
        SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=3, stop_ids=frozenset({0})),
        grammar=True,
    ),
    "drafter": Form(SamplingParams(max_tokens=LENGTH), drafter=True),
}


@pytest.fixture(scope="module")
def vocabulary(small: Model, tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer, small.vocab_size, frozenset({0}))


class Run:
    """One answer, from its prompt to its end, told event by event."""

    def __init__(
        self, model: Model, tokenizer: Any, vocabulary: Vocabulary, form: Form, stop: str = ""
    ) -> None:
        self._model, self._tokenizer, self._vocabulary = model, tokenizer, vocabulary
        self._form, self._stop = form, (stop,) if stop else ()
        prefill = Prefill(model, PROMPT, chunk=64)
        self._caches = prefill.run()
        self._ids, self._pending = PROMPT[:-1], PROMPT[-1:]
        self._schedule: Any = prefill.schedule
        self.events: list[Event] = []

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if event.token is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def go(self, until: int = LENGTH + 1) -> Run:
        """A new batch takes the state up and goes on until so many tokens are there, or the end."""
        form = self._form
        batch = Batch(self._model, 1, drafter=NgramDrafter() if form.drafter else None)
        params = form.params
        if self._stop:
            params = SamplingParams(max_tokens=params.max_tokens, stop=self._stop)
        uid = batch.add(
            Row(
                caches=self._caches,
                ids=self._ids,
                pending=self._pending,
                params=params,
                said=self.tokens,
                schedule=self._schedule,
                text=TextStream(self._tokenizer, self._stop),
                grammar=Grammar(self._vocabulary, "json_schema", SCHEMA) if form.grammar else None,
            )
        )
        held = ""
        while len(batch) and len(self.tokens) < until:
            self.events += batch.step()
        if len(batch):
            last = batch.cancel(uid)
            held = last.text
            self._caches, self._ids, self._pending = last.caches, last.ids, last.pending
            self._schedule = last.schedule
        self.held = held
        return self

    def last(self) -> Event:
        return self.events[-1]


Start = Callable[..., Run]


@pytest.fixture
def start(small: Model, tokenizer: Any, vocabulary: Vocabulary) -> Start:
    def made(name: str, stop: str = "") -> Run:
        return Run(small, tokenizer, vocabulary, FORMS[name], stop)

    return made


def same(moved: Run, whole: Run) -> None:
    assert moved.tokens == whole.tokens
    assert moved.text == whole.text
    assert [e.logprob for e in moved.events if e.token is not None] == [
        e.logprob for e in whole.events if e.token is not None
    ]
    assert [e.top for e in moved.events if e.token is not None] == [
        e.top for e in whole.events if e.token is not None
    ]
    ended, expected = moved.last(), whole.last()
    assert (ended.finish, ended.ids, ended.pending) == (
        expected.finish,
        expected.ids,
        expected.pending,
    )
    assert ended.schedule == expected.schedule


SEAMS = range(1, LENGTH + 1) if os.environ.get("TANDEM_SOAK") else [1, 2, 17, 40, 63, 64]


@pytest.mark.parametrize("name", FORMS)
def test_moved_after_any_token(start: Start, name: str) -> None:
    whole = start(name).go()
    for seam in SEAMS:
        if seam < len(whole.tokens):
            same(start(name).go(seam).go(), whole)


@pytest.mark.parametrize("name", FORMS)
def test_moved_after_every_token(start: Start, name: str) -> None:
    whole, moved = start(name).go(), start(name)
    while not moved.events or not moved.last().finish:
        moved.go(len(moved.tokens) + 1)
    same(moved, whole)


def test_a_stop_string_and_a_character_across_the_seam(start: Start) -> None:
    whole = start("greedy").go()
    shown = [event.text for event in whole.events]
    # Some tokens alone are no whole characters: what they begin comes with a later one.
    assert "" in shown[:-1]
    joined = next(
        shown[i] + shown[i + 1] for i in range(20, LENGTH) if shown[i] and shown[i + 1].strip()
    )
    stopped = start("greedy", joined).go()
    assert stopped.last().finish == "stop"
    assert joined not in stopped.text
    for seam in range(1, len(stopped.tokens)):
        same(start("greedy", joined).go(seam).go(), stopped)


def test_an_answer_that_had_ended_only_finishes(small: Model) -> None:
    """The last token was said before: nothing is fed, and the state is handed back."""
    for params, said in (
        (SamplingParams(max_tokens=3), [7, 8, 9]),
        (SamplingParams(max_tokens=9, stop_ids=frozenset({9})), [7, 8, 9]),
    ):
        caches = Prefill(small, [*PROMPT, *said], chunk=64).run()
        batch = Batch(small, 1)
        ids = [*PROMPT, *said[:-1]]
        batch.add(Row(caches, ids, said[-1:], params, said=said, schedule=[len(ids)]))
        (event,) = batch.step()
        assert event.finish == ("length" if params.max_tokens == 3 else "stop")
        assert (event.token, event.ids, event.pending) == (None, ids, [9])
        assert event.caches is caches
        assert not len(batch)


def test_a_state_that_does_not_end_with_what_was_said_is_refused(small: Model) -> None:
    caches = Prefill(small, PROMPT, chunk=64).run()
    batch = Batch(small, 1)
    for said in ([5], [*PROMPT, 1, 2]):
        with pytest.raises(ValueError, match="does not end with"):
            batch.add(Row(caches, PROMPT[:-1], PROMPT[-1:], said=said))
    with pytest.raises(ValueError, match="ends before"):
        batch.add(
            Row(caches, PROMPT[:-1], PROMPT[-1:], SamplingParams(max_tokens=1), said=PROMPT[-2:])
        )
    assert not len(batch)
