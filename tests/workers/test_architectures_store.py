"""Every architecture of the engine's suite: save to a store, another process, resume, equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from architectures import NAMES, build
from resume_node import go_on, turn_of

from engine.prefill import append_schedule
from engine.sampling import SamplingParams
from engine.solo import answer
from store.store import Store
from store.turns import Turn
from worker_decode.hot import Held
from worker_decode.states import export

PROMPT = [3 + (index * 37 + index * index) % 480 for index in range(117)]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Any]]:
    """What this process and another one say for the architectures whose day it is."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_a_stored_state_is_gone_on_from_by_another_process"
    ]
    path = tmp_path_factory.mktemp("architectures") / "store"
    store = Store.open(path, 1 << 30)
    here = {}
    for name in names:
        model = build(name)
        said = answer(model, PROMPT, (64, 52), SamplingParams(max_tokens=5))
        schedule: list[list[int]] = []
        for length, count in said.schedule:
            for _ in range(count):
                append_schedule(schedule, length)
        turn = Turn(
            turn_of(name), f"conv_{name}", fingerprint=model.fingerprint, prompt_ids=PROMPT,
            output_ids=said.tokens, schedule=schedule,
        )  # fmt: skip
        store.put_turn(turn)
        held = Held(turn.id, said.caches, said.ids, said.pending, schedule, 0, 0)
        store.save_state(turn.id, *export(model, held))
        here[name] = go_on(model, said.caches, said.ids, said.pending, schedule)
    assert store.check().clean
    store.close()
    node = Path(__file__).with_name("resume_node.py")
    ended = subprocess.run(
        [sys.executable, "-P", str(node), str(path), *names],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    there = json.loads(ended.stdout)
    return {name: (list(here[name]), there[name]) for name in names}


@pytest.mark.rotate(7)
@pytest.mark.parametrize("name", NAMES)
def test_a_stored_state_is_gone_on_from_by_another_process(
    name: str, results: dict[str, tuple[Any, Any]]
) -> None:
    here, there = results[name]
    assert there == here
