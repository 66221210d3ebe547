"""What proposes tokens: text seen before, the model's own prediction head, or a smaller model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx_vlm.speculative.cache_state import start_speculative_cache
from mlx_vlm.speculative.drafters import (
    DRAFTER_KIND_BY_MODEL_TYPE,
    load_drafter,
    validate_drafter_compatibility,
)
from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

from engine.errors import ModelError
from engine.names import SEEN

if TYPE_CHECKING:
    from engine.model import Caches, Model

# A smaller model reads at most this many of a conversation's last tokens before it proposes.
DRAFT_CONTEXT = 1024
READ_AT_ONCE = 1024  # tokens that n-grams are made of in one step: a few milliseconds
INNER = ("dflash", "dspark", "eagle")  # draft from inner layers of the target
# What every head of mlx-vlm can do, whatever its class.
HEAD = ("reset", "prefill_from_target_hidden", "draft_block", "accept_verified_tokens")
# What a head takes from its target or from MLX; all else with an underscore belongs to a row.
BOUND = {"_input_embed", "_input_embed_scale", "_lm_head_fn", "_greedy_argmax_fn"}
BOUND |= {"_no_grad", "_training"}


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
            token = int(_number(mx.argmax(self._feed([token])[0, -1])))
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


def find_drafter(model: Model, asked: str) -> tuple[Drafter | None, str]:
    """The drafter that `asked` means for `model`, and why it is this one or none.

    "off"; "ngram"; "mtp", the head in the model's own directory; a directory with such a head or
    with a smaller model of the same vocabulary; "auto": the model's own head, else n-grams.
    Raises `ModelError` where what was asked for by name cannot be had.
    """
    if asked == "off":
        return None, "switched off"
    if asked == "ngram":
        return NgramDrafter(), "asked for"
    if asked == "mtp":
        return MtpDrafter.load(model, model.path), "asked for"
    if asked == "auto":
        if not _has_head(model.path):
            return NgramDrafter(), "the model has no prediction head of its own"
        try:
            return MtpDrafter.load(model, model.path), "the model's own prediction head"
        except ModelError as error:
            return NgramDrafter(), str(error)
    return _from_directory(model, Path(asked).expanduser()), "asked for"


def _has_head(path: Path) -> bool:
    """Whether a checkpoint still has the prediction layers that its config declares."""
    config = _config(path)
    try:
        splitter = get_mtp_splitter(source_config=config)
        if splitter is None:
            return False
        text = splitter.read_text_config(config)
        return any(keys for _, keys in splitter.iter_selected(path, text))
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return False  # a config that says nothing about a head


def _from_directory(model: Model, path: Path) -> Drafter:
    from engine.model import load

    config = _config(path)
    if not config:
        raise ModelError(f"{path} has no config.json; decode.drafter names a model directory")
    if _has_head(path):
        try:
            return MtpDrafter.load(model, path)
        except ModelError:  # a smaller model with a head of its own, which fits only itself
            return ModelDrafter(model, load(path, model.device))
    kind = str(config.get("model_type") or config.get("speculators_model_type") or "")
    if kind not in DRAFTER_KIND_BY_MODEL_TYPE and "speculators_model_type" not in config:
        if any(word in json.dumps(config.get("architectures")).lower() for word in INNER):
            kind = "dflash"
        else:
            return ModelDrafter(model, load(path, model.device))
    if DRAFTER_KIND_BY_MODEL_TYPE.get(kind) == "mtp":
        return MtpDrafter.load(model, path)
    raise ModelError(
        f"{path.name} drafts from the target's inner layers over the whole prompt, which are "
        "not handed over; use a prediction head or a smaller model"
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state_of(head: Any) -> dict[str, Any]:
    """What a head keeps of the row it follows. MLX's modules hold some of it as dictionaries."""
    names = {*vars(head), *head} if isinstance(head, dict) else {*vars(head)}
    own = sorted(name for name in names if name.startswith("_") and name not in BOUND)
    return {name: getattr(head, name) for name in own}


def _greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def _number(value: mx.array) -> float:
    found: Any = value.item()
    return float(found)
