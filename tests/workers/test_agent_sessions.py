"""Recorded sessions of a coding agent, turn by turn: stored tokens are never computed again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_kit import Node, asking, make_job
from model_dirs import make_tiny_model

from engine.device import prepare
from engine.model import Model, load
from engine.text import load_tokenizer
from scheduler.api.items import split
from scheduler.api.prompt import Parent, build
from scheduler.api.tokenizer import Tokenizer

SESSIONS = sorted((Path(__file__).parent.parent / "data" / "miniswe").glob("*.jsonl"))
TOKENS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("agents") / "tiny", context=1 << 15)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path, prepare())


@pytest.fixture
def node(model: Model, path: Path, tmp_path: Path) -> Iterator[Node]:
    made = Node(model, load_tokenizer(path), tmp_path)
    yield made
    made.close()


def read(session: Path) -> list[dict[str, Any]]:
    """What the agent read that was new at each of its calls, as user messages."""
    before, found = "", []
    for line in session.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["input"]
        # Texts, not paths: an agent may also shorten what it showed earlier.
        new = text[len(os.path.commonprefix([before, text])) :]  # noqa: RUF071
        found.append({"type": "message", "role": "user", "content": new})
        before = text
    return found


@pytest.mark.parametrize("session", SESSIONS, ids=[path.stem[:6] for path in SESSIONS])
def test_every_turn_restores_all_that_was_said(node: Node, path: Path, session: Path) -> None:
    tokenizer = Tokenizer.load(path)
    past: list[Any] = []
    parent: Parent | None = None
    previous = ""
    for number, item in enumerate(read(session)):
        prompt = build(tokenizer, [item], parent=parent)
        assert prompt.rebased is False
        request = {**asking(TOKENS), "input": [item]}
        job = make_job(prompt.ids, previous=previous, request=request)
        finished = node.answer(job)
        assert finished.result is not None
        node.settle()
        if parent is not None:
            # All but the pending token: it was emitted, and is in no state yet.
            held = len(parent.ids) - 1
            assert prompt.ids[: held + 1] == list(parent.ids)
            assert finished.result.path["path"] == "restored"
            assert finished.result.usage["cached_tokens"] == held
            assert finished.result.computed_tokens == len(prompt.ids) - held
        assert node.said(job) == node.oracle(job), f"call {number} answers differently"
        turn = node.store.get_turn(job.id)
        assert turn is not None
        past += [item]
        _, answer = split(job.id, turn.items)
        parent = Parent(list(past), answer, node.store.turn_ids(job.id), len(turn.output_ids))
        past += answer
        previous = job.id
    assert len(SESSIONS) == 2
