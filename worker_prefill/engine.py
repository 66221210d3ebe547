"""The prefill node's engine: one prompt at a time, its state leaving chunk by chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from engine.model import Model
from engine.prefill import Prefill, append_schedule
from scheduler.execution import Execution
from scheduler.record import Job
from store.codec.pack import Exporter
from worker_prefill.handoff import Links

log = logging.getLogger("tandem.prefill")


class Engine:
    """What `PrefillLoop` drives; used on the thread that loaded the model."""

    def __init__(self, model: Model, links: Links, chunk: int = 0) -> None:
        """`chunk` is the number of tokens per forward pass, 0 for the device's own."""
        self._model = model
        self._links = links
        self.chunk = chunk or model.device.chunk

    def prefill(
        self, execution: Execution, job: Job, check: Callable[[int], None]
    ) -> Callable[[], Mapping[str, Any]]:
        """Compute a prompt but its last token, whose logits the decode node computes.

        Finished blocks leave while the next chunk is computed. `check` is called at every chunk
        boundary and may raise. Returns what finishes the hand-off, to be called on any thread.
        """
        ids = job.prompt_ids
        stop = len(ids) - 1
        run = Prefill(self._model, ids, chunk=self.chunk)
        if not stop:
            return lambda: {"path": "none", "reason": "a prompt of one token has no state to move"}
        layout = self._model.layout
        handoff = self._links.begin(
            job,
            fingerprint=self._model.fingerprint,
            tokens=stop,
            nbytes=layout.state_bytes(stop),
            block_tokens=layout.block_tokens,
        )
        if handoff.hopeless:
            return handoff.give_up  # a state that nobody takes is not computed
        exporter = Exporter(layout, ids)
        schedule: list[list[int]] = []
        try:
            while run.remaining:
                check(run.position)
                start, end = run.step()
                append_schedule(schedule, end - start)
                handoff.send(exporter.rows(run.caches, end, last=not run.remaining))
            check(run.position)
            snapshot = exporter.snapshot(run.caches, {"schedule": schedule, "rope_delta": 0})
        except BaseException as error:
            handoff.abandon(f"prefill stopped: {type(error).__name__}")
            raise
        return lambda: {**handoff.finish(snapshot), "schedule": schedule}
