"""The official OpenAI client against the API: create, retrieve, continue, stream, cancel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_stack import Stack
from jobs_kit import eventually
from openai import OpenAI
from openai.types.responses import Response

from scheduler.api import responses

SAID = "You sent"


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client() as made:
        yield made


def ended(client: OpenAI, response: str) -> Response:
    """The response once it has reached its end."""

    def look() -> Response | None:
        found = client.responses.retrieve(response)
        return None if found.status in ("queued", "in_progress") else found

    found = eventually(look, f"{response} does not end")
    assert isinstance(found, Response)
    return found


def test_background_then_continued_then_streamed(stack: Stack, client: OpenAI) -> None:
    first = client.responses.create(
        model="test-model", input="What is the capital of France?", background=True,
        metadata={"job": "1"}, instructions="Be brief.",
    )  # fmt: skip
    assert first.status in ("queued", "in_progress", "completed")
    assert first.background is True
    done = ended(client, first.id)
    assert done.status == "completed"
    assert done.output_text.startswith(SAID)
    assert done.output[0].id == "msg_" + first.id.removeprefix("resp_")
    assert done.metadata == {"job": "1"}
    assert done.instructions == "Be brief."
    assert done.usage is not None
    assert done.usage.input_tokens == len(stack.workers.prompts[first.id])

    second = client.responses.create(
        model="test-model", input="And of Spain?", previous_response_id=first.id,
        instructions="Be brief.",
    )  # fmt: skip
    assert second.status == "completed"
    assert second.previous_response_id == first.id
    assert second.usage is not None
    held = len(stack.store.turn_ids(first.id)) - 1
    assert second.usage.input_tokens_details.cached_tokens == held
    prompt = stack.workers.prompts[second.id]
    assert prompt[: held + 1] == stack.store.turn_ids(first.id)
    text = stack.tokenizer.decode(prompt)
    assert text.count("Be brief.") == 1
    assert text.count(SAID) == 1
    assert text.endswith("And of Spain?<|im_end|>\n<|im_start|>assistant\n")

    events = list(
        client.responses.create(
            model="test-model", input="Last one.", previous_response_id=second.id, stream=True
        )
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1].type == "response.completed"
    final = events[-1].response
    joined = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert joined == final.output_text
    assert "東京 👩‍👩‍👧 é!" in joined
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {final.output[0].id}
    assert final.conversation is not None
    assert final.conversation.id == stack.store.get_turn(first.id).conversation


def test_a_stream_may_be_dropped_after_any_event(stack: Stack, client: OpenAI) -> None:
    whole = list(client.responses.create(model="test-model", input="Hi", stream=True))
    response = whole[0].response.id
    for cut in range(-1, len(whole) - 1):
        again = list(client.responses.retrieve(response, stream=True, starting_after=cut))
        assert [e.to_dict() for e in again] == [e.to_dict() for e in whole[cut + 1 :]]
    stack.stop_api()
    stack.start_api()
    with stack.client() as other:
        again = list(other.responses.retrieve(response, stream=True))
    assert [e.to_dict() for e in again] == [e.to_dict() for e in whole]


def test_a_live_stream_is_rejoined_without_gap_or_repeat(stack: Stack, client: OpenAI) -> None:
    stack.workers.may_finish.clear()
    seen = []
    with client.responses.create(
        model="test-model", input="Hi", background=True, stream=True
    ) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    assert stack.workers.halfway.wait(60)
    response = seen[0].response.id
    at = seen[-1].sequence_number
    with client.responses.retrieve(response, stream=True, starting_after=at) as stream:
        for number, event in enumerate(stream):
            seen.append(event)
            if number == 0:
                stack.workers.may_finish.set()
    assert [e.sequence_number for e in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"


def test_helpers_of_the_client(stack: Stack, client: OpenAI) -> None:
    with client.responses.stream(model="test-model", input="Hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text.startswith(SAID)
    with client.responses.stream(response_id=final.id, starting_after=3) as stream:
        assert next(iter(stream)).sequence_number == 4


def test_limit_of_tokens(stack: Stack, client: OpenAI) -> None:
    made = client.responses.create(model="test-model", input="Hi", max_output_tokens=3)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="test-model", input="Hi", max_output_tokens=3) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"
    follow = client.responses.create(
        model="test-model", input="Go on", previous_response_id=made.id
    )
    assert follow.status == "completed"


def test_cancel(stack: Stack, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "CANCEL_WAIT", 60.0)
    stack.workers.may_prefill.clear()
    made = client.responses.create(model="test-model", input="Hi", background=True)
    assert made.status == "queued"
    assert client.responses.retrieve(made.id).to_dict()["tandem"]["queue_position"] == 0
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    events = list(client.responses.retrieve(made.id, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="was cancelled"):
        client.responses.create(model="test-model", input="x", previous_response_id=made.id)

    stack.workers.open()
    stack.workers.may_finish.clear()
    running = client.responses.create(model="test-model", input="Hi", background=True)
    assert stack.workers.halfway.wait(60)
    stopped = client.responses.cancel(running.id)
    assert stopped.status == "cancelled"
    said = [e.delta for e in client.responses.retrieve(running.id, stream=True)
            if e.type == "response.output_text.delta"]  # fmt: skip
    assert stopped.output_text == "".join(said) != ""
    assert client.responses.retrieve(running.id).output == stopped.output
    assert stopped.to_dict()["tandem"]["computed_tokens"] is None, "nobody knows"
    stack.workers.open()
    done = client.responses.create(model="test-model", input="Hi", background=True)
    assert ended(client, done.id).status == "completed"
    assert client.responses.cancel(done.id).status == "completed"
    plain = client.responses.create(model="test-model", input="Hi")
    assert client.responses.cancel(plain.id).status == "completed"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_" + "0" * 32)


def test_a_failed_run_is_told_the_same_way_everywhere(stack: Stack, client: OpenAI) -> None:
    stack.workers.fail_with = "the model produced no number: try another prompt"
    made = client.responses.create(model="test-model", input="Hi")
    assert made.status == "failed"
    assert made.error is not None
    assert made.error.message == stack.workers.fail_with
    with client.responses.create(model="test-model", input="Hi", stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error == made.error
    with pytest.raises(openai.BadRequestError, match="was failed"):
        client.responses.create(model="test-model", input="x", previous_response_id=made.id)


def test_conversations(stack: Stack, client: OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Ada."}],
        metadata={"topic": "names"},
    )
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "names"}
    updated = client.conversations.update(conversation.id, metadata={"topic": "other"})
    assert updated.metadata == {"topic": "other"}
    one = client.responses.create(
        model="test-model", input="What is it?", conversation=conversation.id
    )
    prompt = stack.tokenizer.decode(stack.workers.prompts[one.id])
    assert prompt.index("Ada") < prompt.index("What is it?")
    two = client.responses.create(
        model="test-model", input="Sure?", conversation={"id": conversation.id}
    )
    assert stack.store.get_turn(two.id).parent == one.id
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert items[2].id == one.output[0].id
    got = client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
    assert got.content[0].text == "My name is Ada."
    inputs = list(client.responses.input_items.list(two.id))
    assert [item.content[0].text for item in inputs] == ["Sure?"]

    stack.workers.may_prefill.clear()
    stack.workers.may_decode.clear()
    running = client.responses.create(
        model="test-model", input="Again", conversation=conversation.id, background=True
    )
    with pytest.raises(openai.ConflictError, match=running.id):
        client.responses.create(model="test-model", input="No", conversation=conversation.id)
    with pytest.raises(openai.ConflictError, match="is still queued"):
        client.responses.create(model="test-model", input="No", previous_response_id=running.id)
    with pytest.raises(openai.ConflictError):
        client.conversations.delete(conversation.id)
    branch = client.responses.create(
        model="test-model", input="Or else?", previous_response_id=one.id, background=True
    )
    stack.workers.open()
    assert ended(client, branch.id).status == "completed"
    assert stack.store.get_turn(branch.id).parent == one.id
    assert ended(client, running.id).status == "completed"
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    for gone in (one, two, branch):  # with everything said in it
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="test-model", input="x", conversation=conversation.id)


def test_history_grows_by_what_is_said(stack: Stack, client: OpenAI) -> None:
    previous = None
    items = []
    for number in range(8):
        items.append({"role": "user", "content": f"Turn {number}."})
        made = client.responses.create(
            model="test-model", input=f"Turn {number}.", previous_response_id=previous
        )
        stateless = client.responses.create(model="test-model", input=items)
        assert made.usage.input_tokens == stateless.usage.input_tokens
        assert stack.workers.prompts[made.id] == stack.workers.prompts[stateless.id]
        stack.workers.say = lambda job, n=number: f"Answer {n}."
        items.append({"role": "assistant", "content": made.output_text})
        previous = made.id


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test-model"]
    assert client.models.retrieve("test-model").id == "test-model"
    with pytest.raises(openai.NotFoundError, match="use 'test-model'"):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="gpt-4o", input="Hi")
    assert caught.value.code == "model_not_found"


def test_delete_and_store_false(stack: Stack, client: OpenAI) -> None:
    made = client.responses.create(model="test-model", input="Secret")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="test-model", input="x", previous_response_id=made.id)
    assert stack.store.get_turn(made.id) is None
    kept = client.responses.create(model="test-model", input="Once", store=False)
    assert kept.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="test-model", input="x", previous_response_id=kept.id)


def test_a_response_outlives_its_record_in_redis(stack: Stack, client: OpenAI) -> None:
    made = client.responses.create(model="test-model", input="Hi", metadata={"a": "b"})
    for key in ("job", "events", "prompt"):
        stack.workers.runs.client.delete(f"tandem:{key}:{made.id}")
    later = client.responses.retrieve(made.id)
    assert later.output_text == made.output_text
    assert later.metadata == {"a": "b"}
    assert later.usage.total_tokens == made.usage.total_tokens
    events = list(client.responses.retrieve(made.id, stream=True))
    assert events[-1].response.output_text == made.output_text
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == made.output_text
    after = client.responses.create(model="test-model", input="x", previous_response_id=made.id)
    assert after.usage.input_tokens_details.cached_tokens > 0


def test_items_are_added_and_taken_back(stack: Stack, client: OpenAI) -> None:
    conversation = client.conversations.create()

    def say(text: str) -> Any:
        item: Any = {"type": "message", "role": "user", "content": text}
        return client.conversations.items.create(conversation.id, items=[item]).data[0]

    def ask(text: str) -> Any:
        return client.responses.create(model="test-model", input=text, conversation=conversation.id)

    def texts() -> list[str]:
        items = client.conversations.items.list(conversation.id, order="asc")
        return [item.content[0].text for item in items]

    say("One.")
    wrong = say("Wrong.")
    client.conversations.items.delete(wrong.id, conversation_id=conversation.id)
    first = ask("Two?")
    assert "Wrong" not in stack.tokenizer.decode(stack.workers.prompts[first.id])
    late = say("Three.")
    gone = say("Gone.")
    client.conversations.items.delete(gone.id, conversation_id=conversation.id)
    assert texts() == ["One.", "Two?", first.output_text, "Three."]
    # A branch does not take what waits for the conversation.
    client.responses.create(
        model="test-model", input="x", previous_response_id=first.id, store=False
    )
    second = ask("Four?")
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert texts() == [
        "One.", "Two?", first.output_text, "Three.", "Four?", second.output_text
    ]  # fmt: skip
    prompt = stack.tokenizer.decode(stack.workers.prompts[second.id])
    assert prompt.index("Three.") < prompt.index("Four?")
    with pytest.raises(openai.BadRequestError, match="stays"):
        client.conversations.items.delete(late.id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete("msg_x", conversation_id=conversation.id)


def test_what_waits_in_a_conversation_needs_no_input(stack: Stack, client: OpenAI) -> None:
    said: Any = {"type": "message", "role": "user", "content": "One."}
    name = client.conversations.create(items=[said]).id
    counted = client.responses.input_tokens.count(model="test-model", conversation=name)
    one = client.responses.create(model="test-model", conversation=name)
    assert counted.input_tokens == len(stack.workers.prompts[one.id])
    client.conversations.items.create(name, items=[{**said, "content": "Two."}])
    two = client.responses.create(model="test-model", conversation=name, input=[])
    prompt = stack.tokenizer.decode(stack.workers.prompts[two.id])
    assert prompt.index("One.") < prompt.index(one.output_text) < prompt.index("Two.")
    items = client.conversations.items.list(name, order="asc")
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]  # all are messages
    assert texts == ["One.", one.output_text, "Two.", two.output_text]
    for given in ({"conversation": name}, {"previous_response_id": two.id}, {"instructions": "x"}):
        body: Any = {"model": "test-model", **given}
        with pytest.raises(openai.BadRequestError, match="prompt is empty"):
            client.responses.create(**body)


def test_the_smallest_top_p_is_taken(client: OpenAI) -> None:
    assert client.responses.create(model="test-model", input="x", top_p=0).top_p == 0


def test_items_may_be_named(stack: Stack, client: OpenAI) -> None:
    first = client.responses.create(model="test-model", input="Hi")
    hello: Any = {"role": "user", "content": "Hi"}
    named: Any = {"type": "item_reference", "id": first.output[0].id}
    more: Any = {"role": "user", "content": "And?"}
    given = [hello, named, more]
    counted = client.responses.input_tokens.count(model="test-model", input=given)
    second = client.responses.create(model="test-model", input=given)
    prompt = stack.workers.prompts[second.id]
    past = stack.store.turn_ids(first.id)
    assert prompt[: len(past)] == past
    assert counted.input_tokens == len(prompt)
    name = client.conversations.create(items=[hello, {"id": first.output[0].id}]).id  # type: ignore[list-item]  # as older clients send it
    client.conversations.items.create(name, items=[named])
    items = client.conversations.items.list(name, order="asc")
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]  # all are messages
    assert texts == ["Hi", first.output_text, first.output_text]
    for wrong in ("msg_x", "msg_" + "0" * 32, first.output[0].id + "_7"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(
                model="test-model", input=[{"type": "item_reference", "id": wrong}, more]
            )
        assert caught.value.param == "input[0].id"
