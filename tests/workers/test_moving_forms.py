"""The seam between two decode nodes, by the kind of answer that crosses it.

Each answer is compared, token for token and in its text, with one process that computes it alone:
one row, plain steps, no drafter, no seam.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import redis
from decode_kit import asking, make_job
from model_dirs import make_image_model
from moving_kit import Pair
from test_late_engine import ids
from test_seen_images import alone, asked, picture, prompt

from engine.decode import Batch
from engine.device import prepare
from engine.drafters import NgramDrafter
from engine.grammar import Grammar, Words
from engine.model import Model, load
from engine.pace import Pace
from engine.pictures import Processor, see
from engine.prefill import Prefill, expand_schedule
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.solo import answer
from engine.text import TextStream, load_tokenizer
from scheduler.record import Job

ALL = bool(os.environ.get("TANDEM_SOAK"))
SCRIPT = "\u4e16\u754c \U0001f30a \u00e9t\u00e9"
"""Characters of two, three and four bytes; the tiny tokenizer has a token for each byte."""
SCHEMA = {
    "type": "object",
    "properties": {"sea": {"const": SCRIPT}, "deep": {"type": "boolean"}},
    "required": ["sea", "deep"],
    "additionalProperties": False,
}


@dataclass
class Said:
    """An answer: its tokens, and what its text was after each of them."""

    tokens: list[int]
    texts: list[str]


def solo(pair: Pair, job: Job, words: Any) -> Said:
    """The answer to `job`, computed alone by the forwards that its turn tells."""
    model, asked = pair.leaving.model, job.request["params"]
    turn = pair.other.store.get_turn(job.id)
    assert turn is not None
    lengths, total = [], 0
    for length in expand_schedule(turn.schedule):
        if total < len(job.prompt_ids) - 1:
            lengths.append(length)
            total += length
    assert total == len(job.prompt_ids) - 1
    grammar = asked.get("grammar")
    held = None
    if grammar is not None:
        vocabulary = Words(words, model.vocab_size, model.eos_ids)()
        held = Grammar(vocabulary, grammar["kind"], grammar["text"], None)
    stop = tuple(asked.get("stop") or ())
    prefill = Prefill(model, job.prompt_ids, lengths=lengths)
    prefill.run()
    batch = Batch(model, 1)
    batch.add(
        Row(
            caches=prefill.caches,
            ids=list(job.prompt_ids[:-1]),
            pending=[job.prompt_ids[-1]],
            params=SamplingParams(
                max_tokens=asked["max_output_tokens"],
                temperature=asked.get("temperature", 0.0),
                seed=asked.get("seed", 0),
                stop=stop,
                stop_ids=model.eos_ids,
            ),
            schedule=prefill.schedule,
            text=TextStream(words, stop),
            grammar=held,
        )
    )
    said, text = Said([], []), ""
    while len(batch):
        for event in batch.step():
            text += event.text
            if event.token is not None:
                said.tokens.append(event.token)
                said.texts.append(text)
            elif said.texts:
                said.texts[-1] = text
    return said


def text_of(events: Sequence[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


def check(pair: Pair, words: Any, request: dict[str, Any], seams: Callable[[Said], Any]) -> Said:
    """Move the answer to a request at each of the `seams` in what is expected; what that is."""
    whole = make_job(ids(), request=request)
    pair.move(whole, 1)
    expected = solo(pair, whole, words)
    assert pair.other.said(whole) == expected.tokens
    for seam in seams(expected):
        job = make_job(ids(), request=request)
        facts = pair.move(job, seam)
        assert facts["moved"][0]["at_token"] >= seam
        assert pair.other.said(job) == expected.tokens, f"moved after {seam} tokens"
        assert text_of(pair.other.events[job.id]) == expected.texts[-1], f"after {seam} tokens"
        turn = pair.other.store.get_turn(job.id)
        assert turn is not None
        assert turn.items[-1]["content"][0]["text"] == expected.texts[-1], f"after {seam} tokens"
    return expected


def some(seams: Sequence[int], count: int = 3) -> Sequence[int]:
    """All of them in the long run, else a few that are spread over them."""
    return seams if ALL or len(seams) <= count else seams[:: -(-len(seams) // count)]


class Counted(NgramDrafter):
    """An n-gram drafter that proposes after one known token, and says that it did."""

    proposed: ClassVar[list[int]] = []

    def fresh(self) -> Counted:
        return Counted(1, 1)

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        found = super().propose(ids, pending, count)
        self.proposed.extend(found)
        return found


@pytest.fixture
def drafting(
    redis_url: str,
    client: redis.Redis,
    loaded: Model,
    words: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pair]:
    """Two nodes with a drafter that never rests: whether it pays is a matter of time."""
    monkeypatch.setattr(Pace, "round", lambda self, tokens, seconds: None)
    monkeypatch.setattr(Counted, "proposed", [])
    monkeypatch.setattr(
        "worker_decode.engine.find_drafter", lambda model, asked: (Counted(1, 1), "asked for")
    )
    made = Pair(redis_url, client, loaded, words)
    yield made
    made.close()


def test_with_a_drafter_on_both_nodes(drafting: Pair, words: Any) -> None:
    before: list[int] = []

    def seams(expected: Said) -> Iterator[int]:
        for seam in some(range(2, len(expected.tokens) - 1), 4):
            before.append(len(Counted.proposed))
            yield seam

    for form in ({}, {"temperature": 1.0, "seed": 11}):
        request = asking(48)
        request["params"] |= form
        expected = check(drafting, words, request, seams)
        assert len(expected.tokens) == 48
    assert before == sorted(set(before)), "at some seam nothing was proposed"


def test_with_a_stop_string_that_lies_across_it(pair: Pair, words: Any) -> None:
    free = check(pair, words, asking(40), lambda _: [])
    text = free.texts[-1]
    at = next(
        k
        for k in range(4, 36)
        if (stop := free.texts[k + 3][len(free.texts[k]) :])
        and text.index(stop) == len(free.texts[k])
        and all(a != b for a, b in pairwise(free.texts[k : k + 4]))
    )
    stop = text[len(free.texts[at]) : len(free.texts[at + 3])]
    request = asking(40)
    request["params"]["stop"] = [stop]
    inside = range(at + 2, at + 4)  # the first of its tokens, and two of them, are said
    said = check(pair, words, request, lambda _: [1, *inside])
    assert (said.tokens, said.texts[-1]) == (free.tokens[: at + 4], free.texts[at])


@pytest.mark.parametrize("seed", [3, 4] if ALL else [3])
def test_inside_a_character_and_in_a_json_answer(pair: Pair, words: Any, seed: int) -> None:
    request = asking(90)
    request["params"] |= {
        "temperature": 1.0,
        "seed": seed,
        "grammar": {"kind": "json_schema", "text": SCHEMA},
    }
    torn: list[int] = []

    def seams(expected: Said) -> Sequence[int]:
        texts = expected.texts
        whole = [k for k in range(1, len(texts)) if texts[k] != texts[k - 1]]
        torn.extend(k for k in range(2, len(texts)) if texts[k - 1] == texts[k - 2])
        return sorted({*some(whole), *some(torn, 6)} - {len(texts)})

    expected = check(pair, words, request, seams)
    assert torn, "no character takes several tokens"
    assert json.loads(expected.texts[-1])["sea"] == SCRIPT


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_image_model(tmp_path_factory.mktemp("moving") / "tiny"), prepare())


@pytest.fixture
def shown(redis_url: str, client: redis.Redis, seeing: Model) -> Iterator[Pair]:
    """Two nodes of a model that sees."""
    made = Pair(redis_url, client, seeing, load_tokenizer(seeing.path))
    yield made
    made.close()


def test_with_images_in_the_prompt(shown: Pair, seeing: Model) -> None:
    """And the next turn, which shows another one, is answered at the other node."""
    processor, one, two = Processor(seeing.path), picture(1), picture(2)
    for seam in range(1, 7) if ALL else (1, 4):
        job = asked(prompt(processor, one), one)
        facts = shown.move(job, seam)
        assert (facts["path"], facts["moved"][0]["at_token"]) == ("tcp", seam)
        expected = alone(seeing, processor, job, one)
        assert shown.other.said(job) == expected
    past = shown.other.store.turn_ids(job.id)
    more = asked([*past, *prompt(processor, two)], two, previous=job.id)
    finished = shown.other.answer(more)
    assert finished.result is not None
    assert finished.result.path["path"] == "hot"
    held = len(job.prompt_ids) - 1
    lengths = [held, *[1] * (len(past) - held - 1)]
    lengths.append(len(more.prompt_ids) - 1 - sum(lengths))
    seen = see(seeing, processor, more.prompt_ids, [one, two])
    bias = dict.fromkeys(range(420, 435), -100.0)
    params = SamplingParams(max_tokens=7, logit_bias=bias)
    said = answer(seeing, more.prompt_ids, lengths, params, embedded=seen).tokens
    assert shown.other.said(more) == said
