"""The parts of a forward are told apart, add up, and leave the model as it was."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))
from decode_kit import tiny

from engine import components, shapes
from engine.device import prepare
from engine.errors import ModelError
from engine.probe import token_ids
from engine.profile_command import measure, table

GLM = {
    "model_type": "glm5_next_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 64,
    "q_lora_rank": 64, "v_head_dim": 32, "qk_nope_head_dim": 32, "index_topk": 32,
    "index_head_dim": 32, "index_n_heads": 4, "linear_head_dim": 32, "linear_num_heads": 2,
    "index_kpool": 4, "first_k_dense_replace": 1, "pad_token_id": 0, "eos_token_id": [1],
    "max_position_embeddings": 2048,
}  # fmt: skip

WANTED = {
    "llama": {"matmul", "attention", "norms", "positions", "embedding"},
    "glm5_next": {
        "matmul", "expert matmul", "attention gather", "recurrent scan", "expert routing", "norms",
    },
    "qwen3_next": {"matmul", "recurrent scan", "attention", "expert routing", "expert matmul"},
}  # fmt: skip


def forward(model: Any, ids: list[int]) -> Callable[[], Any]:
    caches = model.fresh_cache()
    return lambda: model.forward(mx.array([ids], dtype=mx.int32), caches, [0])


@pytest.mark.parametrize("name", WANTED)
def test_parts_add_up_and_the_model_stays_the_same(name: str) -> None:
    model = tiny(name)
    ids = token_ids(model, 64, 3)
    before = forward(model, ids)()
    classes = [type(module) for module in model.lm.modules()]
    probe = components.Probe(model.lm)
    found: list[Any] = []

    def watched() -> Any:
        found.append(forward(model, ids)())
        return found[-1]

    with probe.watching():
        seconds = probe.run(watched)
    assert sum(probe.seconds.values()) == pytest.approx(seconds, rel=1e-6)
    assert set(probe.seconds) >= WANTED[name]
    assert 0 < probe.usable < seconds
    assert mx.allclose(before, found[0], atol=1e-4, rtol=1e-3)
    assert [type(module) for module in model.lm.modules()] == classes
    calls = dict(probe.calls)
    assert mx.allclose(before, forward(model, ids)(), atol=1e-4, rtol=1e-3)
    assert probe.calls == calls, "nothing is counted any more"


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    classes = [type(module) for module in model.lm.modules()]
    with pytest.raises(RuntimeError, match="half way"), components.Probe(model.lm).watching():
        raise RuntimeError("half way")
    assert [type(module) for module in model.lm.modules()] == classes


def test_single_vectors_are_nothing_for_matrix_units() -> None:
    said: list[str] = []
    found = measure(tiny("llama"), chunk=32, context=40, width=1, rounds=1, say=said.append)
    assert said == [
        "prefill: warming up", "prefill: round 1 of 1",
        "decode: warming up", "decode: round 1 of 1",
    ]  # fmt: skip
    assert found["prefill"]["matrix_share"] > 0
    assert found["decode"]["matrix_share"] == 0
    assert found["decode"]["sampling_s"] > 0
    for part in (found["prefill"], found["decode"]):
        assert sum(row["share"] for row in part["parts"].values()) == pytest.approx(1)
        assert part["left_s"] == part["divided_s"] - part["undivided_s"]
        assert part["loop_s"] >= 0
    told = table({**found, "model": "tiny", "device": {"kind": "cpu"}})
    for words in ("a prefill chunk of 32 tokens after 40", "our own loop", "matrix units"):
        assert words in told
    for left, words in ((-0.5, "run it again when the machine is quiet"), (0.5, "evaluation")):
        times = {"undivided_s": 1.0, "divided_s": 1.0 + left, "left_s": left}
        parts = {name: {**found[name], **times} for name in ("prefill", "decode")}
        assert table({**found, **parts, "model": "tiny", "device": {}}).count(words) == 2
    with pytest.raises(ModelError, match="do not fit"):
        measure(tiny("llama"), chunk=4000, context=4000, width=1, rounds=1)


def test_a_config_alone_is_enough_and_each_kind_counts_as_often_as_it_occurs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "glm5_next", "text_config": GLM}))
    made = shapes.build(file, prepare())
    assert (made.kept, made.layers) == (4, 12)
    assert sum(made.counts.values()) == 12
    assert sorted(made.counts.values()) == [1, 3, 8]
    assert sum(made.factors.values()) == 12
    found = measure(made.model, 48, 48, 1, 1, made.factors)
    assert WANTED["glm5_next"] <= set(found["prefill"]["parts"])
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(components, "time", clock)  # not for other threads of this process
    probe, scaled = (components.Probe(made.model.lm, f) for f in (None, made.factors))
    for each in (probe, scaled):
        with each.watching():
            each.run(forward(made.model, token_ids(made.model, 48, 1)))
    monkeypatch.undo()
    assert scaled.calls[components.SCAN] == probe.calls[components.SCAN] > 0
    gather = components.GATHER
    assert scaled.seconds[gather] == 3 * probe.seconds[gather], "one layer stands for three"


def test_what_cannot_be_built_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="describes no model"):
        shapes.build(file, prepare())
    file.write_text(json.dumps({"model_type": "glm5_next", "text_config": {
        **GLM, "hidden_size": 65536, "intermediate_size": 262144}}))  # fmt: skip
    with pytest.raises(ModelError, match="GB"):
        shapes.build(file, prepare())
