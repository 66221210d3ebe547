"""The images of a job's prompt: found in its items and in the turns before, seen by the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ModelError
from engine.images import Embedded
from engine.model import Model
from engine.names import SEEN
from engine.pictures import Processor, see
from engine.prefill import Prefill
from scheduler.images import ImageError, images_of
from scheduler.record import Job
from store.errors import StoreError
from store.store import Store

Items = Sequence[Mapping[str, Any]]


class Pictures:
    """Used on the thread that loaded the model; the processor is loaded with the first image."""

    def __init__(self, model: Model, store: Store | None = None) -> None:
        """`store` has the images of earlier turns; a prefill node has none."""
        self._model = model
        self._store = store
        self._processor: Processor | None = None

    def seen(self, job: Job, start: int, rope_delta: int) -> Embedded | None:
        """The features of the images among a prompt's tokens from `start` on, None without any.

        `rope_delta` is the offset at `start`. Raises ModelError where an image is not to be had, or
        `start` lies inside of one.
        """
        ids = job.prompt_ids
        if not any(token >= SEEN for token in ids[start:]):
            return None
        if self._processor is None:
            self._processor = Processor(self._model.path)
        own: Items = job.request.get("input") or ()
        try:
            images = images_of(own)
            if job.previous and self._store is not None:
                for turn in self._store.path(job.previous):
                    images += images_of(turn.items)
        except (ImageError, StoreError) as error:
            raise ModelError(f"the prompt's images cannot be read: {error}") from error
        return see(self._model, self._processor, ids, images, start, rope_delta)

    def show(self, run: Prefill, job: Job) -> Prefill:
        """A prefill that sees what is still to come: `run`, or one from the prompt's beginning
        where `run` stands inside an image. Raises ModelError as `seen`."""
        try:
            found = self.seen(job, run.position, run.offset)
        except ModelError:
            if not run.position or run.ids[run.position] < SEEN:
                raise
            run = Prefill(self._model, run.ids, chunk=self._model.chunk)
            found = self.seen(job, 0, 0)
        if found is not None:
            run.see(found)
        return run
