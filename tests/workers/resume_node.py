"""The process that resumes in the test of all architectures over a store.

`resume_node.py STORE NAME...` opens the store, resumes turn NAME's conversation for every NAME, and
prints {NAME: [tokens, digest of the final state]} as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from architectures import build, state_digest

from engine.decode import Batch
from engine.model import Caches, Model
from engine.rows import Row
from engine.sampling import SamplingParams
from store.store import Store
from worker_decode.states import load

NEW = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
STEPS = 12


def turn_of(name: str) -> str:
    return f"resp_{name}"


def go_on(
    model: Model, caches: Caches, ids: list[int], pending: list[int], schedule: list[list[int]]
) -> tuple[list[int], str]:
    """Feed the pending token and a new turn's, and answer; tokens and the state's digest."""
    batch = Batch(model, 1)
    params = SamplingParams(max_tokens=STEPS)
    batch.add(Row(caches, ids, [*pending, *NEW], params=params, schedule=schedule))
    tokens: list[int] = []
    while True:
        for event in batch.step():
            if event.token is not None:
                tokens.append(event.token)
            if event.finish is not None:
                assert event.caches is not None, event.error
                return tokens, state_digest(model, event.caches, event.ids)


def main() -> None:
    store = Store.open(Path(sys.argv[1]), 0, create=False)
    found = {}
    for name in sys.argv[2:]:
        model = build(name)
        ids = store.turn_ids(turn_of(name))
        reader = store.load_state(turn_of(name), model.fingerprint)
        assert reader is not None
        with reader:
            state = load(model, reader, [*ids, *NEW])
        assert state is not None, reader.report
        held = len(state.ids)
        found[name] = go_on(model, state.caches, state.ids, ids[held:], state.schedule)
    print(json.dumps(found))
    store.close()


if __name__ == "__main__":
    main()
