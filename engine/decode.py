"""Continuous-batch decode over rows whose caches come from outside."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.drafters import Drafter
from engine.errors import ModelError
from engine.merged import Merged, NotMergeableError
from engine.model import Caches, Model, evaluate
from engine.rows import Active, Event, Row, choose, line_of
from engine.speculate import Speculation, Verified, verify

# A long run of steps leaves freed buffers of many sizes behind; they are returned this often.
CLEAR_EVERY = 256

__all__ = ["Batch", "Event", "Row"]

Group = tuple[list[Active], Caches]


class Batch:
    """Up to `slots` rows that are decoded together, one token each per `step`, or more.

    Use it in the thread that loaded the model. A row alone runs in its own caches, so that its
    shapes are those of a single run; two or more run in merged caches, joined and left at any step.
    A model whose caches cannot be merged is decoded row by row; `facts` says so. A row with more
    than one pending token is first extended by itself, a chunk per step. With a drafter a step
    may verify proposed tokens and give out several of a row at once.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        chunk: int = 0,
        batched: bool = True,
        drafter: Drafter | None = None,
        depth: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`chunk` is the extension chunk in tokens (0: the model's), `batched` False: by rows.

        `drafter` proposes up to `depth` tokens for each row, as long as that is faster by `clock`
        (seconds). With more than one slot, or a drafter, the model is probed here, once, which
        takes a few forwards.
        """
        self.model = model
        self.slots = slots
        self._chunk = chunk or model.chunk
        self._uids = itertools.count(1)
        self._rows: dict[int, Active] = {}
        self._merged: Merged[Active] = Merged()
        self._row_wise = "" if batched else "batching is switched off"
        if batched and slots > 1:
            self._row_wise = model.batching.reason
        self._speculation = None
        if drafter is not None:
            together = slots if not self._row_wise else 1
            self._speculation = Speculation(model, drafter, depth, together, clock)
        self._clock = clock
        self._steps = 0
        self._widths: Counter[int] = Counter()
        #: The prompt chunk of the last step, if it had one: (uid, tokens, begun, ended), monotonic.
        self.extended: tuple[int, int, float, float] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def facts(self) -> dict[str, Any]:
        """The path that decoding takes: batched or by rows and why, steps, widths so far."""
        return {
            **({"probe": self.model.batching.facts()} if self.slots > 1 else {}),
            **({"speculation": self._speculation.facts()} if self._speculation else {}),
            "batched": not self._row_wise,
            "reason": self._row_wise,
            "compiled": self.model.compiled,
            "steps": self._steps,
            "widths": dict(self._widths),
        }

    @property
    def way(self) -> dict[str, Any]:
        """How rows are decoded here now: with which kernels, merged or row by row, by which drafter
        (empty: none)."""
        speculation = self._speculation
        drafting = speculation is not None and not speculation.reason
        return {
            "kernels": self.model.device.kernels,
            "rows": "row by row" if self._row_wise else "merged",
            "reason": self._row_wise,
            "drafter": speculation.name if drafting and speculation is not None else "",
        }

    def add(self, row: Row) -> int:
        """Take `row` into the batch; returns its uid. Its caches belong to the batch from now on.

        Raises `ModelError` when no slot is free, a token id or parameter is out of range, or the
        answer cannot fit into the context.
        """
        if len(self._rows) >= self.slots:
            raise ModelError(f"all {self.slots} decode slots are taken; wait for one")
        row.check(self.model)
        uid = next(self._uids)
        self._rows[uid] = Active(uid, row, self.model, self._chunk)
        return uid

    def cancel(self, uid: int) -> Event:
        """Take a row out between two steps; raises `KeyError` for one that has ended."""
        row = self._rows[uid]
        event = row.cancelled()
        self._end([(row, event)])
        return event

    def caches(self, uid: int) -> Caches:
        """The caches of a row between two steps: they stay its own, and hold its `ids`.

        Raises `KeyError` for one that has ended.
        """
        row = self._rows[uid]
        if row.caches is None:
            self._merged.arrange([other for other in self._merged.rows if other is not row])
        assert row.caches is not None
        return row.caches

    def step(self) -> list[Event]:
        """One extension chunk for at most one row, then a token for every row that is ready.

        Every event's token has been chosen and not yet fed, but for those of one row that another
        follows. A row whose computation fails ends with an event "error"; the others go on.
        """
        over = [
            (row, Event(row.uid, position=len(row.ids), finish=row.over))
            for row in self._rows.values()
            if row.over
        ]
        self._end(over)
        events = [event for _, event in over]
        extended = next((row for row in self._rows.values() if row.chunks), None)
        self.extended = None
        if extended is not None:
            begun, length = time.monotonic(), extended.chunks[-1]
            try:
                self._extend(extended)
                self.extended = (extended.uid, length, begun, time.monotonic())
            except Exception as error:  # whatever a model raises concerns this row alone
                events.append(self._fail(extended, error))
        ready = [row for row in self._rows.values() if not row.chunks]
        if ready:
            events += self._decode(ready)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return events

    def _extend(self, row: Active) -> None:
        length = row.chunks.pop()
        assert row.caches is not None, "a row is extended before it joins"
        tokens = self.model.tokens(row.pending[:length])
        arguments = None
        if row.embedded is not None:
            start = len(row.ids)
            arguments = row.embedded.arguments(start, start + length)
        self.model.forward(tokens, row.caches, [row.rope_delta], logits=False, arguments=arguments)
        evaluate(row.caches)
        row.fed(length)
        if row.reached is not None and len(row.ids) in row.cuts:
            row.reached(row.caches, list(row.ids), [list(entry) for entry in row.schedule])

    def _decode(self, ready: list[Active]) -> list[Event]:
        try:
            groups = self._groups(ready)
        except Exception as error:  # no row's state can be trusted after this
            return self._fail_all(ready, error)
        speculation = self._speculation
        if speculation is None:
            return self._plain(groups)
        rounds = [speculation.wanted(rows) for rows, _ in groups]
        plain = [group for group, wanted in zip(groups, rounds, strict=True) if not wanted]
        events = self._plain(plain) if plain else []
        for group, wanted in zip(groups, rounds, strict=True):
            if wanted:
                events += self._round(group, speculation)
        return events

    def _groups(self, ready: list[Active]) -> list[Group]:
        """The rows that are decoded together, with the caches they run in."""
        if len(ready) >= self.model.merge_from and not self._row_wise:
            try:
                self._merged.arrange(ready)
            except NotMergeableError as error:
                self._row_wise = str(error)
            else:
                if self._merged.caches is not None:
                    return [(list(self._merged.rows), self._merged.caches)]
        self._merged.arrange([])
        groups: list[Group] = []
        for row in ready:
            assert row.caches is not None
            groups.append(([row], row.caches))
        return groups

    def _plain(self, groups: Sequence[Group]) -> list[Event]:
        """Feed every row its pending token and choose the next."""
        begun = self._clock()
        try:
            chosen = []
            for rows, caches in groups:
                tokens = mx.array([[row.pending[0]] for row in rows], dtype=mx.int32)
                deltas = [row.rope_delta for row in rows]
                logits = self.model.forward(tokens, caches, deltas)[:, -1]
                chosen.append(choose(rows, logits))
            mx.eval(chosen)
        except Exception as error:  # no row's state can be trusted after this
            return self._fail_all([row for rows, _ in groups for row in rows], error)
        events: list[Event] = []
        for (rows, _), (tokens, logprobs) in zip(groups, chosen, strict=True):
            values: Any = tokens.tolist()
            for row, token, known in zip(rows, values, logprobs, strict=True):
                row.fed(1)
                row.ran(len(rows), 1)
                event = row.take(int(token), known)
                if event is not None:
                    events.append(event)
            self._widths[len(rows)] += 1
        if self._speculation is not None:
            seconds = self._clock() - begun if len(groups) == 1 else None
            for rows, _ in groups:
                self._speculation.passed(rows, seconds)
        self._end_of(events)
        return events

    def _round(self, group: Group, speculation: Speculation) -> list[Event]:
        """Feed pending tokens and proposed ones, and keep what the model itself chooses.

        The walk ends with the answer, so that the state never holds a token beyond its end.
        """
        rows, caches = group
        begun = self._clock()
        events: list[Event] = []
        tried: Verified | None = None
        try:
            drafts = speculation.propose(rows)
            length = 1 + max(map(len, drafts))
            fed = [
                [row.pending[0], *draft, *[0] * (length - 1 - len(draft))]
                for row, draft in zip(rows, drafts, strict=True)
            ]
            deltas = [row.rope_delta for row in rows]
            tried = verify(self.model, fed, caches, deltas, speculation.hidden)
            new = self._walk(rows, drafts, tried.logits, events)
            tried.keep([len(tokens) for tokens in new])
        except Exception as error:  # these rows' state cannot be trusted after this
            if tried is not None:
                tried.undo()
            speculation.undo(rows)
            told = [event for event in events if not event.finish]
            return told + self._fail_all(rows, error)
        for row in rows:
            row.ran(len(rows), length)
        self._widths[len(rows)] += 1
        speculation.settle(rows, drafts, new, tried.hidden, self._clock() - begun)
        self._end_of(events)
        return events

    def _walk(
        self,
        rows: Sequence[Active],
        drafts: Sequence[Sequence[int]],
        logits: mx.array,
        events: list[Event],
    ) -> list[list[int]]:
        """The tokens that come out of `logits` (rows, tokens, vocabulary), row by row."""
        drawn = [
            [row.draw(logits[i, j], drafts[i][:j]) for j in range(1 + len(drafts[i]))]
            if not row.greedy and row.grammar is None
            else []
            for i, row in enumerate(rows)
        ]
        best = mx.argmax(logits, axis=-1)
        mx.eval(best, drawn)
        greedy: Any = best.tolist()
        new: list[list[int]] = []
        for i, row in enumerate(rows):
            tokens: list[int] = []
            new.append(tokens)
            for j in range(1 + len(drafts[i])):
                known: mx.array | None = None
                if row.greedy:
                    token = int(greedy[i][j])
                else:  # what a grammar allows is known only now
                    choice, known = drawn[i][j] if drawn[i] else row.draw(logits[i, j])
                    value: Any = choice.item()
                    token = int(value)
                row.fed(1)
                event = row.take(token, known)
                tokens.append(row.pending[0])
                if event is not None:
                    events.append(event)
                if row.ended or j == len(drafts[i]) or token != drafts[i][j]:
                    break
        return new

    def _end_of(self, events: Sequence[Event]) -> None:
        ended = [event for event in events if event.finish]
        self._end([(self._rows[event.uid], event) for event in ended])

    def _end(self, ended: Sequence[tuple[Active, Event]]) -> None:
        """Hand each row's state to its event and let the row go."""
        for row, _ in ended:
            self._merged.release(row)
            self._let_go(row)
        self._merged.compact()
        for row, event in ended:
            assert row.caches is not None
            evaluate(row.caches)
            row.hand_back(event)

    def _fail_all(self, rows: Sequence[Active], error: Exception) -> list[Event]:
        self._merged.clear()
        return [self._fail(row, error) for row in rows]

    def _fail(self, row: Active, error: Exception) -> Event:
        self._let_go(row)
        return Event(row.uid, position=len(row.ids), finish="error", error=line_of(error))

    def _let_go(self, row: Active) -> None:
        self._rows.pop(row.uid, None)
        if self._speculation is not None:
            self._speculation.forget(row.uid)
