"""A decode node that speculates says what it would have said without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from decode_kit import Node, make_job, replay_of
from model_dirs import make_mtp_model

from engine.device import prepare
from engine.drafters import Drafter, find_drafter
from engine.errors import ModelError
from engine.model import Model, load
from engine.solo import answer
from engine.text import load_tokenizer
from scheduler.execution import Execution, Finished
from scheduler.record import Job
from worker_decode.answers import sampling

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "probabilities": {"temperature": 0.7, "seed": 2, "top_logprobs": 2},
}


def still() -> float:
    """A clock by which rounds are never slower than plain steps: a stall ends no drafting."""
    return 0.0


@pytest.fixture
def node(loaded: Model, words: Any, model_path: Path, tmp_path: Path) -> Iterator[Node]:
    """The draft model is the model itself, so that nearly every proposal is right."""
    decode = {"drafter": str(model_path), "draft_tokens": 4, "slots": 4}
    made = Node(loaded, words, tmp_path, decode=decode)
    made.engine._batch._clock = still
    yield made
    made.close()


def ask(which: int, tokens: int, **params: Any) -> Job:
    ids = [20 + (which * 31 + i * 17 + i * i) % 380 for i in range(30 + which)]
    request = {
        "input": [{"role": "user", "content": "?"}],
        "params": {"max_output_tokens": tokens, **params},
    }
    return make_job(ids, request=request)


def run(node: Node, jobs: list[Job]) -> dict[str, Finished]:
    """All of them in one batch, each joining a step after the one before."""
    waiting = [node.execution(job) for job in jobs]
    ended: dict[str, Finished] = {}
    while len(ended) < len(jobs):
        if waiting:
            execution: Execution = waiting.pop(0)
            node.engine.add(execution, execution.job)
        for finished in node.engine.step():
            assert finished.error is None, finished.error
            assert finished.commit is not None
            finished.commit()
            ended[finished.execution.job.id] = finished
    return ended


def alone(node: Node, job: Job, words: Any) -> list[int]:
    params = sampling(job, node.model.eos_ids, 512)
    return answer(node.model, job.prompt_ids, (), params, tokenizer=words).tokens


def speculation(finished: Finished) -> dict[str, Any]:
    assert finished.result is not None
    found: dict[str, Any] = finished.result.path["speculation"]
    return found


def test_answers_in_every_form_are_the_oracles(node: Node, words: Any) -> None:
    jobs = [ask(i, 24 + i, **form) for i, form in enumerate(FORMS.values())]
    ended = run(node, jobs)
    for job in jobs:
        assert node.said(job) == alone(node, job, words)
    counts = [speculation(finished) for finished in ended.values()]
    assert all(count["drafted"] >= count["accepted"] for count in counts)
    assert sum(count["accepted"] for count in counts) > 8
    for finished in ended.values():
        assert finished.result is not None
        path = finished.result.path
        assert max(map(int, path["blocks"])) > 1
        assert path["chunks"] == [[path["chunks"][0][0], 1]]
        assert path["way"] == {
            "kernels": "fallback",
            "rows": "merged",
            "reason": "",
            "drafter": "model",
        }
    facts = node.engine.facts()["decode"]["speculation"]
    assert (facts["drafter"], facts["reason"], facts["batch_reason"]) == ("model", "", "")


def test_a_stop_string_across_tokens_ends_text_and_state(node: Node, words: Any) -> None:
    found = 0
    for which in range(7, 40):
        whole = alone(node, ask(which, 24), words)
        at = 6 + which % 8
        stop = words.decode(whole[at : at + 2])[1:]
        if len(whole) < 24 or len(stop) < 2 or "\ufffd" in stop:
            continue
        job = ask(which, 24, stop=[stop])
        run(node, [job])
        said = node.said(job)
        assert said == alone(node, job, words)
        found += len(said) < 24
        held = node.engine.kept.hot.get(job.id)
        assert held is not None
        assert held.ids == [*job.prompt_ids, *said[:-1]]
        assert held.pending == said[-1:]
        node.model.check_position(held.caches, len(held.ids))
        if found == 6:
            return
    raise AssertionError("too few answers with a stop string")


def test_a_grammar_is_kept(node: Node, loaded: Model, words: Any, tmp_path: Path) -> None:
    params = {"grammar": {"kind": "json_schema", "text": json.dumps(SCHEMA)}}
    job = ask(3, 60, **params)
    run(node, [job, ask(4, 30)])
    text = "".join(event.get("delta", "") for event in node.events[job.id])
    ordinary = Node(loaded, words, tmp_path / "ordinary", decode={"drafter": "off"})
    same = ask(3, 60, **params)
    ordinary.answer(same)
    assert node.said(job) == ordinary.said(same)
    assert ordinary.engine.facts()["decode"].get("speculation") is None
    ordinary.close()
    assert text.startswith("{")


def test_a_grammar_is_compiled_before_its_answer_is_added(
    loaded: Model, words: Any, tmp_path: Path
) -> None:
    node = Node(loaded, words, tmp_path / "ahead", decode={"drafter": "off"})
    job = ask(3, 8, grammar={"kind": "json_schema", "text": json.dumps(SCHEMA)})
    execution = node.execution(job)
    node.engine.prepare(execution, job)
    assert execution.notes.meter.work["grammar_compiles"] == 1
    node.run(execution)
    assert execution.notes.meter.work["grammar_compiles"] == 1
    node.close()


def test_a_retried_answer_goes_on_where_the_log_ends(node: Node, words: Any) -> None:
    job = ask(5, 24)
    run(node, [job])
    events = node.events.pop(job.id)
    for count in (3, 9, len(events) - 1):
        again = make_job(job.prompt_ids, request=job.request)
        node.answer(again, replay_of(events[:count]))
        said = [t for event in events[:count] for t in event.get("ids", ())] + node.said(again)
        assert said == alone(node, job, words)


def test_a_resumed_conversation_is_the_oracles(node: Node, words: Any) -> None:
    job = ask(6, 20)
    run(node, [job])
    ids = [*node.store.turn_ids(job.id), *range(40, 60)]
    more = make_job(ids, previous=job.id, request=job.request)
    finished = node.answer(more)
    assert finished.result is not None
    assert finished.result.path["path"] == "hot"
    assert finished.result.computed_tokens == len(ids) - len(job.prompt_ids) - 19
    assert node.said(more) == node.oracle(more)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_mtp_model(tmp_path_factory.mktemp("mtp") / "tiny"), prepare())


def test_a_models_own_head_is_found_and_drafts(glm: Model, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(glm.path)
    node = Node(glm, tokenizer, tmp_path)
    node.engine._batch._clock = still
    jobs = [ask(i, 20 + i, seed=i, temperature=0.5 * i) for i in range(3)]
    ended = run(node, jobs)
    for job in jobs:
        assert node.said(job) == alone(node, job, tokenizer)
    facts = node.engine.facts()["decode"]["speculation"]
    assert (facts["drafter"], facts["reason"], facts["batch_reason"]) == ("mtp", "", "")
    assert sum(speculation(each)["drafted"] for each in ended.values()) > 8
    node.close()
    drafter, why = find_drafter(glm, str(glm.path))
    assert (drafter and drafter.name, why) == ("mtp", "asked for")


def test_rows_share_a_head_without_seeing_each_other(glm: Model) -> None:
    found = find_drafter(glm, "mtp")[0]
    assert found is not None
    mx.random.seed(2)
    seen = [mx.random.normal((1, 4, glm.lm.args.hidden_size)) for _ in range(2)]

    def steps(row: int, drafter: Drafter) -> Iterator[list[int]]:
        """A row's proposals: two of the first three are right, then none, then all."""
        ids = list(range(20 + row, 40))
        drafter.begin(ids, 7 + row, seen[row][:, :1])
        for accepted in (2, 0, 3):
            drafted = drafter.propose(ids, 7, 3)
            yield drafted
            drafter.settle(ids, drafted, [*drafted[:accepted], 9], seen[row])

    apart = [list(steps(row, found.fresh())) for row in range(2)]
    together: list[list[list[int]]] = [[], []]
    rows = [steps(row, found.fresh()) for row in range(2)]
    together[0].append(next(rows[0]))  # and the other begins while this one waits for its verdict
    for _ in range(3):
        for row in (1, 0):
            together[row] += [drafted for drafted in [next(rows[row], None)] if drafted]
    assert together == apart


def test_a_drafter_that_cannot_be_had_is_refused(loaded: Model, words: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="names a model directory"):
        Node(loaded, words, tmp_path, decode={"drafter": str(tmp_path / "none")})
