"""Every architecture: prefill here, decode in a fresh process among others, save, resume.

All is compared with the solo oracle, one process that runs the same forwards. Computation is in
float32, as the engine does on a CPU. Tokens must be equal throughout. Bits must be equal where the
shapes are: for the row that decodes alone. Rows in a batch are multiplied in other shapes, and BLAS
sums in another order there, so that only their tokens are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from architectures import (
    CHUNK,
    NAMES,
    PARTS,
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
from engine.prefill import Prefill, expand_schedule, plan
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.solo import Answer, answer

# What the probe has to find: merged rows that differ or fail, and classes without a batched form.
ROW_WISE = {
    "hy_v4",
    "llama4",
    "llama_buffered",
    "llama_concatenate",
    "llama_static",
    "minimax_m3",
    "qwen4_exp",
    "qwen4_exp_kv8",
    "unlimited_ocr",
    "z1t",
}


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> dict[str, Model]:
    """Those whose day it is."""
    ours = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in ours if hasattr(item, "callspec")]
    return {name: build(name) for name in names}


@pytest.fixture(scope="module")
def folder(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the decode node made of the states that were prefilled here."""
    path = tmp_path_factory.mktemp("nodes")
    for name, model in models.items():
        for part in PARTS:
            ids = prompt_of(name, part)
            caches = Prefill(model, ids, chunk=CHUNK).run()
            save(model, caches, ids[:-1], path / f"{name}.{part.name}.state")
    script = Path(__file__).with_name("decode_node.py")
    subprocess.run([sys.executable, str(script), str(path), *models], check=True, timeout=500)
    return path


def oracle(model: Model, name: str, index: int) -> Answer:
    part = PARTS[index]
    ids = prompt_of(name, part)
    return answer(model, ids, plan(0, len(ids) - 1, CHUNK), params_of(part))


@pytest.mark.rotate(7)
@pytest.mark.parametrize("name", NAMES)
def test_handed_over_and_resumed_equals_one_process(
    name: str, models: dict[str, Model], folder: Path
) -> None:
    model = models[name]
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in result, result.get("error")
    assert result["facts"]["batched"] == (name not in ROW_WISE), result["facts"]
    found = result["parts"]
    for index, part in enumerate(PARTS):
        got, alone = found[part.name], oracle(model, name, index)
        ids = prompt_of(name, part)
        count = len(got["tokens"])
        assert got["tokens"] == alone.tokens[:count], part.name
        assert count == (part.steps or part.tokens)
        assert got["finish"] == ("cancelled" if part.steps else "length")
        assert got["ids"] == ids + got["tokens"][:-1]
        assert got["pending"] == got["tokens"][-1:]
        if part.name == "alone":
            assert got["widths"] == [1]
            assert got["digest"] == state_digest(model, alone.caches, alone.ids)
            logits = last_logits(model, alone.caches, alone.pending[0])
            assert got["logits"] == logits.tobytes().hex()
        elif name not in ROW_WISE:
            assert max(got["widths"]) > 1
    resume(model, name, found, folder)


def resume(model: Model, name: str, found: dict[str, Any], folder: Path) -> None:
    """Go on with a finished and with a cancelled turn, both from bytes, in one batch."""
    batch = Batch(model, 2, chunk=CHUNK)
    params = SamplingParams(max_tokens=7)
    rows: dict[int, tuple[list[int], list[int]]] = {}
    for part in (PARTS[0], PARTS[2]):
        got = found[part.name]
        lengths = plan(0, part.prompt - 1, CHUNK) + [1] * (len(got["ids"]) - part.prompt + 1)
        more = prompt_of(f"{name} again", part)[:23]
        caches = restore(model, folder / f"{name}.{part.name}.saved", len(got["ids"]) + 64)
        uid = batch.add(Row(caches, got["ids"], got["pending"] + more, params, schedule=lengths))
        rows[uid] = (got["ids"] + got["pending"] + more, lengths)
    tokens: dict[int, list[int]] = {uid: [] for uid in rows}
    while len(batch):
        for event in batch.step():
            assert event.token is not None, event.error
            tokens[event.uid].append(event.token)
            if event.finish:
                whole, lengths = rows[event.uid]
                assert expand_schedule(event.schedule) == [*lengths, 23, *[1] * 7]
                assert event.ids == whole + tokens[event.uid][:-1]
    for uid, (whole, lengths) in rows.items():
        assert tokens[uid] == answer(model, whole, [*lengths, 23], params).tokens
