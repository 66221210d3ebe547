"""The prefill node's engine: one prompt at a time, its state leaving chunk by chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from engine.errors import ModelError
from engine.keepalive import KeepAlive
from engine.model import Caches, Model
from engine.prefill import MIN_CHUNK, Prefill, append_schedule
from scheduler.execution import Execution
from scheduler.record import Job
from scheduler.runs import Cancelled, Preempted
from scheduler.staying import Staying
from store.codec.pack import Exporter
from worker_prefill.handoff import Links
from worker_prefill.late import Late, Live
from worker_prefill.parked import Parked

log = logging.getLogger("tandem.prefill")

#: Tokens per forward pass on Metal while a short interactive job waits: a quarter of the default
#: chunk, so that the job waits for two seconds rather than for seven.
SMALL_CHUNK = 2048


class Engine:
    """What `PrefillLoop` drives; used on the thread that loaded the model."""

    def __init__(
        self,
        model: Model,
        links: Links,
        chunk: int = 0,
        parked: Parked | None = None,
        pulse: KeepAlive | None = None,
        small_chunk: int = 0,
        late: Late | None = None,
    ) -> None:
        """`chunk` is the number of tokens per forward pass, 0 for the model's own; `small_chunk`
        that while a short interactive job waits, 0 for the device's default. `parked`
        bounds what is kept of unfinished prompts; nothing without it. `pulse` keeps an idle
        device awake. `late` decodes here while nothing waits; without it every state is handed
        off at its prompt's end."""
        self._model = model
        self._links = links
        self._late = late
        self._working = nullcontext if pulse is None else pulse.working
        self._parked = Parked(0, 0, 0.0) if parked is None else parked
        self.chunk = chunk or model.chunk
        small = small_chunk or (SMALL_CHUNK if model.device.kind == "metal" else self.chunk)
        self.small_chunk = min(max(small, MIN_CHUNK), self.chunk)

    @property
    def parks(self) -> int:
        """How many unfinished prompts are kept; tells the loop that it may interrupt one."""
        return self._parked.limit

    @property
    def decodes(self) -> bool:
        """Whether an answer can be begun here; tells the loop that it may say until when."""
        return self._late is not None

    def prefill(
        self, execution: Execution, job: Job, check: Callable[[int], bool]
    ) -> Callable[[], Mapping[str, Any]]:
        """Compute a prompt but its last token, whose logits are computed where decoding goes on.

        Finished blocks leave while the next chunk is computed. `check` is called at every chunk
        boundary and may raise; where it returns True, the chunks are small until it returns False.
        Returns what finishes the hand-off, to be called on any thread.
        A prompt that was interrupted, or begins like one that was, goes on from there.
        """
        return self._run(execution, job, check, None)

    def begin(
        self, execution: Execution, job: Job, check: Callable[[int], bool], stay: Staying
    ) -> Callable[[], Mapping[str, Any]]:
        """As `prefill`, then decode while `stay()` is true, and hand off at that token.

        At the latest at the answer's end: the decode node ends it, and keeps the conversation.
        """
        return self._run(execution, job, check, stay)

    def _run(
        self,
        execution: Execution,
        job: Job,
        check: Callable[[int], bool],
        stay: Staying | None,
    ) -> Callable[[], Mapping[str, Any]]:
        ids = job.prompt_ids
        stop = len(ids) - 1
        run, schedule = self._begin(ids)
        if not stop:
            return lambda: {"path": "none", "reason": "a prompt of one token has no state to move"}
        layout = self._model.layout
        late = self._late if stay is not None else None
        reach = stop if late is None else late.reach(job)
        handoff = self._links.begin(
            job,
            fingerprint=self._model.fingerprint,
            tokens=reach,
            nbytes=layout.state_bytes(reach),
            block_tokens=layout.block_tokens,
        )
        if handoff.hopeless:
            return handoff.give_up  # a state that nobody takes is not computed
        exporter = Exporter(layout, ids)
        begun_at, chunk = run.position, self.chunk
        live: Live | None = None
        extra: dict[str, Any] = {"schedule": schedule, "rope_delta": 0}
        caches: Caches | None = run.caches
        try:
            if run.position:
                handoff.send(exporter.rows(run.caches, run.position))
            while run.remaining:
                wanted = self.small_chunk if check(run.position) else self.chunk
                if wanted != chunk:
                    run.replan(chunk := wanted)
                with self._working():
                    start, end = run.step()
                append_schedule(schedule, end - start)
                handoff.send(exporter.rows(run.caches, end, last=late is None and end == stop))
            check(run.position)
            if late is not None and stay is not None and stay():
                caches = None  # what `stay` raises finds no state to park
                try:
                    live = late.decode(execution, job, run.caches, schedule, stay)
                except ModelError as error:
                    handoff.abandon(f"decode failed: {error}")
                    return _failing(error)
            if live is not None:
                exporter = Exporter(layout, live.ids, exporter.position)
                extra = {"schedule": live.schedule, "rope_delta": 0}
            caches = run.caches if live is None else live.caches
            held = stop if live is None else len(live.ids)
            handoff.send(exporter.rows(caches, held, last=True))
            snapshot = exporter.snapshot(caches, extra)
        except BaseException as error:
            handoff.abandon(f"prefill stopped: {type(error).__name__}")
            if isinstance(error, Preempted | Cancelled) and caches is not None:
                self._parked.put(run, layout.state_bytes(run.position))
            raise
        return lambda: {
            **handoff.finish(snapshot),
            "schedule": schedule,
            "computed_tokens": stop - begun_at,
            **({"late": _told(stay, live)} if stay is not None else {}),
        }

    def _begin(self, ids: list[int]) -> tuple[Prefill, list[list[int]]]:
        """A prefill of `ids` from the longest parked beginning, and the forwards that made it."""
        kept = self._parked.take(ids)
        if kept is None:
            return Prefill(self._model, ids, chunk=self.chunk), []
        log.info("going on from token %d of %d", kept.position, len(ids))
        run = Prefill(self._model, ids, kept.position, kept.caches, self.chunk)
        schedule: list[list[int]] = []
        for length in kept.schedule:
            append_schedule(schedule, length)
        run.schedule = list(kept.schedule)
        return run, schedule


def _told(stay: Staying, live: Live | None) -> dict[str, Any]:
    """Where the answer was begun and why, and where it left."""
    chosen = stay.chosen
    return {
        "stayed": stay.began,
        "reason": chosen.reason if chosen else "",
        **({"left": stay.left, **live.facts()} if live is not None else {}),
    }


def _failing(error: ModelError) -> Callable[[], Mapping[str, Any]]:
    def tail() -> Mapping[str, Any]:
        raise error

    return tail
