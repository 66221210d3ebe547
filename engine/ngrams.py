"""What followed the same words before, as a drafter and what all drafters have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

READ_AT_ONCE = 1024  # tokens that n-grams are made of in one step: a few milliseconds


class Drafter(Protocol):
    """Proposes tokens for one row; `fresh` makes another one, for another row.

    `hidden` says whether it needs the target's last hidden states. `begin` starts on a row whose
    ids are known and whose last fed token left `hidden` (1, tokens, width); `propose` returns at
    most `count` tokens to follow `pending`; `settle` tells it which were drafted and which tokens
    came out, with the hidden states of the forward that verified them (1, tokens, width); `abort`
    undoes a proposal.
    """

    name: str
    hidden: bool

    def fresh(self) -> Drafter: ...
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
        self._unread = 0  # so many of the first tokens are not entered yet

    def fresh(self) -> NgramDrafter:
        return NgramDrafter(self._sizes[0], self._sizes[-1])

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        self._at, self._seen = {}, [*ids, pending]
        self._unread = len(self._seen)
        self._read_back()

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
        self._read_back()

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

    def _read_back(self) -> None:
        """Enter some more of what stood before, later places first: others wait meanwhile."""
        first = max(0, self._unread - READ_AT_ONCE)
        for end in range(self._unread - 1, first - 1, -1):
            for size in self._sizes:
                if end >= size:
                    self._at.setdefault(tuple(self._seen[end - size : end]), end)
        self._unread = first
