"""Images of a prompt: what the model's processor makes of them, and their features."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from engine.errors import ModelError
from engine.images import Embedded, embed
from engine.names import SEEN, names

if TYPE_CHECKING:
    from engine.model import Model

MAX_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class Processor:
    """mlx-vlm's processor of one model: what an image becomes. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Loads from the model directory `path`, without weights.

        Raises `ModelError` where the model takes no images or its processor cannot be loaded.
        """
        from mlx_vlm.utils import load_processor

        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not config.get("vision_config"):
            raise ModelError(f"{path.name} takes no images; send text only")
        kind = str(config["model_type"])
        try:
            importlib.import_module(f"mlx_vlm.models.{kind}")  # registers its processor
            self._processor: Any = load_processor(path, add_detokenizer=False)
        except (ImportError, ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"the image processor of {path.name} cannot be loaded ({error})"
            ) from (error)
        token = getattr(self._processor, "image_token_id", None)
        if not isinstance(token, int):
            token = config.get("image_token_id", config.get("image_token_index"))
        if not isinstance(token, int):
            raise ModelError(f"{path.name} does not say which token stands for an image")
        self.image_token = token
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self._mark = str(tokenizer.convert_ids_to_tokens(token))

    def ids(self, data: bytes) -> list[int]:
        """What replaces the token of one image in a prompt; the image's own ids are its names.

        Raises `ModelError` for a file that is no image.
        """
        found: list[int] = np.array(self._run([data])["input_ids"]).reshape(-1).tolist()
        named = iter(names(data, found.count(self.image_token)))
        return [next(named) if token == self.image_token else int(token) for token in found]

    def media(self, images: Sequence[bytes]) -> dict[str, mx.array]:
        """What the vision tower takes for these image files, in this order."""
        made = self._run(images)
        left_out = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        return {
            name: value if isinstance(value, mx.array) else mx.array(np.array(value))
            for name, value in made.items()
            if name not in left_out
        }

    def _run(self, images: Sequence[bytes]) -> dict[str, Any]:
        opened = [open_image(data) for data in images]
        try:
            made: Any = self._processor(
                images=opened, text=[self._mark * len(opened)], add_special_tokens=False
            )
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ModelError(f"the model's processor refuses the image ({error})") from error
        return dict(made.items())


def open_image(data: bytes) -> Any:
    """An image file as RGB pixels (PIL); its size is looked at before anything is decoded.

    Raises `ModelError` for what is no PNG, JPEG, WebP or GIF, or is too large.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ModelError(
                f"an image has {width} by {height} pixels; at most {MAX_PIXELS // 1_000_000} "
                "million are taken"
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ModelError(
            "an image cannot be read: send a whole PNG, JPEG, WebP or GIF file"
        ) from error


def see(
    model: Model,
    processor: Processor,
    ids: Sequence[int],
    images: Iterable[bytes],
    start: int = 0,
    rope_delta: int = 0,
) -> Embedded | None:
    """The features of all images among the tokens from `start` on; None where there are none.

    `images` are the files that may stand there. Raises `ModelError` where one that does is not
    among them, or `start` lies inside of one.
    """
    if not any(token >= SEEN for token in ids[start:]):
        return None
    known = {names(data, 1)[0]: data for data in images}
    shown: list[bytes] = []
    at = start
    while at < len(ids):
        if ids[at] < SEEN:
            at += 1
            continue
        data = known.get(ids[at])
        if data is None:
            raise ModelError(f"the image at token {at} is not here: send it again")
        stop = at + 1
        while stop < len(ids) and ids[stop] >= SEEN and ids[stop] not in known:
            stop += 1
        if list(ids[at:stop]) != names(data, stop - at):
            raise ModelError(f"the image at token {at} is not whole: send it again")
        shown.append(data)
        at = stop
    return embed(model, ids, processor.media(shown), start, rope_delta)
