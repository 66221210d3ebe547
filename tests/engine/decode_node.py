"""The decode node of the architecture test: a fresh process that only gets bytes.

`decode_node.py FOLDER NAME...` reads FOLDER/NAME.PART.state, decodes all parts, and writes what it
gave out to FOLDER/NAME.json and the final states to FOLDER/NAME.PART.saved.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from architectures import (
    PARTS,
    Part,
    build,
    last_logits,
    params_of,
    prompt_of,
    restore,
    save,
    state_digest,
)

from engine.decode import Batch
from engine.model import Model
from engine.rows import Event, Row


def run(folder: Path, name: str) -> dict[str, Any]:
    model = build(name)
    rng = random.Random(name)
    batch = Batch(model, 4)
    found: dict[str, Any] = {}
    running: dict[int, Part] = {}
    tokens: dict[str, list[int]] = {part.name: [] for part in PARTS}
    steps: dict[int, int] = {}
    waiting = list(PARTS)

    def note(event: Event) -> None:
        part = running[event.uid]
        if event.token is not None:
            tokens[part.name].append(event.token)
        if event.finish is None:
            return
        assert event.caches is not None, event.error
        save(model, event.caches, event.ids, folder / f"{name}.{part.name}.saved")
        found[part.name] = {
            "tokens": tokens[part.name],
            "finish": event.finish,
            "ids": event.ids,
            "pending": event.pending,
            "schedule": event.schedule,
            "widths": sorted(event.widths),
        }
        if part.name == "alone":
            found[part.name]["digest"] = state_digest(model, event.caches, event.ids)
            logits = last_logits(model, event.caches, event.pending[0])
            found[part.name]["logits"] = logits.tobytes().hex()
        del running[event.uid]

    while waiting or len(batch):
        alone = bool(waiting) and waiting[0].name == "alone"
        if waiting and (not running if alone else not running or rng.random() < 0.5):
            join(model, batch, folder, name, waiting.pop(0), running)
        for event in batch.step():
            note(event)
        for uid, part in list(running.items()):
            steps[uid] = steps.get(uid, 0) + 1
            if part.steps and steps[uid] == part.steps:
                note(batch.cancel(uid))
    return {"parts": found, "facts": batch.facts}


def join(
    model: Model, batch: Batch, folder: Path, name: str, part: Part, running: dict[int, Part]
) -> None:
    ids = prompt_of(name, part)
    caches = restore(model, folder / f"{name}.{part.name}.state", len(ids) + part.tokens)
    running[batch.add(Row(caches, ids[:-1], ids[-1:], params_of(part)))] = part


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for each in sys.argv[2:]:
        try:
            result = run(target, each)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        (target / f"{each}.json").write_text(json.dumps(result))
