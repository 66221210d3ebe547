"""Prompts with images: what the vision tower makes of them, cut chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.model import Model

# What a model may return beside the embeddings, with the axis that counts tokens (from the end
# where the number of axes varies).
TOKEN_AXIS = {"position_ids": -1, "visual_pos_masks": 1, "per_layer_inputs": 1, "pos_hw": 1}


@dataclass
class Embedded:
    """The embeddings of a prompt's tokens [start, stop) and what goes with them.

    `inputs` is (1, tokens, width). `aligned` are arrays with one entry per token, `visual` lists of
    arrays with one row per image token (added inside the layers, "deepstack"). `rope_delta` is the
    offset of all positions after the prompt, `before` the one before its first token: an image
    takes fewer positions than tokens.
    """

    start: int
    inputs: mx.array
    rope_delta: int = 0
    before: int = 0
    aligned: dict[str, mx.array] = field(default_factory=dict)
    visual: list[mx.array] = field(default_factory=list)
    is_visual: np.ndarray[Any, Any] | None = None

    def offset(self, position: int) -> int:
        """The offset of all positions from `position` on, as far as this prompt goes."""
        places = self.aligned.get("position_ids")
        if places is None or position <= self.start:
            return self.before if position <= self.start else self.rope_delta
        count = min(position - self.start, places.shape[-1])
        return int(np.array(places[..., :count]).max()) + 1 - (self.start + count)

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """The language model's keyword arguments for tokens [start, stop) of the conversation."""
        a, b = start - self.start, stop - self.start
        found: dict[str, Any] = {"inputs_embeds": self.inputs[:, a:b]}
        for name, array in self.aligned.items():
            axis = TOKEN_AXIS[name] % array.ndim
            found[name] = array[(slice(None),) * axis + (slice(a, b),)]
        if self.visual and self.is_visual is not None:
            first, last = int(self.is_visual[:a].sum()), int(self.is_visual[:b].sum())
            found["deepstack_visual_embeds"] = [rows[first:last] for rows in self.visual]
        return found


def embed(
    model: Model,
    ids: Sequence[int],
    media: Mapping[str, mx.array],
    start: int = 0,
    rope_delta: int = 0,
) -> Embedded:
    """Run the vision tower over a prompt's images and place the results among its tokens.

    `ids` are the whole conversation, image tokens already expanded; `media` is what the model's
    processor made of the images of tokens from `start` on (`pixel_values`, `image_grid_thw`, ...);
    `rope_delta` is the offset before `start`. All is evaluated. Raises `ModelError` where the model
    has no vision tower, the counts of tokens and features differ, or the model feeds images by
    another way than embeddings (cross attention, encoders).
    """
    make = getattr(model.model, "get_input_embeddings", None)
    if make is None:
        raise ModelError(f"{model.model_type} takes no images; send text only")
    model.check_ids(ids)
    tokens = model.tokens(ids[start:])
    _check_count(model, tokens, media)
    try:
        features: Any = make(tokens, **{"mask": mx.ones_like(tokens), **media})
    except (ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"the images do not fit the prompt ({error}); expand it with this model's processor"
        ) from error
    parts = {
        name: value
        for name, value in features.to_dict().items()
        if value is not None and name not in ("inputs_embeds", "attention_mask")
    }
    found = Embedded(start, features.inputs_embeds, rope_delta, rope_delta)
    deltas = parts.pop("rope_deltas", None)
    if deltas is not None:
        found.rope_delta += int(np.array(deltas).reshape(-1)[0])
    visual = parts.pop("deepstack_visual_embeds", None)
    if visual is not None:
        found.visual = [visual[i] for i in range(len(visual))]
        found.is_visual = np.array(parts["visual_pos_masks"]).reshape(-1)
    unknown = set(parts) - set(TOKEN_AXIS)
    if unknown:
        raise ModelError(
            f"{model.model_type} feeds images as {sorted(unknown)[0]}, which cannot be handed over "
            "here; use a model that embeds them among its tokens"
        )
    if "position_ids" in parts:
        # The model counts from the first of these tokens.
        parts["position_ids"] = parts["position_ids"] + start + rope_delta
    found.aligned = parts
    mx.eval(found.inputs, found.aligned, found.visual)
    return found


def _check_count(model: Model, tokens: mx.array, media: Mapping[str, mx.array]) -> None:
    """Refuse another number of image tokens than the grids have; some models drop the rest."""
    grids = media.get("image_grid_thw")
    whole: Any = model.model
    token = getattr(whole.config, "image_token_id", None)
    merge = getattr(getattr(whole.config, "vision_config", None), "spatial_merge_size", None)
    if grids is None or token is None or merge is None:
        return
    expected = int(np.array(grids).prod(axis=-1).sum()) // merge**2
    found = int(np.sum(np.array(tokens) == token))
    if found != expected:
        raise ModelError(
            f"the images do not fit the prompt ({found} image tokens, {expected} features); expand "
            "it with this model's processor"
        )
