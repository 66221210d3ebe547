"""Signs of life in streams while nothing else comes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from api_stack import Stack

from scheduler.api import stream


@pytest.fixture
def stack(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.2)
    with Stack(redis_url) as running:
        yield running


def test_a_waiting_response_shows_that_it_lives(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    body = {"input": "Hi", "stream": True}
    events = []
    with httpx.stream("POST", f"{stack.url}/v1/responses", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            events.append(json.loads(line[6:]))
            if "prefilled_percent" in events[-1]:
                stack.workers.may_prefill.set()
    alive = [event for event in events if "prefilled_percent" in event]
    told = [event for event in events if "prefilled_percent" not in event]
    assert alive[0]["type"] == "response.queued"
    assert alive[0]["response"]["tandem"]["prefill"] == {
        "done": 0, "total": told[-1]["response"]["usage"]["input_tokens"]
    }  # fmt: skip
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    at = events.index(alive[0])
    assert alive[0]["sequence_number"] == events[at - 1]["sequence_number"]
    # A replay tells the logged events only, with the same numbers.
    response = told[0]["response"]["id"]
    got = httpx.get(f"{stack.url}/v1/responses/{response}", params={"stream": "true"}, timeout=120)
    lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: ")]
    assert [json.loads(line) for line in lines] == told
