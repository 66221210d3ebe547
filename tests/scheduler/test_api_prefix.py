"""A prompt whose beginning is stored goes where that is; how much of one is a preamble."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_kit import FAMILIES, make_model_dir
from api_stack import Stack
from redis_kit import eventually

from scheduler.api.edits import before_last
from scheduler.api.preamble import LEAST_TOKENS, Preambles
from scheduler.api.prompt import build, common_prefix
from scheduler.api.tokenizer import Tokenizer
from scheduler.extension import Costs, worth_resuming
from scheduler.jobs import Jobs
from scheduler.record import Job
from store.remote import Remote
from store.serving import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))
from made_states import MODEL, make_state

SYSTEM = "You answer questions about trains in full sentences. " * 12
TOOL = {"type": "function", "name": "look", "description": "Look a train up. " * 20}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_preamble_ends_where_the_users_words_begin(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = Tokenizer.load(make_model_dir(tmp_path_factory.mktemp("p") / "m", family))
    preambles = Preambles(tokenizer)
    prompts = [
        build(tokenizer, [user(text)], instructions=SYSTEM).ids
        for text in ("When does it leave?", "Why?", "Which one: 7 or 9?")
    ]
    counts = [preambles.tokens(ids, [user("?")], instructions=SYSTEM) for ids in prompts]
    assert len(set(counts)) == 1
    assert counts[0] > LEAST_TOKENS
    head = tokenizer.decode(prompts[0][: counts[0]])
    assert SYSTEM.strip() in head
    assert "leave" not in head
    assert len({tuple(ids[: counts[0]]) for ids in prompts}) == 1
    # The same words as a message of the system, and as the developer's.
    for role in ("system", "developer"):
        items = [{"type": "message", "role": role, "content": SYSTEM}, user("Why?")]
        assert preambles.tokens(build(tokenizer, items).ids, items) == counts[0]


def test_short_or_none_is_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer.load(make_model_dir(tmp_path_factory.mktemp("p") / "m"))
    preambles = Preambles(tokenizer)
    ids = build(tokenizer, [user("Why?")], instructions="Be brief.").ids
    assert preambles.tokens(ids, [user("Why?")], instructions="Be brief.") == 0
    assert preambles.tokens(ids, [user("Why?")]) == 0
    # A prompt that was rendered otherwise shares only what it shares.
    assert preambles.tokens([5, 6, 7], [user("Why?")], instructions=SYSTEM) == 0


def test_tools_belong_to_the_preamble(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer.load(make_model_dir(tmp_path_factory.mktemp("p") / "m", "tools"))
    ids = build(tokenizer, [user("Why?")], tools=[TOOL]).ids
    count = Preambles(tokenizer).tokens(ids, [user("Why?")], tools=[TOOL])
    head = tokenizer.decode(ids[:count])
    assert "Look a train up." in head
    assert "Why?" not in head


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (Costs(100, 50), True),
        (Costs(30_000, 5_000), True),
        (Costs(3_000, 30_000), False),
        (Costs(3_000, 30_000, 1000, 5000, 1e9, 0, 1e8, 11_000), False),
        (Costs(90_000, 10_000, 1000, 5000, 1e9, 0, 1e8, 11_000), True),
        (Costs(3_000, 10_000, 1000, 5000, 1e9, 60.0, 1e8, 11_000), True),
    ],
)
def test_a_stored_beginning_is_used_where_that_is_sooner(costs: Costs, expected: bool) -> None:
    assert worth_resuming(costs, 2048) is expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_where_the_last_message_begins(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = Tokenizer.load(make_model_dir(tmp_path_factory.mktemp("p") / "m", family))
    said = {"type": "message", "role": "assistant", "content": "At seven. " * 40}
    before = [user("When does it leave? " * 40), said]
    texts = ["And then?", "Where to, and <|im_end|>?", " Why? " * 90]
    prompts = [build(tokenizer, [*before, user(text)], instructions=SYSTEM).ids for text in texts]
    for ids, text in zip(prompts, texts, strict=True):
        items = [*before, user(text)]
        place = before_last(tokenizer, ids, items, instructions=SYSTEM)
        shared = min(common_prefix(ids, other) for other in prompts if other is not ids)
        assert shared - 3 <= place <= shared
        assert before_last(tokenizer, ids, items, len(ids) - 100, instructions=SYSTEM) == 0
    # What comes after the message, as an agent's calls, does not change where it begins.
    more = [*before, user("And then?"), said, user("Where to?")]
    place = before_last(tokenizer, build(tokenizer, more).ids, more)
    assert place >= len(build(tokenizer, [*before, user("And then?")]).ids)


def test_no_place_before_a_first_or_short_message(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer.load(make_model_dir(tmp_path_factory.mktemp("p") / "m"))
    for items in ([user("Why?" * 400)], [user("a"), user("b")], []):
        ids = build(tokenizer, items).ids if items else [5] * 900
        assert before_last(tokenizer, ids, items) == 0
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    seen = {"type": "message", "role": "user", "content": [image]}
    assert before_last(tokenizer, [5] * 900, [user("a" * 900), seen]) == 0


# --- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture
def stack(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr("scheduler.api.placement.LEAST_STORED", LEAST_TOKENS)
    with Stack(redis_url) as running:
        running.store.serve(MODEL, 16)
        running.workers.may_prefill.clear()
        running.workers.may_decode.clear()
        yield running


def submit(stack: Stack, text: str, **more: Any) -> Job:
    body = {"model": "default", "input": text, "instructions": SYSTEM, "background": True, **more}
    answer = httpx.post(f"{stack.url}/v1/responses", json=body)
    assert answer.status_code in (200, 202), answer.text
    return Jobs(stack.workers.runs.client).get(answer.json()["id"], prompt=True)


def test_a_stored_beginning_decides_where_a_job_goes(stack: Stack) -> None:
    first = submit(stack, "When does it leave?", user="anna")
    assert (first.stage, first.held_tokens) == ("prefill", 0)
    told = first.request["prompt"]["preamble"]
    cut = told - told % 16
    assert LEAST_TOKENS < told < first.prompt_tokens
    ids = first.prompt_ids[:cut]
    stack.store.save_prefix(first.owner, ids, *make_state(ids))
    second = submit(stack, "Why?", user="anna")
    assert (second.stage, second.held_tokens) == ("decode", cut)
    assert second.route == {"extend": "decode", "reason": f"{cut} tokens of the prompt are stored"}
    whole = submit(stack, "Why?", user="anna", metadata={"tandem_prefix": "off"})
    assert (whole.stage, whole.held_tokens) == ("prefill", 0)
    assert whole.request["prompt"]["preamble"] == whole.request["prompt"]["last"] == 0
    assert first.request["prompt"]["last"] == pytest.approx(told, abs=2)
    other = submit(stack, "Why?", user="bert")
    assert other.owner != second.owner
    assert (other.stage, other.held_tokens) == ("prefill", 0)
    stack.rpc.close()
    third = submit(stack, "Where?", user="anna", store=True)
    assert (third.stage, third.held_tokens) == ("prefill", 0), "the store is away"


def test_the_store_of_another_machine_is_asked_over_tcp(stack: Stack) -> None:
    stack.rpc.close()
    assert not stack.backend.health()["store"]
    secret = b"s" * 32
    far = serve(stack.store, stack.dir / "far")
    try:
        remote = far.offer(Remote("127.0.0.1", 0, secret))
        stack.present[1].update(rpc=str(remote), secret=secret.hex())
        eventually(lambda: stack.backend.health()["store"], "the store is not reached")
        job = submit(stack, "When does it leave?", user="anna")
        ids = job.prompt_ids[:64]
        stack.store.save_prefix(job.owner, ids, *make_state(ids))
        assert submit(stack, "Why?", user="anna").held_tokens == 64
    finally:
        far.close()


def test_a_long_message_that_was_sent_before_goes_where_its_state_is(stack: Stack) -> None:
    stack.workers.may_prefill.set()
    stack.workers.may_decode.set()
    first = submit(stack, "When does it leave?", user="anna")
    client = stack.workers.runs.client
    eventually(lambda: Jobs(client).get(first.id).status == "completed", "it is not answered")
    stack.workers.may_prefill.clear()
    stack.workers.may_decode.clear()
    long = "And where does it go then? " * 60
    second = submit(stack, long, user="anna", previous_response_id=first.id)
    assert 0 < second.held_tokens < second.prompt_tokens - 400
    ids = second.prompt_ids[:-1]
    stack.store.save_prefix(second.owner, ids, *make_state(ids), gain=400)
    again = submit(stack, long, user="anna", previous_response_id=first.id)
    assert (again.stage, again.held_tokens) == ("decode", len(ids))
    assert again.previous == first.id
    short = submit(stack, "Why?", user="anna", previous_response_id=first.id)
    assert short.held_tokens == second.held_tokens


def test_a_wish_that_is_unknown_is_refused(stack: Stack) -> None:
    body = {"model": "default", "input": "Why?", "metadata": {"tandem_prefix": "never"}}
    answer = httpx.post(f"{stack.url}/v1/responses", json=body)
    assert answer.status_code == 400
    assert "not one of auto, off" in answer.json()["error"]["message"]


def test_a_short_beginning_is_computed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.api.placement.LEAST_STORED", 10_000)
    first = submit(stack, "When does it leave?", user="anna")
    ids = first.prompt_ids[:64]
    stack.store.save_prefix(first.owner, ids, *make_state(ids))
    assert submit(stack, "Why?", user="anna").held_tokens == 0
