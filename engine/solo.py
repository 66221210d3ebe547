"""The solo oracle: the same forwards in one process from an empty cache.

`python -P -m engine.solo` reads one JSON object from standard input,
`{"model": DIRECTORY, "runs": [{"ids": [...], "schedule": [...], "params": {...}}, ...]}`, and
prints `{"runs": [{"tokens": [...], "text": "...", "finish": "..."}, ...], "device": {...}}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.device import prepare
from engine.errors import ModelError

if __name__ == "__main__":
    prepare()  # before the imports below bring MLX in

from engine.decode import Batch
from engine.images import Embedded
from engine.model import Caches, Model, load
from engine.prefill import Prefill, expand_schedule, plan
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.text import TextStream, load_tokenizer


@dataclass
class Answer:
    """The oracle's tokens (a stop token included), their text, the finish, and the final state."""

    tokens: list[int]
    text: str
    finish: str
    caches: Caches
    ids: list[int]
    pending: list[int]
    schedule: list[list[int]]


def answer(
    model: Model,
    ids: Sequence[int],
    schedule: Sequence[Sequence[int] | int] = (),
    params: SamplingParams | None = None,
    *,
    tokenizer: Any = None,
    rope_delta: int = 0,
    prefix: int = 0,
    embedded: Embedded | None = None,
) -> Answer:
    """Answer `ids` by forwards of exactly the lengths in `schedule`, then one-token steps.

    The lengths must cover all tokens but the last. An empty schedule means the default plan;
    `prefix` is then the number of leading tokens of earlier turns whose plan stands by itself.
    `embedded` are the embeddings of all `ids` where there are images among them.
    Raises `ModelError` for bad ids or parameters, `ValueError` for a schedule that does not fit.
    """
    params = params or SamplingParams()
    lengths = expand_schedule(schedule)
    if not lengths:
        chunk = model.chunk
        lengths = plan(0, prefix, chunk) + plan(prefix, len(ids) - 1, chunk)
    prefill = Prefill(model, ids, rope_delta=rope_delta, lengths=lengths, embedded=embedded)
    prefill.run()
    text = TextStream(tokenizer, params.stop) if tokenizer is not None else None
    batch = Batch(model, 1)
    batch.add(
        Row(
            caches=prefill.caches,
            ids=list(ids[:-1]),
            pending=[ids[-1]],
            params=params,
            schedule=prefill.schedule,
            rope_delta=prefill.rope_delta,
            text=text,
        )
    )
    tokens: list[int] = []
    pieces: list[str] = []
    while True:
        for event in batch.step():
            if event.finish == "error":
                raise ModelError(f"the model failed: {event.error}")
            if event.token is not None:
                tokens.append(event.token)
            pieces.append(event.text)
            if event.finish is not None and event.caches is not None:
                return Answer(
                    tokens,
                    "".join(pieces),
                    event.finish,
                    event.caches,
                    event.ids,
                    event.pending,
                    event.schedule,
                )


def main() -> int:
    """Serve one request on standard input; returns the exit status."""
    try:
        request = json.load(sys.stdin)
        device = prepare()
        model = load(Path(request["model"]), device)
        tokenizer = load_tokenizer(model.path)
        runs = []
        for run in request["runs"]:
            asked = {"stop_ids": sorted(model.eos_ids), **(run.get("params") or {})}
            params = SamplingParams.from_json(asked)
            found = answer(
                model, run["ids"], run.get("schedule") or (), params, tokenizer=tokenizer
            )
            runs.append({"tokens": found.tokens, "text": found.text, "finish": found.finish})
    except (ModelError, ValueError, KeyError, TypeError) as error:
        print(f"solo: {error}", file=sys.stderr)
        return 1
    json.dump({"runs": runs, "device": device.facts()}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
