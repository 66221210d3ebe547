"""Heads that change on every request, and sessions that agents name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from api_kit import make_model_dir
from api_stack import Stack
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_kit import eventually
from openai import OpenAI
from pydantic import ValidationError
from redis_kit import Server

from scheduler.api import heads, sessions
from scheduler.api.tokenizer import Tokenizer
from scheduler.config import Config
from scheduler.jobs import Jobs
from scheduler.nodes import Node, Presence

RULES = " ".join(f"Rule {n}: be brief and kind, and say what you know." for n in range(12))
LINE = "x-anthropic-billing-header: cc_version=2.1; cch={:05d};"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture(scope="module")
def stack(server: Server) -> Iterator[Stack]:
    with Stack(server.url) as running:
        yield running


@pytest.fixture(scope="module")
def normalising(server: Server) -> Iterator[Stack]:
    api: Any = {"normalise_head": [r"x-anthropic-billing-header: [^\n]*\n*", r"Time \d+:\d+\."]}
    with Server() as other, Stack(other.url, api=api) as running:
        yield running


def details(client: OpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    made = client.chat.completions.create(model="test-model", messages=messages, **more)
    assert made.model_extra is not None
    found: dict[str, Any] = made.model_extra["tandem"]
    return found.get("details") or {}


def asked(system: str, text: str = "Hi") -> list[Any]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def test_a_changed_head_is_named_with_what_it_costs(stack: Stack) -> None:
    with stack.client() as client:
        assert "prompt_head" not in details(client, asked(f"{LINE.format(1)}\n{RULES}"))
        head = details(client, asked(f"{LINE.format(2)}\n{RULES}"))["prompt_head"]
        assert "00001" in head["was"]
        assert "00002" in head["now"]
        assert head["was"] != head["now"]
        rules = len(stack.tokenizer.encode(RULES))
        assert head["changed_at"] < 60
        assert rules <= head["cost_tokens"] <= rules + 30
        last = Jobs(stack.workers.runs.client).list(limit=1)[0]
        explained = client.get(f"/responses/{last.id}/ledger", cast_to=object)
        assert explained["details"]["prompt_head"] == head  # type: ignore[index]  # JSON
        # Two changes, and more said since.
        messages = [*asked(f"{LINE.format(3)} Day 7.\n{RULES}"), *asked("x", "More")[1:]]
        head = details(client, messages)["prompt_head"]
        assert rules <= head["cost_tokens"] <= rules + 40


def test_no_word_where_nothing_of_the_kind_happened(stack: Stack) -> None:
    with stack.client() as client:
        other = " ".join(f"Law {n} is older than any other law here." for n in range(20))
        first = asked(f"{other} One.", "What is the first of them all?")
        made = client.chat.completions.create(model="test-model", messages=first)  # type: ignore[arg-type]  # JSON
        text = made.choices[0].message.content
        for messages in (
            first,  # once more
            asked(f"{other} One.", "And which one is the last of them?"),  # another question
            asked(f"{other} Two.", "What is the first of them all?"),  # changed near its end
            [*first, {"role": "assistant", "content": text}, *asked("", "Thanks")[1:]],  # goes on
            asked("Something else.", "What is the first of them all?"),
        ):
            assert "prompt_head" not in details(client, messages)


def test_the_head_is_normalised_where_that_is_wanted(normalising: Stack) -> None:
    with normalising.client() as client:
        first = details(client, asked(f"{LINE.format(1)}\n\n{RULES}"))
        second = client.chat.completions.create(
            model="test-model",
            messages=asked(f"{LINE.format(2)}\n\n{RULES} Time 12:30."),
        )
        last = Jobs(normalising.workers.runs.client).list(limit=2)
    assert first["head_normalised"] == 1
    assert second.model_extra is not None
    assert second.model_extra["tandem"]["details"]["head_normalised"] == 2
    prompts = [normalising.workers.prompts[job.id] for job in last]
    text = normalising.tokenizer.decode(prompts[0])
    assert "billing" not in text
    assert "12:30" not in text
    with Anthropic(base_url=normalising.url, api_key="none", max_retries=0) as other:
        made = other.messages.create(
            model="test-model", max_tokens=50, messages=[{"role": "user", "content": LINE}],
            system=[{"type": "text", "text": LINE.format(7)}, {"type": "text", "text": RULES}],
        )  # fmt: skip
        prompt = normalising.workers.prompts["resp_" + made.id.removeprefix("msg_")]
        # Only the head is touched, never what the user says.
        assert normalising.tokenizer.decode(prompt).count("billing") == 1
        counted = other.messages.count_tokens(
            model="test-model", messages=[{"role": "user", "content": LINE}],
            system=[{"type": "text", "text": LINE.format(8)}, {"type": "text", "text": RULES}],
        )  # fmt: skip
        assert counted.input_tokens == len(prompt)


def test_patterns_are_checked_when_they_are_read() -> None:
    for wrong, why in (("(", "no regular expression"), ("x*", "matches nothing")):
        with pytest.raises(ValidationError, match=why):
            Config.model_validate({"api": {"normalise_head": [wrong]}})
    config = Config.model_validate({"api": {"normalise_head": "a,b\nc+"}})
    assert config.api.normalise_head == ("a,b", "c+")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_model_dir(Path(tmp_path_factory.mktemp("m")) / "m"))


@settings(max_examples=200, deadline=None)
@given(
    lead=st.integers(0, 40), was=st.integers(0, 30), now=st.integers(0, 30),
    tail=st.integers(20, 400), more=st.integers(0, 30),
)  # fmt: skip
def test_any_change_is_measured(
    tokenizer: Tokenizer, lead: int, was: int, now: int, tail: int, more: int
) -> None:
    head = [300 + n % 7 for n in range(lead)]
    rest = [(n * n + n // 3) % 250 + 20 for n in range(tail)]
    old = [*head, *[310 + n % 5 for n in range(was)], *rest]
    new = [*head, *[330 + n % 5 for n in range(now)], *rest, *[350] * more]
    found = heads.compare(tokenizer, old, new)
    if not was and not now:
        assert found is None
    elif lead <= heads.HEAD_SHARE * len(new):
        assert found is not None
        assert (found["changed_at"], found["cost_tokens"]) == (lead, tail)
        assert len(found["was"]) <= heads.EXCERPT


def test_sessions_are_shown_and_share_nothing(stack: Stack) -> None:
    def session(headers: dict[str, str], **more: Any) -> Any:
        with stack.client() as client:
            made = client.responses.create(
                model="test-model", input="Who is it?", extra_headers=headers, **more
            )
        return made.to_dict()["tandem"]["session"]

    assert session({}) is None
    assert session({"x-session-id": "a"}) == "a"
    assert session({"session-id": "b", "x-session-id": "a"}) == "b"
    assert session({"x-claude-code-session-id": "c", "session-id": "b"}) == "c"
    assert session({}, prompt_cache_key="d") == "d"
    assert session({"x-session-id": "e"}, prompt_cache_key="d") == "e"
    assert session({"x-session-id": ""}, prompt_cache_key="d") == "d"
    assert len(session({"x-session-id": "x" * 3000})) == 256
    jobs = Jobs(stack.workers.runs.client).list(limit=8)
    assert {job.owner for job in jobs} == {""}
    # All are the same request, whatever they call themselves; each is a conversation of its own.
    assert len({tuple(stack.workers.prompts[job.id]) for job in jobs}) == 1
    assert len({job.conversation for job in jobs}) == len(jobs)


def test_a_session_stays_on_its_node(stack: Stack) -> None:
    other = Presence(stack.config.redis_url, Node("decode", "other", state="ready"), ttl=60)
    stack.workers.may_prefill.clear()
    headers = {"x-session-id": "sticky"}
    redis = stack.workers.runs.client
    try:
        with stack.client() as client:

            def node(headers: dict[str, str]) -> str:
                made = client.responses.create(
                    model="test-model", input="Hi", background=True, extra_headers=headers
                )
                client.responses.cancel(made.id)
                return str(made.to_dict()["tandem"]["node"])

            assert node(headers) == "local"
            other.start()
            key = sessions.key_of("", "sticky")
            assert 0 < redis.ttl(key) <= sessions.KEEP  # type: ignore[operator]  # an int

            def moved() -> bool:
                redis.hset(key, "node", "other")
                return node(headers) == "other"

            eventually(moved, "the session leaves its node")
            assert node(headers) == "other"
            assert node({"x-session-id": "another"}) == "local"
            redis.hset(key, "node", "gone")
            assert node(headers) == "local"
    finally:
        other.stop()
        stack.workers.open()


def test_a_session_keeps_its_latest_state(stack: Stack) -> None:
    headers = {"x-session-id": "kept"}
    with stack.client() as client:
        first = client.responses.create(model="test-model", input="One", extra_headers=headers)
        touched: list[str] = []
        whole = stack.store.touch
        stack.rpc.add("touch", lambda turn_id: (touched.append(turn_id), whole(turn_id))[1])
        client.responses.create(model="test-model", input="Aside", extra_headers=headers)
        client.responses.create(model="test-model", input="Aside")
    assert touched == [first.id]
