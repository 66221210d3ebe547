"""Speculative decoding: tokens proposed, verified by one forward, and only what is right kept.

A round feeds the pending token and the proposed ones, draws the target's own token at each position
exactly as ordinary decoding would (greedy, or by seed and position), and keeps proposals while they
are the same. What is drawn is the model's answer either way; a bad drafter costs time, not quality.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx_vlm.speculative.common import verify_forward
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.mtp_base import AutoregressiveMTPDraftModel

from engine.errors import ModelError
from engine.probe import TOLERANCE, Batching, largest, probe_tokens, token_ids

if TYPE_CHECKING:
    from engine.model import Caches, Model

LONGEST = 7  # proposals; with the pending token a forward of 8, mlx-vlm's decode block
PROBE = (4, 2)  # tokens verified at once, kept of them
# Proposals are given up for a while when fewer than this share of the last ones was right.
LEAST_ACCEPTED, RECENT_ROUNDS, REST_ROUNDS = 0.2, 16, 64


class Drafter(Protocol):
    """Proposes tokens for one row at a time.

    `hidden` says whether it needs the target's last hidden states. `begin` starts on a row whose
    ids are known and whose last fed token left `hidden` (1, 1, width); `propose` returns at most
    `count` tokens to follow `pending`; `settle` tells it how many of them were accepted and which
    tokens came out, with the hidden states of the whole forward; `abort` undoes a proposal.
    """

    name: str
    hidden: bool

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None: ...
    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]: ...
    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None: ...
    def abort(self) -> None: ...


class NgramDrafter:
    """Proposes what followed the last few tokens where they stood before.

    Needs no second model, and pays where an answer repeats its prompt: code, quotations, summaries.
    """

    name = "ngram"
    hidden = False

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        """Looks for the last `longest` tokens, then for fewer, down to `shortest`."""
        self._sizes = range(longest, shortest - 1, -1)
        self._at: dict[tuple[int, ...], int] = {}  # n-gram -> where what followed it stands
        self._seen: list[int] = []

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        self._at, self._seen = {}, []
        self._learn([*ids, pending])

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        for size in self._sizes:
            at = self._at.get(tuple(self._seen[-size:]))
            if at is not None:
                return self._seen[at : at + count]
        return []

    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        self._learn(new)

    def abort(self) -> None:
        """Nothing to undo."""

    def _learn(self, tokens: Sequence[int]) -> None:
        # An n-gram is entered once something follows it, so that it never finds itself.
        for token in tokens:
            end = len(self._seen)
            for size in self._sizes:
                if end >= size:
                    self._at[tuple(self._seen[end - size : end])] = end
            self._seen.append(token)


class MtpDrafter:
    """A model's own multi-token-prediction head, as mlx-vlm loads it.

    Starts from the last hidden state alone, so nothing beside the caches is handed over.
    """

    name = "mtp"
    hidden = True

    def __init__(self, model: Model, head: Any) -> None:
        """`head` is mlx-vlm's drafter; raises `ModelError` when it is none of this kind."""
        if not isinstance(head, AutoregressiveMTPDraftModel):
            raise ModelError(
                f"{type(head).__name__} is no multi-token-prediction head of this kind"
            )
        self._model = model
        self._head: Any = head
        self._last: mx.array | None = None

    @classmethod
    def load(cls, model: Model, path: Path) -> MtpDrafter:
        """From a drafter directory, or a checkpoint that still has its MTP layers."""
        try:
            head, _ = load_drafter(str(path))
            check = getattr(head, "validate_target_compatibility", None)
            if check is not None:
                check(model.model)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
            raise ModelError(f"no drafter can be loaded from {path} ({error})") from error
        return cls(model, head)

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        assert hidden is not None, "the target's hidden state is asked for"
        self._head.reset(self._model.lm)
        last = mx.array([[ids[-1]]], dtype=mx.int32)
        self._head.prefill_from_target_hidden(
            last, hidden[:, -1:], pending, _greedy, mx.int32, greedy=True
        )
        self._last = hidden[:, -1:]

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        tokens: Any = self._head.draft_block(
            pending, self._last, None, count + 1, _greedy, mx.int32, greedy=True
        )
        return [int(token) for token in tokens[0].tolist()]

    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        assert hidden is not None, "the target's hidden states are asked for"
        accepted = len(new) - 1
        self._head.accept_verified_tokens(
            hidden,
            mx.array([list(drafted)], dtype=mx.int32),
            accepted,
            list(new),
            _greedy,
            mx.int32,
            greedy=True,
        )
        self._last = hidden[:, accepted : accepted + 1]

    def abort(self) -> None:
        undo = getattr(self._head, "abort_draft_round", None)
        if undo is not None:
            undo()


def _greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


@dataclass
class Verified:
    """A forward of the pending token and the proposed ones, not yet kept.

    `logits` (tokens, vocabulary), `hidden` (1, tokens, width) where asked for. `keep(n)` leaves
    exactly the first n tokens in the caches; `undo` none.
    """

    logits: mx.array
    hidden: mx.array | None
    transaction: Any

    def keep(self, count: int) -> None:
        if self.transaction is not None:
            self.transaction.commit([count])

    def undo(self) -> None:
        if self.transaction is not None:
            self.transaction.abort()


def verify(
    model: Model, tokens: Sequence[int], caches: Caches, rope_delta: int, hidden: bool
) -> Verified:
    """Feed `tokens` to a row's own caches, so that any prefix of them can be kept."""
    ids = mx.array([list(tokens)], dtype=mx.int32)
    arguments = model.arguments([rope_delta])
    if hidden:
        arguments["return_hidden"] = True
    if len(tokens) == 1:  # the forward of ordinary decoding
        output, transaction = model.lm(ids, cache=caches, **arguments), None
    else:
        output, transaction = verify_forward(model.lm, ids, caches, **arguments)
    states = output.hidden_states[-1] if hidden else None
    return Verified(output.logits[0], states, transaction)


class Speculation:
    """A drafter at work: which row it follows, how often it is right, when it rests."""

    def __init__(self, model: Model, drafter: Drafter, depth: int) -> None:
        """`depth` is the most tokens to propose. The model is probed here, once."""
        if not 1 <= depth <= LONGEST:
            raise ValueError(f"between 1 and {LONGEST} tokens can be proposed, not {depth}")
        self.drafter = drafter
        self.reason = model.verifying.reason
        self._depth = depth
        self._follows: int | None = None  # uid
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_ROUNDS)
        self._rest = 0
        self._rounds = self._drafted = self._accepted = 0

    def leave(self) -> None:
        """Something else was decoded: what the drafter knows is out of date."""
        self._follows = None

    def propose(self, uid: int, ids: Sequence[int], pending: int, room: int) -> list[int]:
        """Tokens to verify after `pending`, at most `room`; none in the first round of a row."""
        if self._follows != uid or room < 1:
            return []
        if self._rest:
            self._rest -= 1
            return []
        return self.drafter.propose(ids, pending, min(room, self._depth))

    def settle(
        self,
        uid: int,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        """A round is over: `ids` are held, the last of the `new` tokens is pending."""
        if drafted:
            right = len(new) - 1
            self._rounds += 1
            self._drafted += len(drafted)
            self._accepted += right
            self._recent.append((len(drafted), right))
            tried, hits = (sum(column) for column in zip(*self._recent, strict=True))
            if len(self._recent) == RECENT_ROUNDS and hits < LEAST_ACCEPTED * tried:
                self._rest = REST_ROUNDS
                self._recent.clear()
        if self._follows == uid:
            self.drafter.settle(ids, drafted, new, hidden)
        else:
            self.drafter.begin(ids, new[-1], hidden)
            self._follows = uid

    def facts(self) -> dict[str, Any]:
        """For reports: which drafter, why it is off if it is, how many proposals were right."""
        return {
            "drafter": self.drafter.name,
            "reason": self.reason,
            "rounds": self._rounds,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "acceptance": self._accepted / self._drafted if self._drafted else None,
        }


def probe_verify(model: Model) -> Batching:
    """Whether verifying several tokens and keeping some equals feeding those one by one."""
    from engine.prefill import Prefill

    length, kept = PROBE
    before = min(probe_tokens(model.config), model.context_length - length - 2)
    prompt = token_ids(model, before + 1, 5)
    fed = token_ids(model, length + 1, 6)
    single, block = Prefill(model, prompt).run(), Prefill(model, prompt).run()
    try:
        expected = [verify(model, [token], single, 0, False).logits[0] for token in fed[:kept]]
        expected.append(verify(model, [fed[length]], single, 0, False).logits[0])
        tried = verify(model, fed[:length], block, 0, False)
        found = [tried.logits[i] for i in range(kept)]
        mx.eval(expected, found)
        tried.keep(kept)
        found.append(verify(model, [fed[length]], block, 0, False).logits[0])
        mx.eval(found)
        model.check_position(block, before + kept + 1)
    except Exception as error:  # whatever a model raises on a block it cannot roll back
        line = str(error).strip().splitlines()
        return Batching(f"verification fails: {(line or [type(error).__name__])[0]}")
    noise, spread = largest(list(zip(expected, found, strict=True)))
    if not noise <= TOLERANCE * spread:
        reason = (
            f"verified logits differ from single ones by {noise:.3g} of a range of {spread:.3g}"
        )
        return Batching(reason, noise, spread, before)
    return Batching("", noise, spread, before)
