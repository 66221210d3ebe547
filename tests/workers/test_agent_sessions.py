"""Recorded sessions of a coding agent through the API: stored tokens are never computed again."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import decode_kit
import httpx
import pytest
from api_node import ApiNode
from model_dirs import make_tiny_model
from redis_kit import Server

from engine.device import prepare
from engine.model import Model, load
from engine.prefill import expand_schedule
from scheduler.api.prompt import common_prefix

SOAK = bool(os.environ.get("TANDEM_SOAK"))
SESSIONS = sorted(
    (Path(__file__).parent.parent / "data" / "miniswe").glob("*.jsonl.gz"),
    key=lambda path: path.stat().st_size,
)
SHORT = SESSIONS[:2]
CALLS = 1000 if SOAK else 4
TOKENS = 6
Message = dict[str, Any]


def recorded(session: Path) -> list[str]:
    """What the agent had read at each of its calls."""
    with gzip.open(session, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["input"] for line in lines]


def calls(session: Path) -> list[list[str]]:
    """For each call the texts that the agent had read, one for each time it was told something.

    An agent also goes back: what it was told last is taken away, or told otherwise.
    """
    parts: list[str] = []
    found = []
    for text in recorded(session):
        kept = at = 0
        while kept < len(parts) and text.startswith(parts[kept], at):
            at += len(parts[kept])
            kept += 1
        parts = [*parts[:kept], *([text[at:]] if text[at:] else [])]
        found.append(list(parts))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [max(recorded(session), key=len) for session in SHORT]
    place = tmp_path_factory.mktemp("agents") / "tiny"
    return make_tiny_model(place, family="tools", context=1 << 15, texts=texts, vocab=3000)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path, prepare())


@pytest.fixture(scope="module")
def stack(model: Model, path: Path) -> Iterator[ApiNode]:
    patch = pytest.MonkeyPatch()
    patch.setattr(decode_kit, "STORE_BYTES", 1 << 30)
    with Server() as server, ApiNode(server.url, model, path) as running:
        yield running
    patch.undo()


class Client:
    """A client that keeps no IDs and sends everything again, in one of three dialects."""

    def __init__(self, stack: ApiNode, dialect: str) -> None:
        self._stack = stack
        self._dialect = dialect

    def ask(self, messages: list[Message]) -> tuple[str, Message, int]:
        """(response id, the answer as it is sent back, cached tokens)."""
        path, body = {
            "chat": ("chat/completions", {"messages": messages, "max_tokens": TOKENS}),
            "messages": ("messages", {"messages": messages, "max_tokens": TOKENS}),
            "responses": ("responses", {"input": messages, "max_output_tokens": TOKENS}),
        }[self._dialect]
        url = f"{self._stack.url}/v1/{path}"
        whole = {"model": "default", "temperature": 0, **body}
        made = self._stack.workers.serve(lambda: httpx.post(url, json=whole, timeout=300))
        assert made.status_code == 200, made.text
        told = made.json()
        usage = told["usage"]
        if self._dialect == "chat":
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            text = told["choices"][0]["message"]["content"]
            return told["tandem"]["response"], {"role": "assistant", "content": text}, cached
        if self._dialect == "messages":
            cached = usage["cache_read_input_tokens"]
            back = {"role": "assistant", "content": told["content"]}
            return told["tandem"]["response"], back, cached
        cached = usage["input_tokens_details"]["cached_tokens"]
        parts = told["output"][0]["content"]
        return told["id"], {"role": "assistant", "content": parts[0]["text"]}, cached


def last_end(ends: list[int], limit: int) -> int:
    """The last end of a forward at or before a token."""
    return max((end for end in ends if end <= limit), default=0)


def replay(
    stack: ApiNode, session: Path, dialect: str, *, run: str = "", stored: bool = True
) -> list[str]:
    """Run the session; the paths that the states came by. `run`: another name for another run."""
    client = Client(stack, dialect)
    answers: dict[tuple[str, ...], Message] = {}
    turns: list[list[int]] = []
    forwards: list[list[int]] = []
    paths = []
    # A conversation of its own, whatever ran before.
    opening = f"Session {dialect} {stored} {run} of {session.stem}.\n"
    for number, parts in enumerate(calls(session)[:CALLS]):
        messages: list[Message] = []
        for n, part in enumerate(parts):
            text = opening + part if not n else part
            messages.append({"role": "user", "content": text})
            if n < len(parts) - 1:
                messages.append(answers[tuple(parts[: n + 1])])
        response, answer, cached = client.ask(messages)
        job = stack.job(response)
        prompt = job.prompt_ids
        shared = [common_prefix(prompt, ids) for ids in turns]
        # The last token that was emitted is pending: it is in no state yet.
        whole = [len(ids) - 1 for ids, n in zip(turns, shared, strict=True) if n >= len(ids) - 1]
        if not stored:  # in memory is the state after the latest turn alone
            whole = [n for n in whole if n == len(turns[-1]) - 1]
        else:  # rows can be cut where a forward ended, in whole blocks
            block = stack.node.model.layout.block_tokens
            whole += [
                last_end(ends, n - n % block) for ends, n in zip(forwards, shared, strict=True)
            ]
        assert cached >= max(whole, default=0), f"call {number} computes what is stored"
        assert cached <= max(shared, default=0), f"call {number} claims what nobody has"
        if number and stored:
            assert cached > 0
        turn = stack.store.get_turn(response)
        assert turn is not None
        assert turn.output_ids == stack.node.oracle(job), f"call {number} answers differently"
        facts = httpx.get(f"{stack.url}/v1/responses/{response}", timeout=120).json()["tandem"]
        assert facts["computed_tokens"] == len(prompt) - cached
        paths.append(facts["path"])
        answers[tuple(parts)] = answer
        turns.append(stack.store.turn_ids(response))
        forwards.append(list(accumulate(expand_schedule(turn.schedule))))
        if stored:
            stack.node.settle()
    return paths


@pytest.mark.parametrize("session", SHORT, ids=[path.stem[:6] for path in SHORT])
def test_every_turn_restores_all_that_was_said(stack: ApiNode, session: Path) -> None:
    dialect = "chat" if session is SHORT[0] else "messages"
    paths = replay(stack, session, dialect)
    assert set(paths[1:]) == {"restored"}


def test_every_turn_goes_on_in_memory(stack: ApiNode) -> None:
    paths = replay(stack, SHORT[0], "responses", stored=False)
    assert "hot" in paths


@pytest.mark.skipif(not SOAK, reason="the whole set takes long: make soak")
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("session", SESSIONS, ids=[path.stem[:6] for path in SESSIONS])
def test_the_whole_set(stack: ApiNode, session: Path, dialect: str) -> None:
    assert set(replay(stack, session, dialect, run="whole")[1:]) == {"restored"}


def test_the_sessions_are_all_here() -> None:
    assert [len(calls(session)) for session in SESSIONS] == [8, 13, 9, 9, 30]
