"""Answers held to a grammar: JSON schema, regular expression or Lark, token by token."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from engine.errors import ModelError
from store.meter import work

log = logging.getLogger("tandem.engine")

Kind = Literal["json_schema", "regex", "lark"]
MAX_GRAMMAR = 1 << 20  # bytes of a schema or grammar
KEPT = 32  # compiled grammars


class Vocabulary:
    """A tokenizer as llguidance sees it; made once per model, which takes about a second."""

    def __init__(self, tokenizer: Any, size: int, eos_ids: Collection[int]) -> None:
        """`size` is the model's vocabulary (it may exceed the tokenizer's)."""
        import llguidance.hf

        self.size = size
        self.inner = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=sorted(eos_ids) or None
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[Kind, str], Any] = OrderedDict()
        work("vocabularies")

    def matcher(self, kind: Kind, text: str | Mapping[str, Any]) -> Any:
        """A matcher at the beginning of a grammar, compiled once for all answers held to it.

        A large schema takes seconds, without the interpreter's lock: call this on a thread of its
        own before an answer needs it. Raises `ModelError` for a grammar that cannot be compiled.
        """
        source = text if isinstance(text, str) else json.dumps(text)
        if len(source.encode()) > MAX_GRAMMAR:
            raise ModelError(f"the {kind} is larger than {MAX_GRAMMAR} bytes; simplify it")
        with self._lock:
            found = self._compiled.get((kind, source))
        if found is None:  # outside the lock: who asks for a small one does not wait for it
            found = self._compile(kind, source)
        with self._lock:
            found = self._compiled.setdefault((kind, source), found)
            self._compiled.move_to_end((kind, source))
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def _compile(self, kind: Kind, source: str) -> Any:
        from llguidance import LLMatcher

        work("grammar_compiles")
        try:
            if kind == "json_schema":
                made = LLMatcher.grammar_from_json_schema(source)
            elif kind == "regex":
                made = LLMatcher.grammar_from_regex(source)
            else:
                made = LLMatcher.grammar_from_lark(source)
            matcher = LLMatcher(self.inner, made)
            problem = matcher.get_error() if matcher.is_error() else ""
        except (ValueError, TypeError) as error:
            problem = str(error)
        if problem:
            line = problem.strip().splitlines()[0]
            raise ModelError(f"the {kind} cannot be followed ({line}); correct it")
        return matcher


class Words:
    """The vocabulary of one model, for all its grammars: made once, ahead or when first asked for.

    An answer that moves to another node would else wait for it in the middle. Thread-safe.
    """

    def __init__(self, tokenizer: Any, size: int, eos_ids: Collection[int]) -> None:
        """As `Vocabulary`."""
        self._of = (tokenizer, size, eos_ids)
        self._lock = threading.Lock()
        self._made: Vocabulary | None = None

    def __call__(self) -> Vocabulary:
        """The vocabulary, waiting while it is being made."""
        with self._lock:
            if self._made is None:
                self._made = Vocabulary(*self._of)
            return self._made

    def prepare(self) -> threading.Thread:
        """Have it made in the background; what goes wrong there is told to who asks for it."""

        def make() -> None:
            try:
                self()
            except Exception as error:  # whatever a tokenizer's parser raises
                log.warning("no answer can be held to a grammar: %s", error)

        thread = threading.Thread(target=make, name="vocabulary", daemon=True)
        thread.start()
        return thread


class Grammar:
    """Where one answer stands in its grammar.

    `mask` says which tokens may come next, `accept` moves on. With `after`, nothing is constrained
    until that token has been seen: a model's thinking is free, its answer is not.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        kind: Kind,
        text: str | Mapping[str, Any],
        after: int | None = None,
    ) -> None:
        """Raises `ModelError` for a grammar that cannot be compiled."""
        self._matcher = vocabulary.matcher(kind, text)
        self._size = vocabulary.size
        self._after = after

    @property
    def active(self) -> bool:
        """Whether the next token is constrained."""
        return self._after is None

    def mask(self) -> mx.array | None:
        """Which tokens may come next (vocabulary,; bool), or None where any may.

        Where the grammar is complete only the end tokens are left.
        """
        if not self.active:
            return None
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little")[: self._size].astype(bool)
        if len(allowed) < self._size:
            allowed = np.pad(allowed, (0, self._size - len(allowed)))
        return mx.array(allowed)

    def accept(self, token: int) -> None:
        """Move on by `token`; raises `ModelError` when the grammar does not allow it."""
        if not self.active:
            if token == self._after:
                self._after = None
            return
        if not self._matcher.consume_token(token):
            raise ModelError(
                f"the grammar does not allow token {token}: {self._matcher.get_error()}"
            )
