"""The batch: joining, leaving, ending, retrying, against one row alone."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.decode import Batch
from engine.errors import ModelError
from engine.model import Caches, Model
from engine.prefill import Prefill, expand_schedule, plan
from engine.rows import Event, Row
from engine.sampling import SamplingParams
from engine.solo import Answer, answer
from engine.text import TextStream


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(length)]


def row(model: Model, ids: list[int], params: SamplingParams, **extra: Any) -> Row:
    prefill = Prefill(model, ids, chunk=64)
    prefill.run()
    return Row(prefill.caches, ids[:-1], ids[-1:], params, schedule=prefill.schedule, **extra)


def solo(model: Model, ids: list[int], params: SamplingParams) -> Answer:
    prefill = Prefill(model, ids, chunk=64)
    prefill.run()
    return answer(model, ids, prefill.schedule, params)


def drain(batch: Batch) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    while len(batch):
        for event in batch.step():
            events.setdefault(event.uid, []).append(event)
    return events


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def arrays(caches: Caches) -> list[np.ndarray[Any, Any]]:
    return [np.array(part) for cache in caches for part in cache.state]


def same_state(a: Caches, b: Caches) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def close_state(a: Caches, b: Caches) -> bool:
    return all(
        x.shape == y.shape and np.allclose(x, y, atol=1e-3)
        for x, y in zip(arrays(a), arrays(b), strict=True)
    )


def test_rows_that_join_and_leave_answer_as_alone(small: Model) -> None:
    rng = random.Random(1)
    prompts = [prompt(rng.randrange(5, 200), seed) for seed in range(7)]
    params = [SamplingParams(max_tokens=rng.randrange(3, 30)) for _ in prompts]
    batch = Batch(small, 4)
    waiting = list(range(7))
    owner: dict[int, int] = {}
    events: dict[int, list[Event]] = {}
    while waiting or len(batch):
        if waiting and len(batch) < 4 and rng.random() < 0.5:
            i = waiting.pop()
            owner[batch.add(row(small, prompts[i], params[i]))] = i
        for event in batch.step():
            events.setdefault(owner[event.uid], []).append(event)
    for i, ids in enumerate(prompts):
        alone = solo(small, ids, params[i])
        last = events[i][-1]
        assert tokens(events[i]) == alone.tokens
        assert [event.position for event in events[i]] == list(
            range(len(ids), len(ids) + len(alone.tokens))
        )
        assert last.finish == "length"
        assert last.ids == ids + alone.tokens[:-1]
        assert last.pending == alone.tokens[-1:]
        assert last.schedule == alone.schedule
        assert last.caches is not None
        assert close_state(last.caches, alone.caches)
        assert sum(last.widths.values()) == len(alone.tokens)
    assert batch.facts["batched"]
    assert max(batch.facts["widths"]) > 1


def test_a_row_alone_is_the_solo_run_bit_for_bit(small: Model) -> None:
    ids = prompt(150, 3)
    params = SamplingParams(max_tokens=20)
    batch = Batch(small, 4)
    batch.add(row(small, ids, params))
    (events,) = drain(batch).values()
    alone = solo(small, ids, params)
    assert tokens(events) == alone.tokens
    assert events[-1].caches is not None
    assert same_state(events[-1].caches, alone.caches)


def test_a_resumed_turn_feeds_the_pending_token_first(small: Model) -> None:
    first = prompt(70, 4)
    params = SamplingParams(max_tokens=6)
    batch = Batch(small, 2, chunk=32)
    batch.add(row(small, first, params))
    last = drain(batch)[1][-1]
    more = prompt(100, 5)
    assert last.caches is not None
    uid = batch.add(Row(last.caches, last.ids, last.pending + more, params, schedule=last.schedule))
    resumed = drain(batch)[uid]
    whole = last.ids + last.pending + more
    lengths = expand_schedule(resumed[-1].schedule)
    assert lengths == [*plan(0, 69, 64), *[1] * 6, *plan(75, 175, 32), *[1] * 6]
    alone = answer(small, whole, lengths[:-6], params)
    assert tokens(resumed) == alone.tokens
    assert resumed[-1].caches is not None
    assert same_state(resumed[-1].caches, alone.caches)
    assert resumed[-1].ids == whole + alone.tokens[:-1]


def test_an_extension_stalls_the_others_by_one_chunk_a_step(small: Model) -> None:
    batch = Batch(small, 2, chunk=32)
    params = SamplingParams(max_tokens=30)
    a = batch.add(row(small, prompt(20, 6), params))
    ids = prompt(200, 7)
    b = batch.add(Row(small.fresh_cache(), [], ids, params))
    chunks = plan(0, 199, 32)
    for _ in chunks[1:]:
        assert [event.uid for event in batch.step()] == [a]
    assert {event.uid for event in batch.step()} == {a, b}
    events = drain(batch)
    alone = solo_of(small, ids, params, 32)
    assert tokens(events[b]) == alone.tokens[1:]
    assert events[b][-1].schedule == alone.schedule
    assert events[b][-1].schedule[0] == [32, 5]


def solo_of(model: Model, ids: list[int], params: SamplingParams, chunk: int) -> Answer:
    prefill = Prefill(model, ids, chunk=chunk)
    prefill.run()
    return answer(model, ids, prefill.schedule, params)


def test_one_token_needs_one_forward(small: Model) -> None:
    batch = Batch(small, 2)
    batch.add(row(small, prompt(20, 8), SamplingParams(max_tokens=1)))
    (event,) = batch.step()
    assert event.finish == "length"
    assert len(batch) == 0
    assert event.ids == prompt(20, 8)
    assert event.pending == [event.token]
    assert event.caches is not None
    assert event.caches[0].offset == 20


def test_a_stop_token_is_pending_and_never_fed(small: Model) -> None:
    ids = prompt(40, 9)
    alone = solo(small, ids, SamplingParams(max_tokens=10))
    at = next(i for i, token in enumerate(alone.tokens) if token not in alone.tokens[:i] and i > 1)
    for stop in (alone.tokens[0], alone.tokens[at]):
        index = alone.tokens.index(stop)
        batch = Batch(small, 1)
        batch.add(row(small, ids, SamplingParams(max_tokens=10, stop_ids=frozenset({stop}))))
        (events,) = drain(batch).values()
        assert tokens(events) == alone.tokens[: index + 1]
        assert events[-1].finish == "stop"
        assert events[-1].pending == [stop]
        assert events[-1].ids == ids + alone.tokens[:index]


@pytest.mark.parametrize("with_others", [False, True])
def test_a_cancelled_row_holds_its_ids_exactly(small: Model, with_others: bool) -> None:
    batch = Batch(small, 3)
    params = SamplingParams(max_tokens=40)
    others = [batch.add(row(small, prompt(30 + i, 20 + i), params)) for i in range(2 * with_others)]
    ids = prompt(90, 10)
    uid = batch.add(row(small, ids, params))
    seen: list[int] = []
    for _ in range(7):
        seen += [e.token for e in batch.step() if e.uid == uid and e.token is not None]
    event = batch.cancel(uid)
    assert event.finish == "cancelled"
    assert event.ids == ids + seen[:-1]
    assert event.pending == seen[-1:]
    assert event.caches is not None
    whole = event.ids + event.pending
    state = answer(small, whole, event.schedule, SamplingParams(max_tokens=1))
    assert close_state(event.caches, trimmed(small, whole, event.schedule))
    with pytest.raises(KeyError):
        batch.cancel(uid)
    again = batch.add(Row(event.caches, event.ids, event.pending, SamplingParams(max_tokens=1)))
    events = drain(batch)
    assert tokens(events[again]) == state.tokens
    for i, other in enumerate(others):
        alone = solo(small, prompt(30 + i, 20 + i), params)
        assert tokens(events[other]) == alone.tokens[7:]


def trimmed(model: Model, whole: list[int], schedule: list[list[int]]) -> Caches:
    return Prefill(model, whole, lengths=expand_schedule(schedule)).run()


def test_cancel_before_and_during_extension(small: Model) -> None:
    ids = prompt(100, 11)
    batch = Batch(small, 2, chunk=32)
    uid = batch.add(Row(small.fresh_cache(), [], ids))
    event = batch.cancel(uid)
    assert (event.ids, event.pending, event.schedule) == ([], ids, [])
    uid = batch.add(Row(small.fresh_cache(), [], ids))
    batch.step()
    event = batch.cancel(uid)
    assert (event.ids, event.pending) == (ids[:32], ids[32:])
    assert event.caches is not None
    assert event.caches[0].offset == 32


@pytest.mark.parametrize("given", [1, 5, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_retry_goes_on_where_it_was(small: Model, given: int, temperature: float) -> None:
    ids = prompt(60, 12)
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=77)
    batch = Batch(small, 1)
    batch.add(row(small, ids, params))
    (first,) = drain(batch).values()
    batch.add(row(small, ids, params, emitted=tokens(first)[:given]))
    (second,) = drain(batch).values()
    assert tokens(second) == tokens(first)[given:]
    assert [event.position for event in second] == [event.position for event in first][given:]
    assert first[-1].caches is not None
    assert second[-1].caches is not None
    assert same_state(first[-1].caches, second[-1].caches)
    assert second[-1].schedule == first[-1].schedule


def test_what_was_given_out_is_never_drawn_again(small: Model) -> None:
    ids = prompt(60, 13)
    foreign = [400, 401, 402]
    batch = Batch(small, 1)
    batch.add(row(small, ids, SamplingParams(max_tokens=6), emitted=foreign))
    (events,) = drain(batch).values()
    assert events[-1].ids[60:63] == foreign
    assert len(tokens(events)) == 3


def test_a_retry_of_a_finished_answer_only_finishes(small: Model) -> None:
    ids = prompt(60, 14)
    batch = Batch(small, 1)
    for params, given in (
        (SamplingParams(max_tokens=3), [7, 8, 9]),
        (SamplingParams(max_tokens=9, stop_ids=frozenset({9})), [7, 9]),
    ):
        batch.add(row(small, ids, params, emitted=given))
        (events,) = drain(batch).values()
        assert len(events) == 1
        assert events[0].token is None
        assert events[0].finish in ("length", "stop")
        assert events[0].pending == given[-1:]
        assert events[0].ids == ids + given[:-1]


def test_seeded_rows_do_not_depend_on_their_neighbours(small: Model) -> None:
    ids = prompt(50, 15)
    params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=5)
    alone = solo(small, ids, params)
    batch = Batch(small, 4)
    other = SamplingParams(max_tokens=8, temperature=1.3, seed=6, top_logprobs=2)
    batch.add(row(small, prompt(33, 16), other))
    batch.step()
    uid = batch.add(row(small, ids, params))
    batch.add(row(small, prompt(20, 17), SamplingParams(max_tokens=5)))
    events = drain(batch)
    assert tokens(events[uid]) == alone.tokens


def test_logprobs_are_those_of_the_logits(small: Model) -> None:
    ids = prompt(50, 18)
    batch = Batch(small, 1)
    batch.add(row(small, ids, SamplingParams(max_tokens=2, top_logprobs=4)))
    (events,) = drain(batch).values()
    caches = small.fresh_cache()
    logits = np.array(small.forward(mx.array([ids]), caches, [0])[0, -1])
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    best = np.argsort(-expected)[:4]
    assert [token for token, _ in events[0].top] == best.tolist()
    assert np.allclose([value for _, value in events[0].top], expected[best], atol=1e-3)
    assert events[0].logprob == pytest.approx(float(expected[events[0].token or 0]), abs=1e-3)


def test_bad_rows_are_refused_before_mlx_sees_them(small: Model) -> None:
    batch = Batch(small, 1)
    for bad in (
        Row(small.fresh_cache(), [], [512]),
        Row(small.fresh_cache(), [], [-1]),
        Row(small.fresh_cache(), [], []),
        Row(small.fresh_cache(), [], [5], emitted=[512]),
        Row(small.fresh_cache(), [], [5], SamplingParams(logit_bias={999: 1.0})),
        Row(small.fresh_cache(), [], [5] * 4097),
    ):
        with pytest.raises(ModelError):
            batch.add(bad)
    with pytest.raises(ValueError, match="TextStream"):
        batch.add(Row(small.fresh_cache(), [], [5], SamplingParams(stop=("a",))))
    batch.add(Row(small.fresh_cache(), [], [5]))
    with pytest.raises(ModelError, match="slots are taken"):
        batch.add(Row(small.fresh_cache(), [], [5]))


def test_a_prompt_that_cannot_be_prefilled_is_refused(small: Model) -> None:
    for ids, message in (([], "empty"), ([600], "vocabulary"), ([5] * 4097, "context")):
        with pytest.raises(ModelError, match=message):
            Prefill(small, ids)


def test_the_context_ends_an_answer(small: Model) -> None:
    batch = Batch(small, 1)
    batch.add(Row(small.fresh_cache(), [], [5] * 4095, SamplingParams(max_tokens=50)))
    (events,) = drain(batch).values()
    assert len(tokens(events)) == 1
    assert events[-1].finish == "length"


def test_a_failing_row_ends_alone(small: Model) -> None:
    batch = Batch(small, 3)
    params = SamplingParams(max_tokens=5)
    good = batch.add(row(small, prompt(30, 19), params))
    broken = batch.add(Row([], [], prompt(60, 20), params))
    events = drain(batch)
    assert [event.finish for event in events[broken]] == ["error"]
    assert events[broken][0].error
    assert tokens(events[good]) == solo(small, prompt(30, 19), params).tokens


@pytest.mark.rotate(2)
def test_real_answers(default_model: Model, tokenizer: Any) -> None:
    questions = ["What is the capital of France?", "Tell me a joke.", "Name three colours."]
    params = SamplingParams(max_tokens=12, stop_ids=default_model.eos_ids)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    batch = Batch(default_model, 3)
    for ids in prompts:
        caches = Prefill(default_model, ids).run()
        batch.add(Row(caches, ids[:-1], ids[-1:], params, text=TextStream(tokenizer)))
    found = drain(batch)
    texts = ["".join(event.text for event in events) for events in found.values()]
    assert texts[0] == "The capital of France is Paris."
    assert texts == [
        answer(default_model, i, (), params, tokenizer=tokenizer).text for i in prompts
    ]


def test_a_stop_string_ends_the_text_before_it(default_model: Model, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    params = SamplingParams(max_tokens=20, stop=("ce is Pa",), stop_ids=default_model.eos_ids)
    found = answer(default_model, ids, (), params, tokenizer=tokenizer)
    assert found.text == "The capital of Fran"
    assert found.finish == "stop"
    assert found.pending == found.tokens[-1:]
