"""What a person is told about a response that waits, runs, or has ended."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from api_stack import Stack
from rich.console import Console

from scheduler.command.client import Client
from scheduler.command.watch import follow, note, summary


def facts(stage: str, **more: Any) -> dict[str, Any]:
    base = {
        "stage": stage,
        "queue_position": None,
        "predicted_start_s": None,
        "new_tokens": 800,
        "prefill": {"done": 500, "total": 2000},
    }
    return {**base, **more}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (facts("queued", queue_position=0), "next, 800 new of 2,000 tokens"),
        (
            facts("queued", queue_position=3, predicted_start_s=12.3),
            "3 before it, starts in about 12 s, 800 new of 2,000 tokens",
        ),
        (facts("queued"), "starting, 800 new of 2,000 tokens"),
        (facts("prefilling"), "25 % of 2,000 tokens"),
        (facts("handing_off"), "25 % of 2,000 tokens"),
        (facts("decoding"), ""),
    ],
)
def test_note(told: dict[str, Any], words: str) -> None:
    assert note(told) == words


def test_summary() -> None:
    response = {
        "id": "resp_1",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "usage": {
            "input_tokens": 1234,
            "input_tokens_details": {"cached_tokens": 1000},
            "output_tokens": 5,
        },
        "tandem": {"times": {"first_token": 0.5}},
    }
    assert summary(response) == (
        "resp_1 incomplete (max_output_tokens); 1,234 prompt tokens, 1,000 of them cached; "
        "5 written; first token after 0.50 s"
    )
    bare = {"id": "resp_2", "status": "cancelled", "usage": None, "tandem": {"times": {}}}
    assert summary(bare) == "resp_2 cancelled"


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


def test_a_terminal_shows_the_stage_and_the_text(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    out = io.StringIO()
    with Client(stack.url) as client:
        made = client.create({"input": "Hi", "background": True})
        seen = client.retrieve

        def retrieve(response: str, *, patient: bool = False) -> dict[str, Any]:
            now = seen(response, patient=patient)
            if "next" in screen.getvalue():  # it is drawn by a thread, now and then
                stack.workers.open()
            return now

        client.retrieve = retrieve  # type: ignore[method-assign]  # opens the gate once shown
        ended = follow(client, made["id"], out, console)
    assert ended["status"] == "completed"
    assert out.getvalue().startswith("You sent ")
    assert out.getvalue().endswith("é!\n")
    assert "waiting" in screen.getvalue()
    assert "next" in screen.getvalue()
