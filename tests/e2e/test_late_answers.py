"""A lone answer is begun where its prompt was computed, and moves when another prompt comes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack_kit import Running, running, short_directory

from engine.device import prepare
from engine.profile import Profile, record

pytestmark = pytest.mark.rotate(4)


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Running]:
    """Both nodes have a profile by which they decode equally fast."""
    copy = short_directory() / model_dir.name
    shutil.copytree(model_dir, copy)
    device = prepare()
    decode = [{"width": width, "context": 64, "rate": 30.0} for width in (1, 8)]
    prefill = [{"chunk": 64, "context": 512, "rate": 300.0}]
    record(copy, Profile(device.name, device.mlx, device.dtype, prefill, decode))
    yield from running(copy)
    shutil.rmtree(copy.parent)


def test_a_lone_answer_ends_where_it_began(stack: Running) -> None:
    done = stack.post(input="Name three colours.", max_output_tokens=16)
    facts = done["tandem"]
    late = facts["handoff"]["late"]
    said = stack.output_ids(done["id"])
    assert late["stayed"]
    assert late["ended"]
    assert late["tokens"] == len(said)
    assert facts["computed_tokens"] == facts["prompt_tokens"]
    assert said == stack.solo(done["id"])
    again = stack.post(input="And one more?", previous_response_id=done["id"], max_output_tokens=6)
    assert again["tandem"]["path"] in ("hot", "restored")
    assert stack.output_ids(again["id"]) == stack.solo(again["id"])


def test_an_answer_moves_when_another_prompt_comes(stack: Running) -> None:

    def begun(response: str) -> bool:
        found = stack.get(response)
        return found["status"] == "in_progress" and "first_token" in found["tandem"]["times"]

    first = stack.standing("prefill", begun, input="Tell me a long story.", max_output_tokens=120)
    second = stack.post(input="Name a colour.", max_output_tokens=4, background=True)
    stack.go_on("prefill")
    stack.ended(second["id"])
    done = stack.ended(first)
    late = done["tandem"]["handoff"]["late"]
    assert late["stayed"]
    assert 0 < late["tokens"] < 120
    assert "waiting" in late["left"]
    for response in (done, second):
        assert stack.output_ids(response["id"]) == stack.solo(response["id"])
    events = stack.events(first)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
