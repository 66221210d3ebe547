"""The rest of the OpenAI client's calls; streams dropped at every event; what `store` means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_stack import Stack
from jobs_kit import eventually
from openai import OpenAI

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client() as made:
        yield made


def test_a_stream_dropped_at_every_event_while_it_runs(stack: Stack) -> None:
    """Each connection tells one event more; the API is restarted in the middle."""
    workers = stack.workers
    workers.may_finish.clear()
    with stack.client() as client:
        made = client.responses.create(model="test-model", input="Hi", background=True)
        assert workers.halfway.wait(60)
        logged = workers.runs.client.xlen(f"tandem:events:{made.id}")
        seen: list[Any] = []

        def next_event(client: OpenAI) -> None:
            after = seen[-1].sequence_number if seen else -1
            with client.responses.retrieve(made.id, stream=True, starting_after=after) as stream:
                seen.append(next(iter(stream)))

        while len(seen) < logged:
            next_event(client)
        assert seen[-1].type == "response.output_text.delta"
    stack.stop_api()
    stack.start_api()
    with stack.client() as client:
        # From each place: the past again from the log, then what comes live.
        streams = [
            client.responses.retrieve(made.id, stream=True, starting_after=after)
            for after in range(-1, logged)
        ]
        tails = [[next(iter(s)) for _ in seen[n:]] for n, s in enumerate(streams)]
        for number, tail in enumerate(tails):
            assert [e.to_dict() for e in tail] == [e.to_dict() for e in seen[number:]]
        workers.may_finish.set()
        while not seen or seen[-1].type != "response.completed":
            next_event(client)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        for number, (tail, stream) in enumerate(zip(tails, streams, strict=True)):
            assert [*tail, *stream] == seen[number:]
        text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
        assert client.responses.retrieve(made.id).output_text == text
        assert "東京 👩‍👩‍👧 é!" in text


def test_signs_of_life_are_no_trouble_to_the_client(
    stack: Stack, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scheduler.api import stream

    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.2)
    stack.workers.may_prefill.clear()
    kinds: list[str] = []
    with client.responses.stream(model="test-model", input="Hi") as events:
        for event in events:
            kinds.append(event.type)
            if kinds.count("response.queued") == 3:
                stack.workers.may_prefill.set()
        final = events.get_final_response()
    assert kinds.count("response.queued") >= 3
    assert final.output_text.startswith("You sent")
    # Where a stream is gone on from its last number, nothing is missed and nothing comes twice.
    stack.workers.may_prefill.clear()
    seen: list[Any] = []
    with client.responses.create(model="test-model", input="Hi", background=True, stream=True) as s:
        for event in s:
            seen.append(event)
            if len(seen) == 5:
                break
    assert [event.sequence_number for event in seen] == [0, 1, 1, 1, 1]
    stack.workers.may_prefill.set()
    rest = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=1)
    numbers = [event.sequence_number for event in rest]
    assert sorted(set(numbers)) == list(range(numbers[-1] + 1))[-len(set(numbers)) :]
    assert set(range(2, numbers[-1] + 1)) <= set(numbers)


def test_stored_completions(stack: Stack, client: OpenAI) -> None:
    create, stored = client.chat.completions.create, client.chat.completions
    create(model="test-model", messages=HI)  # not stored
    system: Any = {"role": "system", "content": "Be kind."}
    made = [
        create(model="test-model", messages=[system, *HI], store=True, metadata={"n": str(n % 2)})
        for n in range(3)
    ]
    listed = list(stored.list(limit=2))
    assert [one.id for one in listed] == [one.id for one in made]
    assert listed[0].choices == made[0].choices
    assert [one.id for one in stored.list(order="desc", limit=1)] == [c.id for c in made[::-1]]
    assert [one.id for one in stored.list(metadata={"n": "1"})] == [made[1].id]
    assert list(stored.list(model="other")) == []
    assert stored.retrieve(made[0].id).choices == made[0].choices
    updated = stored.update(made[0].id, metadata={"n": "7"})
    assert updated.to_dict()["metadata"] == {"n": "7"}
    assert [one.id for one in stored.list(metadata={"n": "7"})] == [made[0].id]
    messages = list(stored.messages.list(made[0].id))
    assert [(m.role, m.content) for m in messages] == [("system", "Be kind."), ("user", "Hi")]
    assert stored.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        stored.retrieve(made[0].id)
    plain = client.responses.create(model="test-model", input="Hi")
    with pytest.raises(openai.NotFoundError):
        stored.retrieve("chatcmpl-" + plain.id.removeprefix("resp_"))


def test_compaction(stack: Stack, client: OpenAI) -> None:
    first = client.responses.create(model="test-model", input="My name is Ada.")
    stack.workers.say = lambda job: "The user is Ada."
    compact = client.responses.compact(
        model="test-model", previous_response_id=first.id, input="Remember me."
    )
    stack.workers.say = lambda job: "Hello Ada."
    assert [item.type for item in compact.output] == ["message", "message", "compaction"]
    assert compact.usage.output_tokens > 0
    assert compact.usage.input_tokens_details.cached_tokens > 0
    assert stack.store.get_turn(compact.id) is None
    sent: Any = [item.to_dict(warnings=False) for item in compact.output]
    question: Any = {"role": "user", "content": "Who am I?"}
    made = client.responses.create(model="test-model", input=[*sent, question])
    prompt = stack.tokenizer.decode(stack.workers.prompts[made.id])
    assert prompt.index("My name is Ada.") < prompt.index("The user is Ada.")
    assert prompt.index("The user is Ada.") < prompt.index("Who am I?")
    items = client.responses.input_items.list(made.id, order="asc").data
    assert [item.type for item in items] == ["message", "message", "compaction", "message"]
    # Nothing else is taken for a summary, however it is packed.
    for content in ("", "x", "eJzt", "A" * 5000):
        item: Any = {"type": "compaction", "encrypted_content": content}
        with pytest.raises(openai.BadRequestError, match="not what this server made"):
            client.responses.create(model="test-model", input=[item])


def test_what_is_not_stored_leaves_nothing(stack: Stack, client: OpenAI) -> None:
    redis = stack.workers.runs.client
    before = {key for key in redis.keys("*") if b"worker" not in key}
    made = client.responses.create(model="test-model", input="Secret zebra", store=False)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert stack.store.get_turn(made.id) is None
    assert stack.store.list_conversations() == []
    listed = client.get("/responses", cast_to=object)
    assert listed == {"object": "list", "data": []}
    for kind in ("job", "events", "prompt"):
        assert 0 < redis.ttl(f"tandem:{kind}:{made.id}") <= 60  # type: ignore[operator]  # an int
        redis.delete(f"tandem:{kind}:{made.id}")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    left = [key for key in redis.keys("*") if key not in before]
    values = b"".join(redis.dump(key) for key in left)  # type: ignore[misc]  # bytes
    assert made.id.encode() not in b"".join(k for k in left if k.startswith(b"tandem:jobs"))
    assert b"zebra" not in values
    for chat in (True, False):
        found = client.chat.completions.create(
            model="test-model", messages=[{"role": "user", "content": "Hi"}], store=chat
        )
        turn = stack.store.get_turn("resp_" + found.id.removeprefix("chatcmpl-"))
        assert (turn is not None) is chat


def test_counting(stack: Stack, client: OpenAI) -> None:
    made = client.responses.create(model="test-model", input="Hi", instructions="Be brief.")
    assert made.usage is not None
    count = client.responses.input_tokens.count(
        model="test-model", input="Hi", instructions="Be brief."
    )
    assert count.input_tokens == made.usage.input_tokens
    after = client.responses.input_tokens.count(
        model="test-model", input="More", previous_response_id=made.id
    )
    assert after.input_tokens > made.usage.total_tokens


def test_the_job_ends_even_if_nobody_listens(stack: Stack, client: OpenAI) -> None:
    stack.workers.may_finish.clear()
    with client.responses.create(model="test-model", input="Hi", background=True, stream=True) as s:
        made = next(iter(s)).response
    stack.workers.may_finish.set()
    eventually(lambda: client.responses.retrieve(made.id).status == "completed", "it stopped")
