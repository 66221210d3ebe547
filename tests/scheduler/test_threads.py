"""The digests under which a conversation's turns are found again."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.api import threads
from scheduler.api.prompt import Messages, messages_of
from scheduler.api.threads import Past, Threads, digest_of

text = st.sampled_from(["", "a", "b", "東"])
said = st.fixed_dictionaries(
    {
        "type": st.just("message"),
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": text.map(lambda t: [{"type": "input_text", "text": t}]),
    }
)
thought = text.map(lambda t: {"type": "reasoning", "content": [{"text": t}]})
call = st.just({"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'})
output = text.map(lambda t: {"type": "function_call_output", "call_id": "c", "output": t})
conversations = st.lists(said | thought | call | output, max_size=12)


@given(items=conversations, cuts=st.sets(st.integers(0, 12)), instructions=st.none() | text)
def test_messages_are_the_same_bit_by_bit(
    items: list[dict[str, Any]], cuts: set[int], instructions: str | None
) -> None:
    made, done = Messages(instructions), 0
    for cut in [*sorted(cuts), len(items)]:
        made.add(items[done:cut])
        done = max(done, cut)
        assert made.all() == messages_of(items[:cut], instructions)


odd = st.text(st.sampled_from('ab"\\\n\ud800東\x00'), max_size=6)


@given(
    items=conversations | st.lists(said | thought, max_size=12),
    cuts=st.sets(st.integers(0, 12)),
    instructions=st.none() | odd,
)
def test_digests_are_the_same_bit_by_bit(
    items: list[dict[str, Any]], cuts: set[int], instructions: str | None
) -> None:
    past, done = Past("m", instructions, ["x"]), 0
    for cut in [*sorted(cuts), len(items)]:
        past.add(items[done:cut])
        done = max(done, cut)
        assert past.digest() == digest_of(messages_of(items[:cut], instructions), "m", ["x"])


@given(st.lists(odd, min_size=1, max_size=5))
def test_a_system_message_has_one_digest_however_it_comes(texts: list[str]) -> None:
    past, items = Past("m", texts[0]), []
    for text in texts[1:]:
        items.append({"type": "message", "role": "system", "content": text})
        past.add(items[-1:])
        assert past.digest() == digest_of(messages_of(items, texts[0]), "m")


def test_however_many_answers_there_are_a_message_is_hashed_twice_at_most(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [
        {"type": "message", "role": role, "content": str(n)}
        for n in range(200)
        for role in ("user", "assistant")
    ]
    hashed = Counter[str]()
    digest = threads._digest

    def counting(message: dict[str, Any]) -> bytes:
        hashed[f"{message['role']} {message['content']}"] += 1
        return digest(message)

    monkeypatch.setattr(threads, "_digest", counting)
    assert not list(Threads(client, "counted", 600).candidates(items, None))
    assert len(hashed) == 2 * 199 - 1  # up to what the last but one answers
    assert max(hashed.values()) <= 2


def test_every_turn_of_a_conversation_is_found_by_what_it_answers(client: redis.Redis) -> None:
    models = itertools.count()

    @settings(max_examples=60, deadline=None)
    @given(items=conversations, instructions=st.none() | text)
    def check(items: list[dict[str, Any]], instructions: str | None) -> None:
        index = Threads(client, f"model {next(models)}", 600)  # which has no other turns
        question = {"type": "message", "role": "user", "content": "go on"}
        whole = [*items, question]
        named = {}
        # As each turn was entered when it was accepted, with what it answers alone.
        for _, start, stop in every_answer(whole):
            named[start] = f"resp_{start}"
            index.enter(named[start], whole[:start], instructions)
            assert stop > start
        found = list(index.candidates(whole, instructions))
        assert {start: name for name, start, _ in found if name == named[start]} == named
        assert [start for _, start, _ in found] == sorted(
            (start for _, start, _ in found), reverse=True
        )

    check()


def every_answer(items: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """(how many before, start, stop) of the runs of items that an assistant wrote."""
    found: list[tuple[int, int, int]] = []
    for at, item in enumerate(items):
        role, kind = item.get("role"), item["type"]
        if role != "assistant" and kind not in ("reasoning", "function_call"):
            continue
        if found and found[-1][2] == at:
            found[-1] = (*found[-1][:2], at + 1)
        elif at:
            found.append((len(found), at, at + 1))
        else:
            found.append((0, 0, 1))
    return [answer for answer in found if answer[1]]
