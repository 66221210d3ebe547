"""Continuous-batch decode over rows whose caches come from outside."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from engine.errors import ModelError
from engine.grammar import Grammar
from engine.merged import Merged, NotMergeableError
from engine.model import Caches, Model, evaluate
from engine.prefill import append_schedule, expand_schedule, plan
from engine.sampling import SamplingParams, Top, sample, top_tokens
from engine.speculate import Drafter, Speculation, Verified, verify
from engine.text import TextStream

Finish = Literal["stop", "length", "cancelled", "error"]
# A long run of steps leaves freed buffers of many sizes behind; they are returned this often.
CLEAR_EVERY = 256


@dataclass
class Row:
    """A conversation that wants to be continued.

    `caches` hold exactly the tokens `ids`; `pending` (at least one) are fed next, the last of them
    in a decode step. `emitted` are tokens that an earlier attempt already gave out: they are fed
    again, never drawn again. `said` are tokens of the answer before those which are not fed either,
    because the state came with them: `ids` end with all of them but the last, which is the one
    pending token. What follows is drawn as if the answer had begun here: penalties, stop strings,
    grammar and length count them. `schedule` says how the held state was made, `rope_delta` is the
    model's position offset, `text` turns tokens into text and finds stop strings. `lengths` are
    the forwards that feed all pending tokens but the last (empty: the default plan); recorded ones
    make a state again exactly as it was made. `grammar` says which tokens may come.
    """

    caches: Caches
    ids: list[int]
    pending: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    emitted: Sequence[int] = ()
    said: Sequence[int] = ()
    schedule: Sequence[Sequence[int] | int] = ()
    rope_delta: int = 0
    text: TextStream | None = None
    lengths: Sequence[int] = ()
    grammar: Grammar | None = None


@dataclass
class Event:
    """What one step brought for one row.

    `token` stands at `position` of the whole conversation (None in an event without a token),
    `text` is what has become certain. The last event of a row has `finish` and hands back the
    state: `caches` hold exactly `ids`, built by the forwards in `schedule` ([length, count], ...),
    and `pending` must be fed next. `widths` counts the row's decode steps by batch width.
    """

    uid: int
    token: int | None = None
    position: int = 0
    text: str = ""
    logprob: float | None = None
    top: Top = field(default_factory=list)
    finish: Finish | None = None
    caches: Caches | None = None
    ids: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    schedule: list[list[int]] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)
    error: str = ""


class _Active:
    """A row in the batch, with what decoding adds to it."""

    def __init__(self, uid: int, row: Row, chunk: int) -> None:
        self.uid = uid
        self.caches: Caches | None = row.caches  # None while the row is part of the merged caches
        self.ids = list(row.ids)
        self.pending = list(row.pending)
        self.params = row.params
        self.forced = list(row.emitted)
        self.forced.reverse()
        self.text = row.text
        self.grammar = row.grammar
        self.rope_delta = row.rope_delta
        self.schedule: list[list[int]] = []
        for length in expand_schedule(row.schedule):
            append_schedule(self.schedule, length)
        start = len(self.ids)
        self.chunks = list(row.lengths) or plan(start, start + len(self.pending) - 1, chunk)
        self.chunks.reverse()
        self.generated: Counter[int] = Counter()
        self.count = 0
        self.over: Finish | None = None  # what was said before has ended the answer
        self.widths: Counter[int] = Counter()

    def fed(self, length: int) -> None:
        """Move `length` pending tokens to the held ones."""
        self.ids += self.pending[:length]
        del self.pending[:length]
        append_schedule(self.schedule, length)


class Batch:
    """Up to `slots` rows that are decoded together, one token each per `step`.

    Use it in the thread that loaded the model. A row alone runs in its own caches, so that its
    shapes are those of a single run; two or more run in merged caches, joined and left at any step.
    A model whose caches cannot be merged is decoded row by row; `facts` says so. A row with more
    than one pending token is first extended by itself, a chunk per step.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        chunk: int = 0,
        batched: bool = True,
        drafter: Drafter | None = None,
        depth: int = 3,
    ) -> None:
        """`chunk` is the extension chunk in tokens (0: the model's), `batched` False: by rows.

        `drafter` proposes up to `depth` tokens while one row is alone. With more than one slot, or
        a drafter, the model is probed here, once, which takes a few forwards.
        """
        self.model = model
        self.slots = slots
        self._chunk = chunk or model.chunk
        self._uids = itertools.count(1)
        self._rows: dict[int, _Active] = {}
        self._merged: Merged[_Active] = Merged()
        self._row_wise = "" if batched else "batching is switched off"
        if batched and slots > 1:
            self._row_wise = model.batching.reason
        self._speculation = None if drafter is None else Speculation(model, drafter, depth)
        self._steps = 0
        self._widths: Counter[int] = Counter()

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
            "steps": self._steps,
            "widths": dict(self._widths),
        }

    def add(self, row: Row) -> int:
        """Take `row` into the batch; returns its uid. Its caches belong to the batch from now on.

        Raises `ModelError` when no slot is free, a token id or parameter is out of range, or the
        answer cannot fit into the context.
        """
        if len(self._rows) >= self.slots:
            raise ModelError(f"all {self.slots} decode slots are taken; wait for one")
        if not row.pending:
            raise ModelError("a row needs at least one pending token to be continued")
        self.model.check_ids(row.ids)
        self.model.check_ids(row.pending)
        self.model.check_ids(row.emitted)
        said = list(row.said)
        if said and [*row.ids[len(row.ids) - len(said) + 1 :], *row.pending] != said:
            raise ValueError("the state does not end with what the answer has said")
        row.params.check(self.model.vocab_size)
        if row.params.stop and row.text is None:
            raise ValueError("stop strings need a TextStream")
        length = len(row.ids) + len(row.pending)
        if length > self.model.context_length:
            raise ModelError(
                f"the conversation has {length} tokens and the model's context "
                f"{self.model.context_length}; start a new one"
            )
        if row.lengths and (sum(row.lengths) != len(row.pending) - 1 or min(row.lengths) < 1):
            raise ValueError("the lengths do not cover the pending tokens but the last")
        uid = next(self._uids)
        active = _Active(uid, row, self._chunk)
        for position, token in enumerate(said, length - len(said)):
            if active.over:
                raise ValueError(f"the answer ends before token {position}")
            _, active.over = self._count(active, token, position)
        self._rows[uid] = active
        return uid

    def cancel(self, uid: int) -> Event:
        """Take a row out between two steps; raises `KeyError` for one that has ended."""
        row = self._rows[uid]
        event = Event(uid, position=len(row.ids), finish="cancelled")
        if row.text is not None:
            event.text = row.text.finish()
        self._end([(row, event)])
        return event

    def step(self) -> list[Event]:
        """One extension chunk for at most one row, then one token for every row that is ready.

        Every event's token has been chosen and not yet fed. A row whose computation fails ends with
        an event "error"; the others go on.
        """
        over = [
            (row, Event(row.uid, position=len(row.ids), finish=row.over))
            for row in self._rows.values()
            if row.over
        ]
        self._end(over)
        events = [event for _, event in over]
        extended = next((row for row in self._rows.values() if row.chunks), None)
        if extended is not None:
            try:
                self._extend(extended)
            except Exception as error:  # whatever a model raises concerns this row alone
                events.append(self._fail(extended, error))
        ready = [row for row in self._rows.values() if not row.chunks]
        if ready:
            events += self._decode(ready)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return events

    def _extend(self, row: _Active) -> None:
        length = row.chunks.pop()
        assert row.caches is not None, "a row is extended before it joins"
        tokens = mx.array([row.pending[:length]], dtype=mx.int32)
        self.model.forward(tokens, row.caches, [row.rope_delta], logits=False)
        evaluate(row.caches)
        row.fed(length)

    def _decode(self, ready: list[_Active]) -> list[Event]:
        if self._speculation is not None:
            if len(ready) == 1 and not ready[0].forced and not self._speculation.reason:
                return self._round(ready[0], self._speculation)
            self._speculation.leave()
        try:
            groups = self._forward(ready)
            chosen = [self._choose(rows, logits) for rows, logits in groups]
            mx.eval([part for group in chosen for part in group])
        except Exception as error:  # no row's state can be trusted after this
            self._merged.clear()
            return [self._fail(row, error) for row in ready]
        events: list[Event] = []
        ended: list[tuple[_Active, Event]] = []
        for (rows, _), (tokens, *logprobs) in zip(groups, chosen, strict=True):
            values: Any = tokens.tolist()
            for i, (row, token) in enumerate(zip(rows, values, strict=True)):
                row.fed(1)
                row.widths[len(rows)] += 1
                event = self._emit(row, int(token), logprobs, i)
                if event is None:
                    continue
                events.append(event)
                if event.finish:
                    ended.append((row, event))
            self._widths[len(rows)] += 1
        self._end(ended)
        return events

    def _round(self, row: _Active, speculation: Speculation) -> list[Event]:
        """Feed a row's pending token and proposed ones, and keep what the model itself chooses.

        The walk ends with the answer, so that the state never holds a token beyond its end.
        """
        self._merged.arrange([])
        assert row.caches is not None
        drafter = speculation.drafter
        room = min(
            row.params.max_tokens - row.count - 1, self.model.context_length - len(row.ids) - 2
        )
        events: list[Event] = []
        new: list[int] = []
        tried: Verified | None = None
        try:
            drafted = speculation.propose(row.uid, row.ids, row.pending[0], room)
            fed = [row.pending[0], *drafted]
            tried = verify(self.model, fed, row.caches, row.rope_delta, drafter.hidden)
            greedy: Any = None
            if row.params.plain and row.grammar is None:
                greedy = mx.argmax(tried.logits, axis=-1).tolist()
            for i in range(len(fed)):
                logprobs: list[mx.array] = []
                if greedy is not None:
                    token = int(greedy[i])
                else:
                    choice, *logprobs = self._choose([row], tried.logits[i : i + 1])
                    token = int(_number(choice[0]))
                row.fed(1)
                new.append(token)
                event = self._emit(row, token, logprobs, 0)
                assert event is not None, "a row with tokens to feed again takes no part in rounds"
                events.append(event)
                if event.finish or i == len(drafted) or token != drafted[i]:
                    break
            tried.keep(len(new))
            if not events[-1].finish:
                speculation.settle(row.uid, row.ids, drafted, new, tried.hidden)
        except Exception as error:  # this row's state cannot be trusted after this
            drafter.abort()
            speculation.leave()
            if tried is not None:
                tried.undo()
            return [*events, self._fail(row, error)]
        row.widths[1] += 1
        self._widths[1] += 1
        if events[-1].finish:
            speculation.leave()
            self._end([(row, events[-1])])
        return events

    def _forward(self, ready: list[_Active]) -> list[tuple[list[_Active], mx.array]]:
        """Feed every ready row its pending token; returns groups of rows with their last logits."""
        merging = len(ready) >= self.model.merge_from and not self._row_wise
        if merging:
            try:
                self._merged.arrange(ready)
            except NotMergeableError as error:
                self._row_wise, merging = str(error), False
        if not merging:
            self._merged.arrange([])
            groups = [([row], row.caches) for row in ready]
        else:
            ready = list(self._merged.rows)
            groups = [(ready, self._merged.caches)]
        found: list[tuple[list[_Active], mx.array]] = []
        for rows, caches in groups:
            assert caches is not None
            tokens = mx.array([[row.pending[0]] for row in rows], dtype=mx.int32)
            deltas = [row.rope_delta for row in rows]
            found.append((rows, self.model.forward(tokens, caches, deltas)[:, -1]))
        return found

    def _choose(self, rows: list[_Active], logits: mx.array) -> list[mx.array]:
        """The next token of each row as one lazy array, then log probabilities if asked for."""
        if all(row.params.plain and row.grammar is None for row in rows):
            return [mx.argmax(logits, axis=-1)]
        tokens: list[mx.array] = []
        logprobs: list[mx.array] = []
        for i, row in enumerate(rows):
            seen = [*row.ids, row.pending[0]] if row.params.repetition_penalty != 1 else ()
            position = len(row.ids) + 1
            mask = row.grammar.mask() if row.grammar is not None and not row.forced else None
            token, probabilities = sample(
                logits[i], row.params, position, seen, row.generated, mask
            )
            tokens.append(token)
            logprobs.append(mx.zeros((0,)) if probabilities is None else probabilities)
        return [mx.stack(tokens), *logprobs]

    def _emit(self, row: _Active, token: int, logprobs: list[mx.array], i: int) -> Event | None:
        """`_tell`; an error of tokenizer or grammar ends the row, whose state is whole."""
        try:
            return self._tell(row, token, logprobs, i)
        except Exception as error:
            return Event(row.uid, position=len(row.ids), finish="error", error=_line(error))

    def _tell(self, row: _Active, token: int, logprobs: list[mx.array], i: int) -> Event | None:
        """Make `token` the row's pending one; None if an earlier attempt has given it out."""
        forced = bool(row.forced)
        if forced:
            token = row.forced.pop()
        row.pending = [token]
        position = len(row.ids)
        event = Event(row.uid, token, position)
        event.text, event.finish = self._count(row, token, position)
        if forced:
            if event.finish is None:
                return None
            event.token, event.text = None, ""
        elif logprobs and row.params.top_logprobs >= 0:
            event.logprob = _number(logprobs[i][token])
            event.top = top_tokens(logprobs[i], row.params.top_logprobs)
        return event

    def _count(self, row: _Active, token: int, position: int) -> tuple[str, Finish | None]:
        """Take `token` as the answer's next: the text that becomes certain, and how it ends."""
        row.generated[token] += 1
        row.count += 1
        text = ""
        finish: Finish | None = None
        if token in row.params.stop_ids:
            finish = "stop"
        else:
            if row.grammar is not None:
                row.grammar.accept(token)
            if row.text is not None:
                text = row.text.push(token)
                if row.text.stopped:
                    finish = "stop"
        full = position + 1 >= self.model.context_length
        if finish is None and (row.count >= row.params.max_tokens or full):
            finish = "length"
        if finish and row.text is not None:
            text += row.text.finish()
        return text, finish

    def _end(self, ended: list[tuple[_Active, Event]]) -> None:
        """Hand each row's state to its event and let the row go."""
        for row, _ in ended:
            self._merged.release(row)
            del self._rows[row.uid]
        self._merged.compact()
        for row, event in ended:
            assert row.caches is not None
            evaluate(row.caches)
            event.caches, event.ids, event.pending = row.caches, row.ids, row.pending
            event.schedule, event.widths = row.schedule, dict(row.widths)

    def _fail(self, row: _Active, error: Exception) -> Event:
        self._rows.pop(row.uid, None)
        return Event(row.uid, position=len(row.ids), finish="error", error=_line(error))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _number(value: mx.array) -> float:
    found: Any = value.item()
    return float(found)
