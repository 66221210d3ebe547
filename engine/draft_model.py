"""A smaller model of the same vocabulary as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_vlm.speculative.cache_state import start_speculative_cache

from engine.errors import ModelError
from engine.names import SEEN
from engine.sampling import number

if TYPE_CHECKING:
    from engine.model import Caches, Model

# It reads at most this many of a conversation's last tokens before it proposes.
DRAFT_CONTEXT = 1024


class ModelDrafter:
    """A smaller language model of the same vocabulary, greedy.

    It has read at most the last 1,024 tokens of the conversation when it begins, so that a long
    one costs no second prefill.
    """

    name = "model"
    hidden = False

    def __init__(self, model: Model, draft: Model) -> None:
        """Raises `ModelError` where the vocabularies differ."""
        if draft.vocab_size != model.vocab_size:
            raise ModelError(
                f"the draft model {draft.path.name} has a vocabulary of {draft.vocab_size} and "
                f"{model.path.name} one of {model.vocab_size}; use a draft model of the same family"
            )
        self._model = model
        self._draft = draft
        self._caches: Caches = []
        self._behind: list[int] = []  # tokens that the draft model has not read yet
        self._transaction: Any = None

    def fresh(self) -> ModelDrafter:
        return ModelDrafter(self._model, self._draft)

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        from engine.prefill import Prefill

        most = min(DRAFT_CONTEXT, self._draft.context_length // 2)
        read = [token for token in ids[-most:] if token < SEEN]  # it sees no images
        self._caches = Prefill(self._draft, [*read, pending]).run()
        self._behind = [pending]

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        if self._behind[:-1]:
            self._feed(self._behind[:-1])
            self._behind = self._behind[-1:]
        self._transaction = start_speculative_cache(self._caches, count)
        found: list[int] = []
        token = self._behind[0]
        for _ in range(count):
            token = int(number(mx.argmax(self._feed([token])[0, -1])))
            found.append(token)
        return found

    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        if self._transaction is None or not drafted:
            self.abort()
            self._behind += new
            return
        # Read so far: the pending token and the drafts but the last.
        kept = min(len(new), len(drafted))
        self._transaction.commit([kept])
        self._transaction = None
        self._behind = list(new[kept - 1 :])

    def abort(self) -> None:
        if self._transaction is not None:
            self._transaction.abort()
            self._transaction = None

    def _feed(self, tokens: Sequence[int]) -> Any:
        ids = mx.array([list(tokens)], dtype=mx.int32)
        return self._draft.forward(ids, self._caches, [0])
