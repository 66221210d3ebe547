"""A long prompt is interrupted for a short one, or given up and asked again: nothing is lost."""

from __future__ import annotations

import os
from importlib.resources import files

import pytest
from stack_kit import Running

from scheduler.jobs import Jobs
from scheduler.record import Job
from scheduler.redis_client import connect

TEXT = files("scheduler").joinpath("data/alice.txt").read_text(encoding="utf-8")


def job(stack: Running, response: str) -> Job:
    """The record of a job as it is now."""
    with connect(stack.config.redis_url) as client:
        return Jobs(client).get(response)


@pytest.mark.rotate(4)
def test_a_short_prompt_goes_between_the_chunks_of_a_long_one(stack: Running) -> None:
    # The rate is measured first, so that the long one's length in seconds is known.
    stack.post(input=TEXT[:600], max_output_tokens=2)
    whole = {"tandem_prefix": "off"}

    def begun(response: str) -> bool:
        now = job(stack, response)
        return now.status == "prefilling" and 64 <= now.prefilled_tokens <= now.prompt_tokens // 2

    long = stack.standing("prefill", begun, input=TEXT[:3200], max_output_tokens=6, metadata=whole)
    short = stack.post(input="Name a colour.", max_output_tokens=4, background=True)
    stack.go_on("prefill")
    assert stack.ended(short["id"])["status"] in ("completed", "incomplete")
    done = stack.ended(long)
    last = job(stack, long)
    first = job(stack, short["id"])
    assert first.times[first.status] < last.times[last.status], "the short one does not wait"
    assert last.handoff is not None
    assert last.handoff["path"] == "tcp"
    assert 0 < last.handoff["computed_tokens"] < last.prompt_tokens - 1, "it went on"
    assert stack.output_ids(done["id"]) == stack.solo(done["id"])


@pytest.mark.soak
@pytest.mark.skipif(not os.environ.get("TANDEM_SOAK"), reason="a minute of prefill; `make soak`")
def test_a_prompt_that_was_cancelled_half_way_goes_on_from_there(stack: Running) -> None:
    text = TEXT[3000:5800]
    first = stack.post(input=text, max_output_tokens=4, background=True)
    stack.until(lambda: job(stack, first["id"]).prefilled_tokens >= 128, "some progress")
    stack.http.post(f"/v1/responses/{first['id']}/cancel")
    assert stack.ended(first["id"])["status"] == "cancelled"
    again = stack.post(input=text, max_output_tokens=4)
    last = job(stack, again["id"])
    assert last.handoff is not None
    assert last.handoff["computed_tokens"] <= last.prompt_tokens - 1 - 128
    assert stack.output_ids(again["id"]) == stack.solo(again["id"])
