"""Where a row's state comes from: the link, memory, the store, or the model itself again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Literal

from engine.model import Model
from engine.prefill import expand_schedule, plan, plan_through
from scheduler.record import Job
from scheduler.runs import SendBack
from store.codec.header import CodecError, Piece
from store.errors import StoreError
from store.objects import ROWS
from store.store import Store
from worker_decode.behind import Behind
from worker_decode.early import Early
from worker_decode.hot import Held, Hot
from worker_decode.inbox import Inbox
from worker_decode.marks import LEAST_TOKENS, marks_of
from worker_decode.states import Restored, beginning, load, load_rows, restore

log = logging.getLogger("tandem.decode")

Path = Literal["cold", "hot", "restored", "extended", "recomputed"]


@dataclass
class Start:
    """A state to decode from. `caches` hold exactly `ids`, the first of the prompt.

    `lengths` are the forwards that compute the rest of the prompt but its last token, empty for
    the default plan. `base` is the turn whose stored rows this state begins with, `stored` how
    many of its tokens the store has. `notes` say why a better path was not taken.
    """

    path: Path
    caches: list[Any]
    ids: list[int]
    schedule: list[list[int]]
    rope_delta: int = 0
    lengths: list[int] = field(default_factory=list)
    base: str | None = None
    stored: int = 0
    notes: list[str] = field(default_factory=list)
    held: Held | None = None
    read: int = 0
    """Bytes that were read from the store for it."""
    after: int = 0
    """The offset of positions after the prompt; `rope_delta` is the one of this state."""
    lent: int = 0
    """Tokens that the prefill node was lent, or had of another prompt, where it made this state."""
    early: int = 0
    """Tokens of a received state that were unpacked before its job came."""
    cuts: tuple[int, ...] = ()
    """Marks of the prompt that are still to be computed here."""
    shared: list[list[Piece]] = field(default_factory=list)
    """States at marks of the prompt that arrived with this one, shortest first, snapshots last."""

    @property
    def cached(self) -> int:
        """Prompt tokens that did not pass through any model for this turn."""
        return self.lent if self.path in ("extended", "cold") else len(self.ids)


class Starts:
    """Finds the best verified state for a job. Used by the engine's thread alone."""

    def __init__(
        self,
        model: Model,
        store: Store,
        hot: Hot,
        inbox: Inbox,
        local_prefill_tokens: int,
        behind: Behind | None = None,
        snapshots: int = 0,
        early: Early | None = None,
    ) -> None:
        """`snapshots`: states that are kept inside one prompt, beside its preamble's; `early` has
        unpacked some of what arrives."""
        self._model = model
        self._store = store
        self._hot = hot
        self._inbox = inbox
        self._local = local_prefill_tokens
        self._behind = behind
        self._snapshots = snapshots
        self._early = early

    def find(self, job: Job, emitted: Sequence[int] = ()) -> Start:
        """The state to continue from; every candidate's token ids are compared with the prompt's.

        `emitted` is what the answer has said already: a state that arrives may hold some of it.
        Raises SendBack when a long prompt's state is gone and the prefill node should do it again.
        """
        ids = job.prompt_ids
        notes: list[str] = []
        start = (
            self._arrived(job, [*ids, *emitted], notes)
            or self._from_further(job, ids, notes)
            or self._from_memory(job, ids, notes)
            or self._from_prefix(job, ids, notes)
            or self._from_store(job, ids, notes)
            or (self._from_prefix(job, ids, notes, least=0) if job.previous else None)
        )
        if start is None:
            start = self._from_nothing(job, ids, notes)
        start.notes = notes
        self._mark(start, job)
        return start

    def give_back(self, start: Start) -> None:
        """The row could not be started: what was taken from memory stays there."""
        if start.held is not None:
            self._hot.put(start.held)

    def _arrived(self, job: Job, ids: Sequence[int], notes: list[str]) -> Start | None:
        pieces = self._inbox.take(job.id)
        if pieces is None:
            return None
        shared, (*rows, last) = _apart(pieces)
        try:
            if pieces[0].header.start:
                return self._joined(job, ids, [*rows, last])
            early = self._early
            state = (
                restore(self._model, [*rows, last], ids)
                if early is None
                else early.restore(pieces, rows, ids)
            )
            start = _start("cold", state)
            start.early = state.early
            start.shared = shared
            marks = marks_of(job, self._model.layout, self._snapshots)
            if marks.end and marks.end == len(start.ids) and not start.rope_delta:
                start.shared.append([*rows, last])
            start.lent = int((job.handoff or {}).get("shared") or 0)
            lent = last.header.extra.get("lent")
            if type(lent) is int and 0 < lent <= len(start.ids):  # too short for a block to stay
                start.path, start.lent = "extended", lent
            return start
        except (StoreError, CodecError) as error:
            self._note(job, notes, f"the received state is unusable: {error}")
            return None

    def _joined(self, job: Job, ids: Sequence[int], pieces: list[Piece]) -> Start:
        """The rows that were here all the time, and after them what the prefill node has added.

        Raises CodecError, StoreError where they are gone or do not fit together.
        """
        stop = pieces[0].header.start
        lent = pieces[-1].header.extra.get("lent")
        if not job.previous or type(lent) is not int or not stop <= lent < len(ids):
            raise CodecError("it does not say what it continues: recompute it")
        held = self._hot.get(job.previous)
        if held is None and self._behind is not None:
            held = self._behind.find(job.previous)
        if held is not None and len(held.ids) >= stop:
            rows = beginning(self._model, held, stop)
            start = _start("extended", restore(self._model, [*rows, *pieces], ids))
            start.base, start.stored = held.turn if held.stored else held.base, held.stored
            start.held = self._hot.take(held.turn)  # one that is behind another stays there
        else:
            fingerprint = self._model.fingerprint
            found = self._store.nearest_state(job.previous, fingerprint)
            reader = self._store.load_state(found.turn, fingerprint) if found is not None else None
            if found is None or reader is None:
                raise CodecError(f"the first {stop} tokens of it are not here any more")
            with reader:
                wanted = sum(
                    record.kind == ROWS and record.stop <= stop for _, record in reader.objects
                )
                rows = list(islice(reader, wanted))
            start = _start("extended", restore(self._model, [*rows, *pieces], ids))
            start.base, start.stored = found.turn, reader.ref.tokens
        start.lent = lent
        if marks_of(job, self._model.layout, self._snapshots, lent).end == len(start.ids):
            start.shared = [[*rows, *pieces]]
        return start

    def _from_further(self, job: Job, ids: list[int], notes: list[str]) -> Start | None:
        """A stored state far beyond the one in memory: a long message is sent once more."""
        held = self._hot.get(job.previous) if job.previous else None
        near = len(held.ids) if held is not None else 0
        if held is None and job.previous and self._behind is not None:
            near = self._behind.tokens(job.previous)
        if not near or len(ids) - near <= LEAST_TOKENS:
            return None
        return self._from_prefix(job, ids, notes, least=near + LEAST_TOKENS)

    def _from_memory(self, job: Job, ids: Sequence[int], notes: list[str]) -> Start | None:
        held = self._hot.get(job.previous) if job.previous else None
        behind = None
        if held is None and job.previous and self._behind is not None:
            held = behind = self._behind.find(job.previous)
        if held is None:
            return None
        if not _leads(held.ids, ids):
            notes.append("the prompt does not continue the state in memory")
            return None
        if behind is None:
            self._hot.take(held.turn)
        return Start(
            "hot", held.caches, held.ids, held.schedule, held.rope_delta,
            base=held.turn if held.stored else held.base, stored=held.stored,
            held=held if behind is None else None,
        )  # fmt: skip

    def _from_prefix(
        self, job: Job, ids: list[int], notes: list[str], least: int | None = None
    ) -> Start | None:
        """The longest beginning of the prompt that any stored state of its owner has.

        Only one with more tokens than `least` (default: than the previous turn's own state).
        """
        try:
            if least is None:
                model, turn = self._model.fingerprint, job.previous
                near = self._store.nearest_state(turn, model) if turn else None
                least = near.tokens if near is not None else 0
            found = self._store.longest_prefix(ids, job.owner, least)
            reader = None if found is None else self._store.load_prefix(found, ids)
            if found is None or reader is None:
                return None
            with reader:
                state = (
                    load(self._model, reader, ids)
                    if found.name
                    else load_rows(self._model, reader, ids, found.tokens)
                )
            if state is None:
                notes.append("a stored prefix is unusable: " + "; ".join(reader.report.damage))
                return None
        except (StoreError, CodecError) as error:
            self._note(job, notes, f"a stored prefix is unusable: {error}")
            return None
        return _start("restored", state, base=found.name or None, stored=found.tokens)

    def _mark(self, start: Start, job: Job) -> None:
        """Let the forwards to come end at the marks of the prompt that lie before them."""
        held, stop = len(start.ids), job.prompt_tokens - 1
        if held >= stop:
            return
        marks = marks_of(job, self._model.layout, self._snapshots, held)
        cuts = [mark for mark in marks.every if mark > held]
        if cuts and not start.lengths:
            start.lengths = plan_through(held, stop, self._model.chunk, cuts)
        ends = {held + end for end in accumulate(start.lengths)}
        start.cuts = tuple(mark for mark in cuts if mark in ends)

    def _from_store(self, job: Job, ids: list[int], notes: list[str]) -> Start | None:
        """The state after the previous turn, or the nearest one before it that is whole."""
        turn = job.previous
        try:
            while turn is not None:
                found = self._store.nearest_state(turn, self._model.fingerprint)
                if found is None:
                    notes.append("no stored state of this model")
                    return None
                start = self._load(found.turn, ids, notes)
                if start is not None:
                    start.lengths = self._recorded(job, ids, len(start.ids), notes)
                    return start
                damaged = self._store.get_turn(found.turn)
                turn = damaged.parent if damaged is not None else None
        except StoreError as error:
            self._note(job, notes, f"the store cannot be read: {error}")
        return None

    def _load(self, turn: str, ids: Sequence[int], notes: list[str]) -> Start | None:
        """The stored state of `turn`, or None and a note."""
        try:
            reader = self._store.load_state(turn, self._model.fingerprint)
            if reader is None:
                notes.append("the stored state was evicted meanwhile")
                return None
            with reader:
                state = load(self._model, reader, ids)
            if state is None:
                notes.append("the stored state is damaged: " + "; ".join(reader.report.damage))
                return None
        except (StoreError, CodecError) as error:
            notes.append(f"the stored state is unusable: {error}")
            log.error("the stored state of %s is unusable: %s", turn, error)
            return None
        start = _start("restored", state, base=turn, stored=len(state.ids))
        start.read = reader.ref.nbytes
        return start

    def _from_nothing(self, job: Job, ids: list[int], notes: list[str]) -> Start:
        moved = job.handoff is not None and job.handoff.get("path") not in (None, "none")
        gone = job.held_tokens and job.previous is None
        if (moved or gone) and len(ids) > self._local:
            raise SendBack("; ".join(["the state that had arrived is not here any more", *notes]))
        lengths = self._recorded(job, ids, 0, notes)
        path: Path = "recomputed" if job.previous or moved else "cold"
        if job.handoff is not None and job.handoff.get("error"):
            path = "recomputed"
            notes.append(f"no hand-off: {job.handoff['error']}")
        return Start(path, self._model.fresh_cache(), [], [], lengths=lengths)

    def _recorded(self, job: Job, ids: list[int], start: int, notes: list[str]) -> list[int]:
        """The previous turn's forwards from token `start` again, then the default plan for the new.

        The same boundaries give the same state on the same kind of device. Empty, which means the
        default plan for everything, where they are not known or do not fit.
        """
        if not start and job.handoff is not None and job.handoff.get("schedule"):
            lengths = expand_schedule(job.handoff["schedule"])  # of the state that had arrived
            if sum(lengths) == len(ids) - 1:
                return lengths
        try:
            turn = self._store.get_turn(job.previous) if job.previous else None
            past = self._store.turn_ids(turn.id) if turn is not None else []
        except StoreError as error:
            self._note(job, notes, f"the previous turn cannot be read: {error}")
            return []
        if turn is None:
            return []
        lengths = expand_schedule(turn.schedule)
        held = sum(lengths)
        if not 0 < held < len(ids) or past[:held] != ids[:held]:
            return []
        position = done = 0
        while position < start and done < len(lengths):
            position += lengths[done]
            done += 1
        if position != start:
            return []
        return lengths[done:] + plan(held, len(ids) - 1, self._model.chunk)

    def _note(self, job: Job, notes: list[str], text: str) -> None:
        notes.append(text)
        log.error("job %s: %s", job.id, text)


def _start(path: Path, state: Restored, base: str | None = None, stored: int = 0) -> Start:
    return Start(
        path, state.caches, state.ids, state.schedule, state.rope_delta, base=base, stored=stored
    )


def _apart(pieces: list[Piece]) -> tuple[list[list[Piece]], list[Piece]]:
    """The states whose snapshots stand among the rows, and the pieces without those snapshots."""
    *rows, last = pieces
    marks = [piece for piece in rows if piece.header.kind == "snapshot"]
    rows = [piece for piece in rows if piece.header.kind == "rows"]
    if not rows or rows[0].header.start:
        return [], [*rows, last]
    states = [
        [*(piece for piece in rows if piece.header.stop <= mark.header.stop), mark]
        for mark in marks
    ]
    return states, [*rows, last]


def _leads(held: Sequence[int], ids: Sequence[int]) -> bool:
    return len(held) < len(ids) and list(ids[: len(held)]) == list(held)
