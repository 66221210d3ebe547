"""Speculative decoding: tokens proposed, verified by one forward, and only what is right kept.

A round feeds each row's pending token and the proposed ones, draws the target's own token at each
position exactly as ordinary decoding would (greedy, or by seed and position), and keeps proposals
while they are the same. What is drawn is the model's answer either way; a bad drafter costs time,
not quality, and not much time: rounds that are slower than plain steps are given up for a while.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_vlm.speculative.common import verify_forward

from engine.drafters import Drafter
from engine.merged import NotMergeableError, merge
from engine.names import SEEN
from engine.pace import REST_ROUNDS, Pace
from engine.probe import TOLERANCE, Batching, largest, probe_tokens, token_ids
from engine.rows import Active, line_of

if TYPE_CHECKING:
    from engine.model import Caches, Model

LONGEST = 7  # proposals; with the pending token a forward of 8, mlx-vlm's decode block
PROBE = (4, 2)  # tokens verified at once, kept of them by the first row
# A row's proposals are given up for a while when fewer than this share of the last was right.
LEAST_ACCEPTED, RECENT_ROUNDS = 0.2, 16


@dataclass
class Verified:
    """A forward of the pending tokens and the proposed ones, not yet kept.

    `logits` (rows, tokens, vocabulary), `hidden` (rows, tokens, width) where asked for. `keep`
    leaves exactly the first so many tokens of each row in the caches; `undo` none.
    """

    logits: mx.array
    hidden: mx.array | None
    transaction: Any

    def keep(self, counts: Sequence[int]) -> None:
        if self.transaction is not None:
            self.transaction.commit(list(counts))

    def undo(self) -> None:
        if self.transaction is not None:
            self.transaction.abort()


def verify(
    model: Model,
    tokens: Sequence[Sequence[int]],
    caches: Caches,
    rope_deltas: Sequence[int],
    hidden: bool,
) -> Verified:
    """Feed each row its `tokens` (all equally many), so that any prefix of them can be kept."""
    ids = mx.array([list(row) for row in tokens], dtype=mx.int32)
    arguments = model.arguments(rope_deltas)
    if hidden:
        arguments["return_hidden"] = True
    if ids.shape[1] == 1:  # the forward of ordinary decoding
        output, transaction = model.lm(ids, cache=caches, **arguments), None
    else:
        output, transaction = verify_forward(model.lm, ids, caches, **arguments)
    states = output.hidden_states[-1] if hidden else None
    return Verified(output.logits, states, transaction)


class _Follower:
    """A drafter on one row, and how often it is right."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rest = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_ROUNDS)

    def note(self, drafted: int, right: int) -> None:
        self._recent.append((drafted, right))
        tried, hits = (sum(column) for column in zip(*self._recent, strict=True))
        if len(self._recent) == RECENT_ROUNDS and hits < LEAST_ACCEPTED * tried:
            self.rest = REST_ROUNDS
            self._recent.clear()


class Speculation:
    """A drafter at work on the rows of a batch: when it proposes, how often it is right."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        depth: int,
        rows: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`depth` is the most tokens to propose. The model is probed here, once; also with several
        rows where there may be so many."""
        if not 1 <= depth <= LONGEST:
            raise ValueError(f"between 1 and {LONGEST} tokens can be proposed, not {depth}")
        self.name = drafter.name
        self.hidden = drafter.hidden
        self.reason = model.verifying.reason
        self.batch_reason = "" if rows > 1 else "there is one row only"
        if rows > 1 and not self.reason:
            self.batch_reason = model.batching.reason or model.verifying_rows.reason
        self.clock = clock
        self._noise = model.verifying.noise
        self._drafter = drafter
        self._depth = depth
        self._followers: dict[int, _Follower] = {}
        self._paces: dict[int, Pace] = {}
        self._rounds = self._drafted = self._accepted = 0

    def wanted(self, rows: Sequence[Active]) -> bool:
        """Whether the next step of these rows, which are decoded together, is to be a round."""
        if self.reason or (len(rows) > 1 and self.batch_reason):
            return False
        pace = self._pace(len(rows))
        if pace.rest:
            pace.rest -= 1
            return False
        return True

    def propose(self, rows: Sequence[Active]) -> list[list[int]]:
        """For each row the tokens to verify after its pending one, possibly none.

        A drafter that fails is not asked again: decoding goes on without it.
        """
        drafts: list[list[int]] = [[] for _ in rows]
        if not self._pace(len(rows)).known:
            return drafts
        for i, row in enumerate(rows):
            follower = self._followers.get(row.uid)
            count = min(row.room, self._depth)
            if follower is None or count < 1:
                continue
            if follower.rest:
                follower.rest -= 1
                continue
            try:
                found = follower.drafter.propose(row.ids, row.pending[0], count)
            except Exception as error:  # whatever a drafter raises concerns no answer
                self._give_up(error)
                return [[] for _ in rows]
            # What stands in a prompt for an image is nothing that a model says.
            drafts[i] = list(itertools.takewhile(lambda token: token < SEEN, found[:count]))
        return drafts

    def settle(
        self,
        rows: Sequence[Active],
        drafts: Sequence[Sequence[int]],
        new: Sequence[Sequence[int]],
        hidden: mx.array | None,
        seconds: float,
    ) -> None:
        """A round is over: each row holds its `new` tokens but the last, which is pending.

        Rows that have ended must be forgotten first; `seconds` is what the round took.
        """
        pace = self._pace(len(rows))
        if any(drafts):
            self._rounds += 1
            pace.round(sum(map(len, new)), seconds)
        else:
            pace.plain(seconds)
        for i, row in enumerate(rows):
            if self.reason:
                return
            if drafts[i]:
                self._drafted += len(drafts[i])
                self._accepted += len(new[i]) - 1
                row.drafted += len(drafts[i])
                row.accepted += len(new[i]) - 1
            if row.ended or row.forced:
                continue
            states = None if hidden is None else hidden[i : i + 1, : len(new[i])]
            follower = self._followers.get(row.uid)
            try:
                if follower is None:
                    follower = self._followers[row.uid] = _Follower(self._drafter.fresh())
                    follower.drafter.begin(row.ids, new[i][-1], states)
                else:
                    if drafts[i]:
                        follower.note(len(drafts[i]), len(new[i]) - 1)
                    follower.drafter.settle(row.ids, drafts[i], new[i], states)
            except Exception as error:  # the answer does not depend on the drafter
                self._give_up(error)

    def passed(self, rows: Sequence[Active], seconds: float | None) -> None:
        """These rows have made a plain step together, in so many seconds where that is known."""
        if seconds is not None:
            self._pace(len(rows)).plain(seconds)
        for row in rows:
            follower = self._followers.get(row.uid)
            if follower is None:
                continue
            if self.hidden or row.ended:  # what it knows is out of date
                self.forget(row.uid)
            else:
                try:
                    follower.drafter.settle(row.ids, [], row.pending, None)
                except Exception as error:  # as above
                    self._give_up(error)

    def forget(self, uid: int) -> None:
        """A row has gone."""
        self._followers.pop(uid, None)

    def undo(self, rows: Sequence[Active]) -> None:
        """A round has failed: nothing that was proposed counts."""
        for row in rows:
            follower = self._followers.pop(row.uid, None)
            if follower is not None:
                follower.drafter.abort()

    def facts(self) -> dict[str, Any]:
        """For reports: which drafter, why it is off if it is, how many proposals were right."""
        return {
            "drafter": self.name,
            "reason": self.reason,
            "batched": not self.batch_reason,
            "batch_reason": self.batch_reason,
            "noise": self._noise,
            "depth": self._depth,
            "rounds": self._rounds,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "acceptance": self._accepted / self._drafted if self._drafted else None,
        }

    def _pace(self, width: int) -> Pace:
        return self._paces.setdefault(width, Pace(width))

    def _give_up(self, error: Exception) -> None:
        self.reason = f"the drafter failed: {line_of(error)}"
        self._followers.clear()


def probe_verify(model: Model, rows: int) -> Batching:
    """Whether verifying several tokens and keeping some equals feeding those one by one.

    With two rows each keeps another number of tokens, in merged caches.
    """
    from engine.prefill import Prefill

    length, first = PROBE
    before = min(probe_tokens(model.config), model.context_length - length - 2)
    if before < 2:
        return Batching("the context is too short to probe verification")
    lengths = [before, max(2, before * 3 // 5)][:rows]
    kept = [first, length][:rows]
    prompts = [token_ids(model, n + 1, 5 + i) for i, n in enumerate(lengths)]
    fed = [token_ids(model, length + 1, 16 + i) for i in range(rows)]
    deltas = [0] * rows
    try:
        expected: list[mx.array] = []
        for i, prompt in enumerate(prompts):
            caches = Prefill(model, prompt).run()
            for token in [*fed[i][: kept[i]], fed[i][length]]:
                expected.append(verify(model, [[token]], caches, [0], False).logits[0, 0])
            mx.eval(expected)
        caches = Prefill(model, prompts[0]).run()
        if rows > 1:
            caches = merge([caches, Prefill(model, prompts[1]).run()], lengths)
        tried = verify(model, [row[:length] for row in fed], caches, deltas, False)
        mx.eval(tried.logits)
        tried.keep(kept)
        last = verify(model, [[row[length]] for row in fed], caches, deltas, False).logits
        mx.eval(last)
        found = [
            logits for i in range(rows) for logits in [*tried.logits[i, : kept[i]], last[i, 0]]
        ]
        for i in range(rows):
            own = [entry.extract(i) for entry in caches] if rows > 1 else caches
            model.check_position(own, lengths[i] + kept[i] + 1)
    except NotMergeableError as error:
        return Batching(str(error), tokens=before)
    except Exception as error:  # whatever a model raises on a block it cannot roll back
        return Batching(f"verification fails: {line_of(error)}", tokens=before)
    noise, spread = largest(list(zip(expected, found, strict=True)))
    if not noise <= TOLERANCE * spread:
        reason = (
            f"verified logits differ from single ones by {noise:.3g} of a range of {spread:.3g}"
        )
        return Batching(reason, noise, spread, before)
    return Batching("", noise, spread, before)
