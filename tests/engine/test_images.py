"""Images with multi-axis rotary positions: features here, decode where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import ready
from architectures import restore, save
from mlx.utils import tree_flatten

from engine.decode import Batch
from engine.drafters import NgramDrafter
from engine.errors import ModelError
from engine.images import embed
from engine.model import Model, widen
from engine.prefill import Prefill, plan
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.solo import answer

IMAGE, START = 510, 509
ROWS, COLUMNS = 12, 16  # patches; four make a token
VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 511,
    "vision_start_token_id": START,
    "vocab_size": 512,
}


def qwen2_vl() -> Any:
    from mlx_vlm.models.qwen2_vl import Model as Whole
    from mlx_vlm.models.qwen2_vl.config import ModelConfig, TextConfig, VisionConfig

    text = {k: v for k, v in TEXT.items() if k != "head_dim"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    return Whole(
        ModelConfig(
            text_config=TextConfig(model_type="qwen2_vl", **text),
            vision_config=VisionConfig(**VISION, embed_dim=64, hidden_size=64),
            model_type="qwen2_vl",
            **TOKENS,
        )
    )


def qwen3_vl() -> Any:
    from mlx_vlm.models.qwen3_vl import Model as Whole
    from mlx_vlm.models.qwen3_vl.config import ModelConfig, TextConfig, VisionConfig

    scaling = {"type": "default", "mrope_section": [2, 3, 3]}
    return Whole(
        ModelConfig(
            text_config=TextConfig(model_type="qwen3_vl_text", rope_scaling=scaling, **TEXT),
            vision_config=VisionConfig(
                **VISION,
                hidden_size=64,
                intermediate_size=96,
                out_hidden_size=64,
                num_position_embeddings=64,
                deepstack_visual_indexes=[0, 1],
            ),
            model_type="qwen3_vl",
            image_token_index=IMAGE,
            video_token_index=511,
            **TOKENS,
        )
    )


MAKERS = {"qwen2_vl": qwen2_vl, "qwen3_vl": qwen3_vl}


def build(name: str) -> Model:
    whole = MAKERS[name]()
    mx.random.seed(5)
    whole.load_weights(
        [
            (
                k,
                1 + mx.zeros(v.shape)
                if "norm" in k and k.endswith("weight")
                else 0.2 * mx.random.normal(v.shape),
            )
            for k, v in tree_flatten(whole.parameters())
        ]
    )
    whole.eval()
    widen(whole, ready.DEVICE)
    config = {**TEXT, "model_type": name}
    return Model(Path(name), whole, config, ready.DEVICE, name.ljust(16).encode())


def media(seed: int) -> dict[str, mx.array]:
    pixels = np.random.default_rng(seed).normal(size=(ROWS * COLUMNS, 3 * 2 * 4 * 4))
    return {
        "pixel_values": mx.array(pixels.astype(np.float32)),
        "image_grid_thw": mx.array([[1, ROWS, COLUMNS]]),
    }


def with_image(before: int, after: int) -> list[int]:
    image = [START, *[IMAGE] * (ROWS * COLUMNS // 4)]
    return [*range(20, 20 + before), *image, *range(100, 100 + after)]


PARAMS = SamplingParams(max_tokens=10)


@pytest.mark.parametrize("name", MAKERS)
def test_an_image_prompt_is_handed_over_and_resumed(name: str, tmp_path: Path) -> None:
    here, there = build(name), build(name)
    ids = with_image(30, 50)
    found = embed(here, ids, media(1))
    assert found.rope_delta == max(ROWS, COLUMNS) // 2 - ROWS * COLUMNS // 4
    run = Prefill(here, ids, chunk=40, embedded=found)
    assert run.run() is run.caches
    save(here, run.caches, ids[:-1], tmp_path / "state")

    batch = Batch(there, 2)
    text = list(range(200, 260))
    other = batch.add(Row(there.fresh_cache(), [], text, PARAMS))
    caches = restore(there, tmp_path / "state", len(ids) + 16)
    uid = batch.add(
        Row(caches, ids[:-1], ids[-1:], PARAMS, rope_delta=run.rope_delta, schedule=run.schedule)
    )
    tokens: dict[int, list[int]] = {uid: [], other: []}
    ends = {}
    while len(batch):
        for event in batch.step():
            assert event.token is not None, event.error
            tokens[event.uid].append(event.token)
            if event.finish:
                ends[event.uid] = event
    alone = build(name)
    known = embed(alone, ids, media(1))
    first = answer(alone, ids, plan(0, len(ids) - 1, 40), PARAMS, embedded=known)
    assert tokens[uid] == first.tokens
    # The same module, which has just seen an image, must not carry its positions over.
    assert tokens[other] == answer(alone, text, (), PARAMS).tokens
    assert tokens[other] == answer(build(name), text, (), PARAMS).tokens
    assert answer(build(name), ids, (), PARAMS, embedded=embed(alone, ids, media(2))).tokens != (
        first.tokens
    )

    last = ends[uid]
    more = last.pending + list(range(300, 325))
    again = batch.add(Row(last.caches or [], last.ids, more, PARAMS, rope_delta=run.rope_delta))
    resumed: list[int] = []
    while len(batch):
        resumed += [e.token for e in batch.step() if e.uid == again and e.token is not None]
    whole = last.ids + more
    lengths = [*plan(0, len(ids) - 1, 40), *[1] * 10, 25]
    state = Prefill(alone, ids, lengths=lengths[:-11], embedded=known)
    state.run()
    expected = Prefill(
        alone,
        whole,
        start=len(ids) - 1,
        caches=state.caches,
        rope_delta=state.rope_delta,
        lengths=lengths[-11:],
    )
    expected.run()
    oracle = Batch(alone, 1)
    oracle.add(Row(expected.caches, whole[:-1], whole[-1:], PARAMS, rope_delta=state.rope_delta))
    tokens_alone: list[int] = []
    while len(oracle):
        tokens_alone += [event.token for event in oracle.step() if event.token is not None]
    assert resumed == tokens_alone


@pytest.mark.parametrize("name", MAKERS)
def test_a_later_turn_brings_an_image(name: str) -> None:
    model = build(name)
    ids = with_image(40, 30)
    whole = Prefill(model, ids, lengths=[40, len(ids) - 41], embedded=embed(model, ids, media(3)))
    whole.run()
    state = Prefill(model, ids[:41], lengths=[40])
    state.run()
    later = embed(model, ids, media(3), start=40)
    assert later.rope_delta == whole.rope_delta
    turn = Prefill(model, ids, start=40, caches=state.caches, embedded=later)
    turn.run()
    for a, b in zip(whole.caches, turn.caches, strict=True):
        for x, y in zip(a.state, b.state, strict=True):
            assert np.allclose(np.array(x), np.array(y), atol=1e-4)


class Knows(NgramDrafter):
    """Proposes the known answer to a prompt of so many tokens, every fourth token wrong."""

    def __init__(self, prompt: int, known: list[int]) -> None:
        super().__init__()
        self.prompt = prompt
        self.known = known

    def fresh(self) -> Knows:
        return Knows(self.prompt, self.known)

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        at = len(ids) + 1 - self.prompt
        found = self.known[at : at + count]
        return [t if (at + i) % 4 else (t + 1) % 400 for i, t in enumerate(found)]


@pytest.mark.parametrize("name", MAKERS)
def test_proposals_after_an_image_stand_at_its_positions(name: str) -> None:
    model = build(name)
    ids = with_image(30, 20)
    params = SamplingParams(max_tokens=16)
    seen = embed(model, ids, media(4))
    known = answer(model, ids, (), params, embedded=seen).tokens
    batch = Batch(model, 2, drafter=Knows(len(ids), known), depth=4, clock=lambda: 0.0)
    uids = []
    for _ in range(2):  # once alone, then merged
        run = Prefill(model, ids, embedded=seen)
        run.run()
        uids.append(
            batch.add(Row(run.caches, ids[:-1], ids[-1:], params, rope_delta=run.rope_delta))
        )
        if len(uids) == 1:
            tokens = [event.token for _ in range(4) for event in batch.step()]
    said: dict[int, list[int | None]] = {uids[0]: tokens, uids[1]: []}
    while len(batch):
        for event in batch.step():
            said[event.uid].append(event.token)
    assert list(said.values()) == [known, known]
    assert batch.facts["speculation"]["accepted"] > 8


def test_images_that_do_not_fit_are_refused(small: Model) -> None:
    model = build("qwen2_vl")
    for ids in (with_image(5, 5)[:-20], with_image(5, 5) * 2):
        with pytest.raises(ModelError, match="do not fit the prompt"):
            embed(model, ids, media(1))
    with pytest.raises(ModelError, match="takes no images"):
        embed(small, [5, 6], {})
