"""A conversation in the batch: what it brings, how its tokens are chosen, what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

from engine.errors import ModelError
from engine.grammar import Grammar
from engine.images import Embedded
from engine.model import Caches, Model
from engine.names import SEEN
from engine.prefill import append_schedule, expand_schedule, plan
from engine.sampling import SamplingParams, Top, number, sample, top_tokens
from engine.text import TextStream

Finish = Literal["stop", "length", "cancelled", "error"]


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
    make a state again exactly as it was made. `grammar` says which tokens may come. `reached` is
    called with the caches, the tokens in them and their schedule whenever they hold as many tokens
    as one of `cuts` says, if a forward ends there; it may copy them. `embedded` has the features of
    the images among the pending tokens; `rope_delta` is then the one after them.
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
    embedded: Embedded | None = None
    cuts: Sequence[int] = ()
    reached: Callable[[Caches, list[int], list[list[int]]], None] | None = None

    def check(self, model: Model) -> None:
        """Raise `ModelError` where `model` cannot continue this, `ValueError` for a wrong call."""
        if not self.pending:
            raise ModelError("a row needs at least one pending token to be continued")
        model.check_ids(self.ids)
        model.check_ids(self.pending)
        model.check_ids(self.emitted)
        if self.embedded is None and any(token >= SEEN for token in self.pending):
            raise ModelError("the images of the prompt are not here; send them again")
        said = list(self.said)
        if said and [*self.ids[len(self.ids) - len(said) + 1 :], *self.pending] != said:
            raise ValueError("the state does not end with what the answer has said")
        self.params.check(model.vocab_size)
        if self.params.stop and self.text is None:
            raise ValueError("stop strings need a TextStream")
        length = len(self.ids) + len(self.pending)
        if length > model.context_length:
            raise ModelError(
                f"the conversation has {length} tokens and the model's context "
                f"{model.context_length}; start a new one"
            )
        if self.lengths and (sum(self.lengths) != len(self.pending) - 1 or min(self.lengths) < 1):
            raise ValueError("the lengths do not cover the pending tokens but the last")


@dataclass
class Event:
    """What one step brought for one row.

    `token` stands at `position` of the whole conversation (None in an event without a token),
    `text` is what has become certain. The last event of a row has `finish` and hands back the
    state: `caches` hold exactly `ids`, built by the forwards in `schedule` ([length, count], ...),
    and `pending` must be fed next. What ran: `widths` counts the row's decode forwards by how many
    rows took part, `blocks` by how many tokens of each row they had (more than one where tokens
    were proposed), `drafted` and `accepted` the proposals and those that were right.
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
    blocks: dict[int, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    error: str = ""


class Active:
    """A row in the batch, with what decoding adds to it."""

    def __init__(self, uid: int, row: Row, model: Model, chunk: int) -> None:
        self.uid = uid
        self.caches: Caches | None = row.caches  # None while the row is part of the merged caches
        self.ids = list(row.ids)
        self.pending = list(row.pending)
        self.params = row.params
        self.forced = list(row.emitted)
        self.forced.reverse()
        self.grammar = row.grammar
        self.cuts, self.reached = row.cuts, row.reached
        self.embedded = row.embedded
        self.rope_delta = row.rope_delta if row.embedded is None else row.embedded.rope_delta
        self.schedule: list[list[int]] = []
        for length in expand_schedule(row.schedule):
            append_schedule(self.schedule, length)
        start = len(self.ids)
        self.chunks = list(row.lengths) or plan(start, start + len(self.pending) - 1, chunk)
        self.chunks.reverse()
        self.widths: Counter[int] = Counter()
        self.blocks: Counter[int] = Counter()
        self.drafted = self.accepted = 0
        self.ended = False
        self._text = row.text
        self._context = model.context_length
        self._generated: Counter[int] = Counter()
        self._count = 0
        self.over: Finish | None = None  # what was said before has ended the answer
        for position, token in enumerate(row.said, start + len(self.pending) - len(row.said)):
            if self.over:
                raise ValueError(f"the answer ends before token {position}")
            _, self.over = self._count_in(token, position)

    @property
    def greedy(self) -> bool:
        """Whether its next token is the largest of the model's own logits and nothing else."""
        return self.params.plain and self.grammar is None

    @property
    def room(self) -> int:
        """How many tokens may be proposed to follow the pending one."""
        if self.forced:
            return 0
        left = min(self.params.max_tokens - self._count, self._context - len(self.ids) - 1)
        return max(0, left - 1)

    def fed(self, length: int) -> None:
        """Move `length` pending tokens to the held ones."""
        self.ids += self.pending[:length]
        del self.pending[:length]
        append_schedule(self.schedule, length)

    def ran(self, width: int, length: int) -> None:
        """Note a decode forward of so many rows and so many tokens of each."""
        self.widths[width] += 1
        self.blocks[length] += 1

    def draw(self, logits: mx.array, ahead: Sequence[int] = ()) -> tuple[mx.array, mx.array | None]:
        """The token to follow the pending one and `ahead`, lazily, by `logits` (vocabulary,).

        Returns it with the log probabilities (vocabulary,; float32) where they are asked for. A
        row with a grammar knows its mask only once the tokens before are accepted, not `ahead`.
        """
        params = self.params
        seen: list[int] = []
        if params.repetition_penalty != 1:
            seen = [token for token in (*self.ids, self.pending[0], *ahead) if token < SEEN]
        generated = self._generated
        if ahead:
            generated = generated + Counter(ahead)
        mask = None
        if self.grammar is not None and not self.forced:
            assert not ahead, "the grammar has not accepted these"
            mask = self.grammar.mask()
        return sample(logits, params, len(self.ids) + 1 + len(ahead), seen, generated, mask)

    def take(self, token: int, logprobs: mx.array | None) -> Event | None:
        """Make `token` the pending one; None if an earlier attempt has given it out.

        An error of tokenizer or grammar ends the row, whose state is whole.
        """
        try:
            event = self._take(token, logprobs)
        except Exception as error:
            event = Event(self.uid, position=len(self.ids), finish="error", error=line_of(error))
        self.ended = event is not None and event.finish is not None
        return event

    def _take(self, token: int, logprobs: mx.array | None) -> Event | None:
        forced = bool(self.forced)
        if forced:
            token = self.forced.pop()
        self.pending = [token]
        position = len(self.ids)
        event = Event(self.uid, token, position)
        event.text, event.finish = self._count_in(token, position)
        if forced:
            if event.finish is None:
                return None
            event.token, event.text = None, ""
        elif logprobs is not None and self.params.top_logprobs >= 0:
            event.logprob = number(logprobs[token])
            event.top = top_tokens(logprobs, self.params.top_logprobs)
        return event

    def _count_in(self, token: int, position: int) -> tuple[str, Finish | None]:
        """Take `token` as the answer's next: the text that becomes certain, and how it ends."""
        self._generated[token] += 1
        self._count += 1
        text = ""
        finish: Finish | None = None
        if token in self.params.stop_ids:
            finish = "stop"
        else:
            if self.grammar is not None:
                self.grammar.accept(token)
            if self._text is not None:
                text = self._text.push(token)
                if self._text.stopped:
                    finish = "stop"
        full = position + 1 >= self._context
        if finish is None and (self._count >= self.params.max_tokens or full):
            finish = "length"
        if finish and self._text is not None:
            text += self._text.finish()
        return text, finish

    def cancelled(self) -> Event:
        """The event of a row that is taken out before its end."""
        event = Event(self.uid, position=len(self.ids), finish="cancelled")
        if self._text is not None:
            event.text = self._text.finish()
        return event

    def hand_back(self, event: Event) -> None:
        """Give the row's state and what ran to its last event."""
        event.caches, event.ids, event.pending = self.caches, self.ids, self.pending
        event.schedule = self.schedule
        event.widths, event.blocks = dict(self.widths), dict(self.blocks)
        event.drafted, event.accepted = self.drafted, self.accepted


def choose(rows: Sequence[Active], logits: mx.array) -> tuple[mx.array, list[mx.array | None]]:
    """The next token of each row (rows,) by `logits` (rows, vocabulary), and for each row its log
    probabilities where it asks for them; all lazy."""
    if all(row.greedy for row in rows):
        return mx.argmax(logits, axis=-1), [None] * len(rows)
    drawn = [row.draw(logits[i]) for i, row in enumerate(rows)]
    return mx.stack([token for token, _ in drawn]), [logprobs for _, logprobs in drawn]


def line_of(error: Exception) -> str:
    """The first line of an error, or its kind."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
