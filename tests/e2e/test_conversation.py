"""One conversation after another on a whole stack: cold, hot, restored, together, and restarted."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from openai import OpenAI
from stack_kit import Running, short_directory, text_of

#: On a slow machine one answer may be over before the next has been asked for.
TRIES = 6
TEXT = files("scheduler").joinpath("data/alice.txt").read_text(encoding="utf-8")


def test_official_client_submits_in_background_resumes_by_id_and_streams(stack: Running) -> None:
    client = OpenAI(base_url=f"{stack.config.api_url}/v1", api_key="none", max_retries=0)
    first = client.responses.create(
        model=stack.config.model_name,
        input=f"{TEXT[:1500]}\n\nWho ran close by Alice?",
        max_output_tokens=12,
        temperature=0,
        background=True,
    )
    assert first.status in ("queued", "in_progress")
    stack.ended(first.id)
    done = client.responses.retrieve(first.id)
    assert done.status in ("completed", "incomplete")
    assert done.usage is not None
    assert done.usage.output_tokens == len(stack.output_ids(first.id)) <= 12
    assert stack.output_ids(first.id) == stack.solo(first.id)

    state = stack.saved(first.id)
    stack.wait_left(first.id)
    stream = client.responses.create(
        model=stack.config.model_name,
        input="What did it take out of its pocket?",
        previous_response_id=first.id,
        max_output_tokens=12,
        temperature=0,
        stream=True,
    )
    events = list(stream)
    # Signs of life on a slow machine repeat the number before them.
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(numbers[-1] + 1))
    assert events[-1].type in ("response.completed", "response.incomplete")
    last = events[-1].response  # type: ignore[union-attr]
    said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert said == last.output_text
    facts = stack.get(last.id)["tandem"]
    assert facts["path"] == "restored"
    assert facts["new_tokens"] == facts["prompt_tokens"] - state["tokens"]
    assert facts["computed_tokens"] == facts["new_tokens"]
    assert stack.output_ids(last.id) == stack.solo(last.id)


def test_cold_state_crosses_the_link(stack: Running) -> None:
    done = stack.post(
        input=f"{TEXT[:1200]}\n\nWhat is the hole called?",
        max_output_tokens=8,
        metadata={"tandem_prefix": "off"},
    )
    facts = done["tandem"]
    assert facts["path"] == "cold"
    assert facts["handoff"]["path"] == "tcp"
    assert facts["handoff"]["bytes"] > 0
    assert facts["details"]["held_tokens"] == facts["prompt_tokens"] - 1
    assert facts["computed_tokens"] == facts["prompt_tokens"]


def test_a_long_turn_is_computed_by_the_prefill_node_and_only_that_comes_back(
    stack: Running,
) -> None:
    first = stack.post(input=f"{TEXT[:1600]}\n\nWho ran by?", max_output_tokens=6)
    second = stack.post(
        input=f"{TEXT[1600:2400]}\n\nAnd then?",
        previous_response_id=first["id"],
        max_output_tokens=6,
        metadata={"tandem_extend": "prefill"},
    )
    facts = second["tandem"]
    held = first["tandem"]["prompt_tokens"] + len(stack.output_ids(first["id"])) - 1
    assert facts["path"] == "extended"
    assert facts["handoff"]["borrowed"]["tokens"] == facts["cached_tokens"] == held
    assert 0 < facts["handoff"]["start"] <= held
    assert facts["handoff"]["bytes"] < facts["handoff"]["borrowed"]["bytes"]
    assert facts["computed_tokens"] == facts["new_tokens"] == facts["prompt_tokens"] - held
    assert stack.output_ids(second["id"]) == stack.solo(second["id"])


@pytest.mark.rotate(4)
def test_hot_resume_computes_the_new_turn_alone(model_dir: Path) -> None:
    directory = short_directory()
    stack = Running(model_dir, directory, store={"idle_seconds": 3600.0})
    try:
        first = stack.post(input="Name three colours.", max_output_tokens=8)
        second = stack.post(
            input="And three more?", previous_response_id=first["id"], max_output_tokens=8
        )
        facts = second["tandem"]
        assert facts["path"] == "hot"
        assert facts["computed_tokens"] == facts["new_tokens"] < 40
        assert stack.output_ids(second["id"]) == stack.solo(second["id"])
        # The first turn's state went on into the second, and is there for a branch as well.
        branch = stack.post(
            input="Which is the warmest?", previous_response_id=first["id"], max_output_tokens=8
        )
        assert branch["tandem"]["path"] == "hot"
        assert branch["tandem"]["computed_tokens"] == branch["tandem"]["new_tokens"]
        assert stack.output_ids(branch["id"]) == stack.solo(branch["id"])

        # What is still in memory when the stack stops is saved, and resumed after the restart.
        assert stack.store.find_state(second["id"]) is None
        stack.close()
        stack = Running(model_dir, directory, store={"idle_seconds": 3600.0})
        third = stack.post(
            input="Thank you.", previous_response_id=second["id"], max_output_tokens=8
        )
        assert third["tandem"]["path"] == "restored"
        assert third["tandem"]["computed_tokens"] == third["tandem"]["new_tokens"]
        assert stack.output_ids(third["id"]) == stack.solo(third["id"])
    finally:
        stack.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.rotate(2)
def test_conversations_are_decoded_together(stack: Running) -> None:
    questions = ["Count to ten.", "Say the alphabet.", "List the days of the week."]
    for _ in range(TRIES):
        ids = [
            stack.post(input=question, background=True, max_output_tokens=24)["id"]
            for question in questions
        ]
        done = [stack.ended(identity) for identity in ids]
        widths = {width for one in done for width in one["tandem"]["details"]["widths"]}
        if widths - {"1"}:
            break
    else:
        raise AssertionError("no step had more than one row")
    for one in done:
        assert text_of(one)
        assert stack.output_ids(one["id"]) == stack.solo(one["id"])


def test_resume_by_conversation(stack: Running) -> None:
    conversation = stack.http.post("/v1/conversations", json={}).json()["id"]
    first = stack.post(input="My name is Ada.", conversation=conversation, max_output_tokens=8)
    second = stack.post(input="What is my name?", conversation=conversation, max_output_tokens=8)
    facts = second["tandem"]
    assert facts["path"] in ("hot", "restored")
    assert facts["computed_tokens"] == facts["new_tokens"] < first["tandem"]["prompt_tokens"] + 8
    assert stack.output_ids(second["id"]) == stack.solo(second["id"])
