"""Speculation changes how many forwards an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from architectures import Part as Conversation
from architectures import build, prompt_of
from mlx.utils import tree_flatten

from engine.decode import Batch
from engine.drafters import (
    READ_AT_ONCE,
    Drafter,
    ModelDrafter,
    MtpDrafter,
    NgramDrafter,
    find_drafter,
)
from engine.errors import ModelError
from engine.model import Model
from engine.prefill import Prefill
from engine.rows import Event, Row
from engine.sampling import SamplingParams
from engine.solo import answer
from engine.speculate import LONGEST

# Every way of rolling back: rows, rings, pools with recurrent state, packed rows, index keys.
NAMES = ["llama", "gemma3", "glm5_next", "qwen3_5", "minimax_m3", "deepseek_v4", "llama_kv8"]
TALK = Conversation("talk", 83, 26)


class Script:
    """Proposes the known answer, wrong at every third place."""

    name = "script"
    hidden = False

    def __init__(self, known: Sequence[int], wrong: int = 3) -> None:
        self.known = list(known)
        self.wrong = wrong
        self.at = 0
        self.undone = 0

    def fresh(self) -> Script:
        return self

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        self.at = self.known.index(pending) + 1

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        found = self.known[self.at : self.at + count]
        return [
            token if (self.at + i) % self.wrong else (token + 1) % 400
            for i, token in enumerate(found)
        ]

    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        self.at += len(new)

    def abort(self) -> None:
        self.undone += 1


def still() -> float:
    """A clock by which rounds are never slower than plain steps."""
    return 0.0


def drain(batch: Batch) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    while len(batch):
        for event in batch.step():
            events.setdefault(event.uid, []).append(event)
    return events


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def row(model: Model, ids: list[int], params: SamplingParams, **extra: Any) -> Row:
    return Row(Prefill(model, ids, chunk=64).run(), ids[:-1], ids[-1:], params, **extra)


def plain(model: Model, ids: list[int], params: SamplingParams) -> list[Event]:
    batch = Batch(model, 1)
    batch.add(row(model, ids, params))
    return drain(batch)[1]


def distinct(model: Model, name: str) -> tuple[list[int], list[int]]:
    """A prompt whose first answer tokens differ, as the script finds its place by them."""
    for seed in range(50):
        ids = prompt_of(f"{name} {seed}", TALK)
        known = tokens(plain(model, ids, SamplingParams(max_tokens=26)))
        if known.index(known[0]) == 0 and known.count(known[0]) == 1:
            return ids, known
    raise AssertionError("no prompt with a varied answer")


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_and_the_state_are_those_of_single_steps(name: str) -> None:
    model = build(name)
    ids, known = distinct(model, name)
    batch = Batch(model, 1, drafter=Script(known), depth=4, clock=still)
    batch.add(row(model, ids, SamplingParams(max_tokens=26)))
    events = drain(batch)[1]
    assert tokens(events) == known
    assert [event.position for event in events] == list(range(83, 109))
    last = events[-1]
    assert last.ids == ids + known[:-1]
    assert last.pending == known[-1:]
    assert last.caches is not None
    model.check_position(last.caches, len(last.ids))
    facts = batch.facts["speculation"]
    assert facts["accepted"] > 10
    assert batch.facts["steps"] == 26 - facts["accepted"]
    more = last.pending + prompt_of("more", Conversation("more", 15, 0))
    batch = Batch(model, 1)
    batch.add(Row(last.caches, last.ids, more, SamplingParams(max_tokens=8)))
    lengths = [64, 18, *[1] * 26, 15]
    resumed = answer(model, last.ids + more, lengths, SamplingParams(max_tokens=8))
    assert tokens(drain(batch)[1]) == resumed.tokens


@pytest.mark.parametrize("place", range(1, 9))
def test_an_end_inside_a_block_keeps_nothing_beyond_it(place: int) -> None:
    model = build("glm5_next")
    ids, known = distinct(model, "glm5_next")
    stop = known[place]
    place = known.index(stop)
    for params in (
        SamplingParams(max_tokens=26, stop_ids=frozenset({stop})),
        SamplingParams(max_tokens=place + 1),
    ):
        batch = Batch(model, 1, drafter=Script(known, wrong=100), depth=LONGEST, clock=still)
        batch.add(row(model, ids, params))
        events = drain(batch)[1]
        assert tokens(events) == known[: place + 1]
        assert events[-1].ids == ids + known[:place]
        assert events[-1].pending == [stop]
        assert events[-1].caches is not None
        model.check_position(events[-1].caches, len(ids) + place)


def test_rows_join_and_leave_a_speculating_one(small: Model) -> None:
    ids, known = distinct(small, "small")
    rng = random.Random(6)
    other = [rng.randrange(2, 512) for _ in range(40)]
    batch = Batch(small, 2, drafter=Script(known), depth=3, clock=still)
    uid = batch.add(row(small, ids, SamplingParams(max_tokens=26)))
    found: dict[int, list[Event]] = {uid: [], uid + 1: []}
    for _ in range(3):
        found[uid] += batch.step()
    batch.add(row(small, other, SamplingParams(max_tokens=4)))
    for each, events in drain(batch).items():
        found[each] += events
    assert tokens(found[uid]) == known
    assert tokens(found[uid + 1]) == tokens(plain(small, other, SamplingParams(max_tokens=4)))
    assert set(batch.facts["widths"]) == {1, 2}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(max_tokens=20, repetition_penalty=1.3, presence_penalty=0.5, top_logprobs=2),
    ],
)
def test_every_way_of_choosing_is_kept(small: Model, params: SamplingParams) -> None:
    for seed in range(9):
        ids = prompt_of(f"choice {seed}", TALK)
        expected = plain(small, ids, params)
        known = tokens(expected)
        if known.count(known[0]) > 1:
            continue
        batch = Batch(small, 1, drafter=Script(known), depth=3, clock=still)
        batch.add(row(small, ids, params))
        events = drain(batch)[1]
        assert tokens(events) == known
        for a, b in zip(events, expected, strict=True):
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
        assert batch.facts["speculation"]["accepted"] > 5
        return
    raise AssertionError("no prompt with a varied answer")


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_a_batch_are_verified_together(name: str) -> None:
    model = build(name)
    talks = [prompt_of(f"{name} {i}", Conversation("talk", n, 20)) for i, n in enumerate((83, 40))]
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=14, temperature=0.8, seed=4, repetition_penalty=1.1),
    ]
    known = [tokens(plain(model, ids, p)) for ids, p in zip(talks, params, strict=True)]
    batch = Batch(model, 3, drafter=Known(talks, known), depth=4, clock=still)
    uids = [batch.add(row(model, *each)) for each in zip(talks, params, strict=True)]
    events = drain(batch)
    facts = batch.facts["speculation"]
    assert batch._speculation is not None
    assert not batch._speculation._followers, "a row that has gone is still followed"
    for uid, ids, answered in zip(uids, talks, known, strict=True):
        assert tokens(events[uid]) == answered
        last = events[uid][-1]
        assert last.caches is not None
        assert last.ids == ids + answered[:-1]
        model.check_position(last.caches, len(last.ids))
    if facts["batched"]:
        assert facts["accepted"] > 10
        assert batch.facts["steps"] < 18
    else:  # one is decoded row by row, the other's positions do not go back row by row
        assert name in ("minimax_m3", "qwen3_5"), facts["batch_reason"]
        assert facts["batch_reason"]
    end = events[uids[0]][-1]
    more = end.pending + prompt_of("more", Conversation("more", 15, 0))
    assert end.caches is not None
    again = Batch(model, 1)
    again.add(Row(end.caches, end.ids, more, SamplingParams(max_tokens=6)))
    lengths = [64, 18, *[1] * 20, 15]
    whole = end.ids + more
    assert tokens(drain(again)[1]) == answer(model, whole, lengths, params[0]).tokens[:6]


class Known:
    """Proposes the known answers to known prompts, every third token wrong."""

    name = "known"
    hidden = False

    def __init__(self, talks: Sequence[list[int]], known: Sequence[list[int]]) -> None:
        self.talks = talks
        self.known = known
        self.script = Script([])

    def fresh(self) -> Known:
        return Known(self.talks, self.known)

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        whole = [*ids, pending]
        which = next(i for i, talk in enumerate(self.talks) if whole[: len(talk)] == talk)
        self.script = Script(self.known[which])
        self.script.at = len(whole) - len(self.talks[which])

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        return self.script.propose(ids, pending, count)

    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        self.script.at += len(new)

    def abort(self) -> None:
        """Nothing to undo."""


def test_rounds_that_are_slower_than_steps_rest(small: Model) -> None:
    ids, known = distinct(small, "small")
    now = [0.0]

    class Slow(Script):
        def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
            now[0] += 10.0
            return super().propose(ids, pending, count)

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    params = SamplingParams(max_tokens=60)
    expected = tokens(plain(small, ids, params))
    batch = Batch(small, 1, drafter=Slow(expected, wrong=100), depth=1, clock=clock)
    batch.add(row(small, ids, params))
    events = drain(batch)[1]
    assert tokens(events) == expected
    assert known == expected[:26]
    # Two plain steps, eight rounds of two tokens each, and then single steps only.
    assert events[-1].blocks == {1: 2 + 60 - 2 - 16, 2: 8}
    assert (events[-1].drafted, events[-1].accepted) == (8, 8)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_a_smaller_model_drafts(name: str, small: Model) -> None:
    draft = build(name)
    talks = [prompt_of(f"drafted {i}", Conversation("talk", n, 20)) for i, n in enumerate((83, 40))]
    params = SamplingParams(max_tokens=20)
    same = Batch(draft, 1, drafter=ModelDrafter(draft, build(name)), depth=3, clock=still)
    same.add(row(draft, talks[0], params))
    assert tokens(drain(same)[1]) == tokens(plain(draft, talks[0], params))
    assert same.facts["speculation"]["acceptance"] > 0.9
    other = Batch(small, 2, drafter=ModelDrafter(small, draft), depth=3, clock=still)
    uids = [other.add(row(small, ids, params)) for ids in talks]
    events = drain(other)
    for uid, ids in zip(uids, talks, strict=True):
        assert tokens(events[uid]) == tokens(plain(small, ids, params))
    assert other.facts["speculation"]["drafted"] > 10
    assert other.facts["speculation"]["reason"] == ""


def test_what_a_drafter_means_is_said(small: Model, tmp_path: Any) -> None:
    assert find_drafter(small, "off") == (None, "switched off")
    found, why = find_drafter(small, "auto")
    assert isinstance(found, NgramDrafter)
    assert "no prediction head" in why
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_drafter(small, str(tmp_path))
    with pytest.raises(ModelError, match="no drafter can be loaded"):
        find_drafter(small, "mtp")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["DFlash"]}')
    with pytest.raises(ModelError, match="inner layers"):
        find_drafter(small, str(tmp_path))


def test_a_directory_with_a_smaller_model_drafts(default_model: Model, small: Model) -> None:
    with pytest.raises(ModelError, match="a draft model of the same family"):
        ModelDrafter(default_model, small)


def test_a_retry_feeds_what_was_given_out_first(small: Model) -> None:
    ids, known = distinct(small, "small")
    batch = Batch(small, 1, drafter=Script(known), depth=3, clock=still)
    batch.add(row(small, ids, SamplingParams(max_tokens=26), emitted=known[:7]))
    assert tokens(drain(batch)[1]) == known[7:]


def test_a_model_that_cannot_roll_back_says_so() -> None:
    model = build("kimi_linear")
    ids, known = distinct(model, "kimi_linear")
    batch = Batch(model, 1, drafter=Script(known), clock=still)
    batch.add(row(model, ids, SamplingParams(max_tokens=26)))
    assert tokens(drain(batch)[1]) == known
    facts = batch.facts["speculation"]
    assert "verification fails" in facts["reason"]
    assert facts["rounds"] == 0


@pytest.mark.parametrize("place", ["begin", "propose", "settle"])
def test_an_answer_goes_on_without_a_drafter_that_fails(
    small: Model, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, known = distinct(small, "small")

    def fail(*_: Any) -> None:
        raise RuntimeError("broken drafter")

    drafter = Script(known)
    monkeypatch.setattr(drafter, place, fail)
    batch = Batch(small, 1, drafter=drafter, clock=still)
    batch.add(row(small, ids, SamplingParams(max_tokens=26)))
    events = drain(batch)[1]
    assert (tokens(events), events[-1].finish) == (known, "length")
    assert batch.facts["speculation"]["reason"] == "the drafter failed: broken drafter"


def test_a_drafter_that_is_wrong_rests(small: Model) -> None:
    ids, known = distinct(small, "small")
    params = SamplingParams(max_tokens=60)
    expected = tokens(plain(small, ids, params))
    batch = Batch(small, 1, drafter=Script(expected, wrong=1), depth=2, clock=still)
    batch.add(row(small, ids, params))
    assert tokens(drain(batch)[1]) == expected
    facts = batch.facts["speculation"]
    assert (facts["rounds"], facts["accepted"]) == (16, 0)
    assert known == expected[:26]


def test_ngrams_find_what_followed_before() -> None:
    drafter = NgramDrafter(longest=3, shortest=2)
    drafter.begin([1, 2, 3, 4, 5, 9, 1, 2], 3, None)
    assert drafter.propose([], 3, 3) == [4, 5, 9]
    drafter.settle([], [4, 5, 9], [4, 7], None)
    assert drafter.propose([], 7, 3) == []
    drafter.settle([], [], [3, 4], None)
    assert drafter.propose([], 4, 1) == [7]


def test_ngrams_of_a_long_prompt_are_entered_step_by_step() -> None:
    rng = random.Random(4)
    ids = [rng.randrange(2, 60_000) for _ in range(3 * READ_AT_ONCE)]
    drafter = NgramDrafter()
    drafter.begin([*ids, *ids[100:102]], ids[102], None)
    assert drafter.propose([], ids[102], 3) == []
    at = 103
    while not (found := drafter.propose([], ids[at - 1], 3)):
        drafter.settle([], [], [ids[at]], None)
        at += 1
    assert at == 105, "one step for each part of the prompt"
    assert found == ids[at : at + 3]
    # The latest of several places counts, also if it was entered first.
    drafter.begin([1, 2, 3, 7, *ids, 1, 2, 3, 8, *ids[:50], 1, 2], 3, None)
    for _ in range(4):
        drafter.settle([], [], [], None)
    assert drafter.propose([], 3, 1) == [8]


def test_ngrams_pay_where_an_answer_repeats(default_model: Model, tokenizer: Any) -> None:
    text = "one apple, two pears, three plums, four figs, five limes, "
    ids = tokenizer.encode((text * 4).rstrip(), add_special_tokens=False)
    params = SamplingParams(max_tokens=16)
    expected = tokens(plain(default_model, ids, params))
    batch = Batch(default_model, 1, drafter=NgramDrafter(), depth=4, clock=still)
    batch.add(row(default_model, ids, params))
    assert tokens(drain(batch)[1]) == expected
    facts = batch.facts
    assert facts["speculation"]["acceptance"] > 0.8
    assert facts["steps"] < 12


def test_the_models_own_head_drafts() -> None:
    from mlx_vlm.speculative.drafters.glm5_next_mtp import config as configs
    from mlx_vlm.speculative.drafters.glm5_next_mtp.glm5_next_mtp import Glm5NextMTPDraftModel

    model = build("glm5_next")
    head = Glm5NextMTPDraftModel(configs.Glm5NextMTPConfig(text_config=model.lm.args, block_size=3))
    mx.random.seed(8)
    head.load_weights(
        [
            (k, 1 + mx.zeros(v.shape) if "norm" in k else 0.1 * mx.random.normal(v.shape))
            for k, v in tree_flatten(head.parameters())
        ],
        strict=False,
    )
    drafter: Drafter = MtpDrafter(model, head)
    batch = Batch(model, 2, drafter=drafter, depth=2, clock=still)
    ids, known = distinct(model, "glm5_next")
    second = prompt_of("second", TALK)
    a = batch.add(row(model, ids, SamplingParams(max_tokens=26)))
    first = [event for _ in range(4) for event in batch.step()]
    b = batch.add(row(model, second, SamplingParams(max_tokens=5)))
    rest = drain(batch)
    assert tokens(first + rest[a]) == known
    assert tokens(rest[b]) == tokens(plain(model, second, SamplingParams(max_tokens=5)))
    facts = batch.facts["speculation"]
    assert facts["reason"] == ""
    assert facts["drafted"] >= 20


def test_what_is_no_head_is_refused(small: Model, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="no drafter can be loaded"):
        MtpDrafter.load(small, tmp_path)
    with pytest.raises(ModelError, match="no multi-token-prediction head"):
        MtpDrafter(small, object())
    with pytest.raises(ValueError, match="proposed"):
        Batch(small, 1, drafter=NgramDrafter(), depth=LONGEST + 1, clock=still)
