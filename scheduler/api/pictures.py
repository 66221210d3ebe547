"""Images of a request: taken in, bounded, and placed among the prompt's token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.api.expander import Expander, ExpanderGone
from scheduler.api.faults import bad, unavailable
from scheduler.api.prompt import Parent, Prompt, common_prefix
from scheduler.api.remote import fetch
from scheduler.images import ImageError, bytes_of, images_of, parts_of
from scheduler.sections import ApiConfig

Items = Sequence[Mapping[str, Any]]


class Pictures:
    """What the API does with images. Thread-safe."""

    def __init__(self, model_dir: Path, config: ApiConfig) -> None:
        self._config = config
        self._expander = Expander(model_dir)
        whole = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        self.taken = bool(whole.get("vision_config"))
        """Whether the model takes images at all."""

    def close(self) -> None:
        """End the child process."""
        self._expander.close()

    def take_in(self, items: Items) -> None:
        """Check the images of a request's items; those named by a URL become data, in place.

        Raises Fault 400 for what cannot be had, or is too much.
        """
        parts = list(parts_of(items))
        config = self._config
        if len(parts) > config.max_images:
            raise bad(f"{len(parts)} images; send at most {config.max_images}", "input")
        left = config.max_images_mb * 1_000_000
        for part in parts:
            url = part.get("image_url")
            if not isinstance(url, str):
                raise bad("an image needs its image_url; file ids are not served for it", "input")
            try:
                if url.startswith(("http://", "https://")):
                    if not config.fetch_images:
                        raise ImageError(
                            "images are not fetched here (api.fetch_images): send the data as "
                            "data:image/...;base64,..."
                        )
                    url = part["image_url"] = fetch(url, left)
                left -= len(bytes_of(url))
            except ImageError as error:
                raise bad(str(error), "input") from error
            if left < 0:
                raise bad(
                    f"the images are larger than {config.max_images_mb} MB together: send smaller "
                    "ones (api.max_images_mb)",
                    "input",
                )

    def place(self, prompt: Prompt, items: Items, parent: Parent | None) -> Prompt:
        """The prompt with each image's own token ids in the place of the template's token.

        `items` are the turn's own. Raises Fault 400 where an image cannot be read, or the template
        does not show it.
        """
        own = images_of(items)
        past = images_of(parent.items) if parent is not None else []
        if not own and not past:
            return prompt
        try:
            token = self._expander.image_token
            rest = prompt.ids[prompt.shared :]
            places = rest.count(token)
            # All images where the conversation is laid out anew, else those of this turn.
            if places not in (len(own), len(own) + len(past)):
                raise ImageError(
                    f"the model's chat template shows {places} of {len(own)} images: use a model "
                    "whose template takes images"
                )
            shown = iter([*past, *own][len(own) + len(past) - places :])
            ids = prompt.ids[: prompt.shared]
            for each in rest:
                ids += self._expander.ids(next(shown)) if each == token else [each]
        except ImageError as error:
            raise bad(str(error), "input") from error
        except ExpanderGone as error:
            raise unavailable("the process that reads images", "send the request again") from error
        shared = common_prefix(ids, parent.ids) if parent is not None else 0
        return replace(prompt, ids=ids, shared=shared)
