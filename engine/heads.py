"""A model's own multi-token-prediction head as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.model import Model

# What every head of mlx-vlm can do, whatever its class.
HEAD = ("reset", "prefill_from_target_hidden", "draft_block", "accept_verified_tokens")
# What a head takes from its target or from MLX; all else with an underscore belongs to a row.
BOUND = {"_input_embed", "_input_embed_scale", "_lm_head_fn", "_greedy_argmax_fn"}
BOUND |= {"_no_grad", "_training"}


class MtpDrafter:
    """A model's own multi-token-prediction head, as mlx-vlm loads it.

    Starts from the last hidden state alone, so nothing beside the caches is handed over. The head
    holds the state of one row; each drafter puts its own there before it works.
    """

    name = "mtp"
    hidden = True

    def __init__(self, model: Model, head: Any, idle: dict[str, Any] | None = None) -> None:
        """`head` is mlx-vlm's drafter, `idle` its state before it followed any row.

        Raises `ModelError` when it is none of this kind.
        """
        if not all(callable(getattr(head, name, None)) for name in HEAD):
            raise ModelError(
                f"{type(head).__name__} is no multi-token-prediction head of this kind"
            )
        self._model = model
        self._head: Any = head
        self._state = dict(idle) if idle is not None else _state_of(head)
        self._idle = dict(self._state)
        self._last: mx.array | None = None

    @classmethod
    def load(cls, model: Model, path: Path) -> MtpDrafter:
        """From a drafter directory, or a checkpoint that still has its MTP layers."""
        from engine.model import nbytes, widen

        try:
            head, kind = load_drafter(str(path))
            validate_drafter_compatibility(model.model, head, kind)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
            raise ModelError(f"no drafter can be loaded from {path} ({error})") from error
        if model.device.dtype == "float32":
            widen(head, model.device)
        need, room = nbytes(head) + model.nbytes, model.device.working_set_bytes
        if need > room:
            raise ModelError(
                f"the prediction head does not fit: it needs {need / 1e9:.1f} GB with the model's "
                f"weights, and this device may hold {room / 1e9:.1f} GB"
            )
        return cls(model, head)

    def fresh(self) -> MtpDrafter:
        return MtpDrafter(self._model, self._head, self._idle)

    def begin(self, ids: Sequence[int], pending: int, hidden: mx.array | None) -> None:
        assert hidden is not None, "the target's hidden state is asked for"
        self._state = dict(self._idle)
        self._enter()  # or `reset` would undo what another row has proposed
        self._head.reset(self._model.lm)
        last = mx.array([[ids[-1]]], dtype=mx.int32)
        self._head.prefill_from_target_hidden(
            last, hidden[:, -1:], pending, _greedy, mx.int32, greedy=True
        )
        self._leave(hidden[:, -1:])

    def propose(self, ids: Sequence[int], pending: int, count: int) -> list[int]:
        self._enter()
        tokens: Any = self._head.draft_block(
            pending, self._last, None, count + 1, _greedy, mx.int32, greedy=True
        )
        found = [int(token) for token in tokens[0].tolist()]
        self._leave(self._last)
        return found

    def settle(
        self,
        ids: Sequence[int],
        drafted: Sequence[int],
        new: Sequence[int],
        hidden: mx.array | None,
    ) -> None:
        assert hidden is not None, "the target's hidden states are asked for"
        self._enter()
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
        self._leave(hidden[:, accepted : accepted + 1])

    def abort(self) -> None:
        undo = getattr(self._head, "abort_draft_round", None)
        if undo is not None:
            self._enter()
            undo()
            self._leave(self._last)

    def _enter(self) -> None:
        for name, value in self._state.items():
            setattr(self._head, name, value)

    def _leave(self, last: mx.array | None) -> None:
        self._state = _state_of(self._head)
        self._last = last


def _state_of(head: Any) -> dict[str, Any]:
    """What a head keeps of the row it follows. MLX's modules hold some of it as dictionaries."""
    names = {*vars(head), *head} if isinstance(head, dict) else {*vars(head)}
    own = sorted(name for name in names if name.startswith("_") and name not in BOUND)
    return {name: getattr(head, name) for name in own}


def _greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)
