"""Processes die at the worst moment; the job ends once, with the right answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from stack_kit import QUICK, Running, running, text_of

TEXT = files("scheduler").joinpath("data/alice.txt").read_text(encoding="utf-8")
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Running]:
    yield from running(model_dir, jobs=QUICK)


def assert_ended_once(stack: Running, identity: str) -> None:
    events = stack.events(identity)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] in TERMINAL for event in events].count(True) == 1
    assert events[-1]["type"] in TERMINAL[:2]
    said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert said == text_of(stack.get(identity))
    assert stack.output_ids(identity) == stack.solo(identity)


@pytest.mark.rotate(4)
def test_prefill_worker_killed_in_the_middle(stack: Running) -> None:

    def begun(response: str) -> bool:
        facts = stack.get(response)["tandem"]
        return facts["stage"] == "prefilling" and facts["prefill"]["done"] > 0

    identity = stack.standing(
        "prefill",
        begun,
        input=f"{TEXT[:4000]}\n\nWho fell?",
        max_output_tokens=8,
        metadata={"tandem_prefix": "off"},
    )
    stack.kill("prefill")
    done = stack.ended(identity)
    assert done["tandem"]["attempts"] == {"prefill": 2, "decode": 1}
    assert_ended_once(stack, identity)


@pytest.mark.rotate(4)
def test_decode_worker_killed_in_the_middle_of_an_answer(stack: Running) -> None:

    def begun(response: str) -> bool:
        facts = stack.get(response)["tandem"]
        return facts["stage"] == "decoding" and facts["times"].get("first_token") is not None

    identity = stack.standing(
        "decode", begun, input=f"{TEXT[:1500]}\n\nTell the story again.", max_output_tokens=96
    )
    old = stack.kill("decode")
    done = stack.ended(identity)
    assert done["tandem"]["attempts"]["decode"] == 2
    stack.wait_back("decode", old)
    assert_ended_once(stack, identity)


@pytest.mark.rotate(6)
@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_a_worker_killed_while_a_turn_is_extended(stack: Running, worker: str) -> None:
    first = stack.post(input=f"{TEXT[:1200]}\n\nWho ran by?", max_output_tokens=6)
    held = stack.saved(first["id"])["tokens"]
    identity = stack.post(
        input=f"{TEXT[1200:5000]}\n\nAnd then?",
        previous_response_id=first["id"],
        background=True,
        max_output_tokens=8,
        metadata={"tandem_extend": "prefill"},
    )["id"]
    stack.until(
        lambda: stack.get(identity)["tandem"]["prefill"]["done"] > held, "the extension to begin"
    )
    os.kill(stack.pid(worker), signal.SIGSTOP)
    old = stack.kill(worker)
    done = stack.ended(identity)
    stack.wait_back(worker, old)
    assert done["tandem"]["path"] in ("extended", "restored")  # the state is in the store
    assert done["tandem"]["cached_tokens"] == held
    assert_ended_once(stack, identity)


@pytest.mark.rotate(4)
def test_api_and_redis_killed_while_an_answer_is_written(stack: Running) -> None:
    identity = stack.post(input=f"{TEXT[:1000]}\n\nGo on.", background=True, max_output_tokens=32)[
        "id"
    ]
    api = stack.kill("api")
    stack.wait_back("api", api)
    redis = stack.kill("redis")
    stack.wait_back("redis", redis)
    stack.ended(identity)
    assert_ended_once(stack, identity)
