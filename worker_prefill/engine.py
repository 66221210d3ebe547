"""The prefill node's engine: one prompt at a time, its state leaving chunk by chunk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from engine.device import kernels
from engine.errors import ModelError
from engine.keepalive import KeepAlive
from engine.model import Model
from engine.prefill import MIN_CHUNK, Prefill, append_schedule, expand_schedule
from scheduler.execution import Execution
from scheduler.ledger.notes import Notes
from scheduler.record import Job
from scheduler.runs import Cancelled, Lost, Preempted
from scheduler.staying import Staying
from store.codec.header import CodecError, Piece
from transport.errors import LinkError
from worker_decode.marks import Marks, marks_of
from worker_decode.pictures import Pictures
from worker_decode.states import restore
from worker_prefill.handoff import Handoff, Links
from worker_prefill.late import Late, Live
from worker_prefill.parked import Parked
from worker_prefill.passage import Begun, Passage

log = logging.getLogger("tandem.prefill")

#: Tokens per forward pass on Metal while a short interactive job waits: a quarter of the default
#: chunk, so that the job waits for two seconds rather than for seven.
SMALL_CHUNK = 2048
#: Interrupted extensions whose beginning the decode node is known to have.
_LENT = 16


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
        snapshots: int = 0,
    ) -> None:
        """`chunk` is the number of tokens per forward pass, 0 for the model's own; `small_chunk`
        that while a short interactive job waits, 0 for the device's default. `parked`
        bounds what is kept of unfinished prompts; nothing without it. `pulse` keeps an idle
        device awake. `late` decodes here while nothing waits; without it every state is handed
        off at its prompt's end. `snapshots`: states sent from inside one prompt, to be kept."""
        self._model = model
        self._links = links
        self._late = late
        self._working = nullcontext if pulse is None else pulse.working
        self._parked = Parked(0, 0, 0.0) if parked is None else parked
        self._snapshots = snapshots
        self._lent: dict[str, int] = {}
        self._pictures = Pictures(model)
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
        A prompt that was interrupted, or begins like one that was, goes on from there; one that
        is to be extended here, from the state that its decode node lends.
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
        if len(job.prompt_ids) == 1:
            return lambda: {"path": "none", "reason": "a prompt of one token has no state to move"}
        notes = execution.notes
        try:
            begun = self._take_up(execution, job)
        except (LinkError, CodecError, ModelError) as error:
            log.warning("%s is left to its decode node: %s", job.id, error)
            return _failing(error)
        late = self._late if stay is not None and not begun.run.rope_delta else None
        passage = self._offer(job, begun, late, notes)
        if passage.handoff.hopeless:
            self._parked.leave(passage.apart, job.prompt_ids, job.owner)
            return passage.handoff.give_up  # a state that nobody takes is not computed
        try:
            self._compute(passage, begun.marks.preamble, job, check, notes)
            if late is not None and stay is not None and stay():
                try:
                    self._answer(passage, execution, job, late, stay)
                except ModelError as error:
                    passage.handoff.abandon(f"decode failed: {error}")
                    return _failing(error)
            snapshot = passage.last()
        except BaseException as error:
            passage.handoff.abandon(f"prefill stopped: {type(error).__name__}")
            if isinstance(error, Preempted | Cancelled) and passage.stands:
                self._park(begun, job, preempted=isinstance(error, Preempted))
            self._parked.leave(passage.apart, job.prompt_ids, job.owner)
            raise
        return lambda: {
            **self._finish(passage.handoff, snapshot, notes),
            **passage.facts(self._model.device.kernels),
            **({"late": _told(stay, passage.live)} if stay is not None else {}),
        }

    def _take_up(self, execution: Execution, job: Job) -> Begun:
        """The prefill of a prompt, with its images. Raises as `_begin` does, and ModelError."""
        notes = execution.notes
        with notes.stage("begin") as facts:
            begun = self._begin(execution, job)
            run = self._pictures.show(begun.run, job)
            if run is not begun.run:
                begun = Begun(run, marks=begun.marks)
            facts.update(tokens=run.position)
            if begun.borrowed:
                facts.update(bytes=begun.borrowed["bytes"])
                notes.fork("begin", "borrowed", str(begun.borrowed["path"]))
        return begun

    def _offer(self, job: Job, begun: Begun, late: Late | None, notes: Notes) -> Passage:
        """Offer the state, with room for an answer where one may be begun here."""
        layout, stop = self._model.layout, job.prompt_tokens - 1
        begun.passed = self._parked.claim(begun.run, job.owner, begun.marks.before)
        with notes.stage("offer"):
            handoff = self._links.begin(
                job,
                fingerprint=self._model.fingerprint,
                tokens=stop,
                nbytes=begun.nbytes(layout, stop if late is None else late.reach(job)),
                block_tokens=layout.block_tokens,
                start=begun.first(layout),
                apart=begun.apart_bytes(layout),
            )
        return Passage(begun, job.prompt_ids, layout, handoff, notes, answers=late is not None)

    def _compute(
        self,
        passage: Passage,
        preamble: int,
        job: Job,
        check: Callable[[int], bool],
        notes: Notes,
    ) -> None:
        """All forwards of the prompt. What `check` raises at their boundaries passes."""
        run, chunk = passage.run, self.chunk
        notes.fork("chunk", str(chunk), self._why_chunk)
        notes.fork("kernels", *kernels(self._model.device))
        passage.held()
        while run.remaining:
            began = time.monotonic()
            wanted = self.small_chunk if check(run.position) else self.chunk
            if wanted != chunk:
                run.replan(chunk := wanted)
                notes.fork("chunk", str(chunk), "a short interactive job waits, or no more")
            end = passage.forward(self._working, began)
            if end == preamble:
                self._parked.share(run, self._model.layout.state_bytes(end), job.owner)
        with notes.stage("check"):
            check(run.position)

    def _answer(
        self, passage: Passage, execution: Execution, job: Job, late: Late, stay: Staying
    ) -> None:
        """Say the answer here while it is to stay. Raises ModelError, and what `stay` raises."""
        passage.stands = False  # what `stay` raises finds no state to park
        with execution.notes.stage("decode"):
            passage.live = late.decode(
                execution, job, passage.run.caches, passage.schedule, stay, passage.grown
            )

    def _park(self, begun: Begun, job: Job, *, preempted: bool) -> None:
        """Keep a prefill that is not finished; one that was preempted comes again."""
        nbytes = self._model.layout.state_bytes(begun.run.position)
        if self._parked.put(begun.run, nbytes, job.owner) and preempted:
            self._lent = {**dict([*self._lent.items()][-_LENT:]), job.id: begun.known}

    def _finish(self, handoff: Handoff, snapshot: Piece, notes: Notes) -> dict[str, Any]:
        """Send what is left; what the wire took goes into the notes."""
        facts = handoff.finish(snapshot)
        now = time.monotonic()
        notes.add("wire", now - facts["seconds"], now, lane="link", bytes=facts["bytes"])
        errors = "; ".join(facts.get("errors", ()))
        notes.fork("link", facts["path"], errors or self._links.reason)
        return facts

    @property
    def _why_chunk(self) -> str:
        if self.chunk != self._model.chunk:
            return "prefill.chunk"
        if self.chunk != self._model.device.chunk:
            return "measured here by tandem calibrate"
        return f"the default on {self._model.device.kind}"

    def _begin(self, execution: Execution, job: Job) -> Begun:
        """The prefill of a prompt from the longest parked beginning, or from what is lent.

        Raises LinkError, CodecError where a state that is there could not be had.
        """
        ids = job.prompt_ids
        marks = marks_of(job, self._model.layout, self._snapshots)
        cuts = marks.before
        kept = self._parked.take(ids, job.owner)
        known = self._lent.pop(job.id, 0)
        # A shared preamble is no match for what the decode node has.
        if job.extends and (kept is None or kept.position < job.held_tokens):
            lent = self._borrow(execution, job, ids)
            if lent is not None:
                return lent
        if kept is None:
            return Begun(Prefill(self._model, ids, chunk=self.chunk, cuts=cuts), marks=marks)
        log.info("going on from token %d of %d", kept.position, len(ids))
        delta = kept.offset
        run = Prefill(
            self._model, ids, kept.position, kept.caches, self.chunk, rope_delta=delta, cuts=cuts
        )
        run.inherited = kept.inherited
        schedule: list[list[int]] = []
        for length in kept.schedule:
            append_schedule(schedule, length)
        run.schedule = list(kept.schedule)
        known = known if known <= run.position else 0
        return Begun(run, schedule, delta, known, marks=marks if not known else Marks())

    def _borrow(self, execution: Execution, job: Job, ids: list[int]) -> Begun | None:
        """Its conversation's state from the decode node; None where it has none any more."""

        def check() -> None:
            if execution.lost:
                raise Lost
            if execution.cancelled:
                raise Cancelled

        model = self._model
        try:
            lent = self._links.borrow(
                job,
                fingerprint=model.fingerprint,
                nbytes=model.layout.state_bytes(job.held_tokens),
                check=check,
            )
        except LinkError as error:
            if error.code != "missing":
                raise
            log.info("%s is computed from its start: %s", job.id, error)
            return None
        state = restore(model, lent.pieces, ids)
        known = len(state.ids)
        run = Prefill(model, ids, known, state.caches, self.chunk, rope_delta=state.rope_delta)
        run.schedule = expand_schedule(state.schedule)
        return Begun(
            run, [list(each) for each in state.schedule], state.rope_delta, known, lent.facts
        )


def _told(stay: Staying, live: Live | None) -> dict[str, Any]:
    """Where the answer was begun and why, and where it left."""
    chosen = stay.chosen
    return {
        "stayed": stay.began,
        "reason": chosen.reason if chosen else "",
        **({"left": stay.left, **live.facts()} if live is not None else {}),
    }


def _failing(error: Exception) -> Callable[[], Mapping[str, Any]]:
    def tail() -> Mapping[str, Any]:
        raise error

    return tail
