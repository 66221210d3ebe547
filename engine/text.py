"""Tokens to text as they come: whole characters only, and never past a stop string."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from store.meter import work

REPLACEMENT = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 sequence to
# An incomplete sequence has at most three bytes. More tokens than this without one whole character
# are not the beginning of one.
MAX_HELD = 64


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model directory (transformers); loads without MLX.

    Raises `ModelError` when the directory has none that transformers can read.
    """
    from transformers import AutoTokenizer

    work("tokenizer_loads")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ModelError(
            f"the tokenizer in {path} cannot be loaded ({error}); check that the model "
            "directory is complete"
        ) from error
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Older processors keep the template there, which the API renders too.
        own = json.loads((path / "chat_template.json").read_text(encoding="utf-8"))
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if isinstance(own.get("chat_template"), str) and (
            config.get("vision_config") or not tokenizer.chat_template
        ):
            tokenizer.chat_template = own["chat_template"]
    return tokenizer


class TextStream:
    """The text of a growing list of tokens.

    `push` returns what a token adds: characters that are complete and cannot become part of a stop
    string any more. Once a stop string has appeared, `stopped` is true, the text before it has been
    returned, and nothing more follows.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, special: bool = False) -> None:
        """`special` keeps special tokens in the text: some models mark thinking and calls by them.

        Raises `ModelError` for an empty stop string.
        """
        if any(not text for text in stop):
            raise ModelError("a stop string is empty; leave it out")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip = not special
        self._context: list[int] = []  # tokens already shown: a decoder may look at the one before
        self._fresh: list[int] = []
        self._shown = 0  # characters of the decoded window that were already taken
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that becomes certain with `token`, possibly none."""
        if self.stopped:
            return ""
        self._fresh.append(token)
        text = self._decode(self._context + self._fresh)
        whole = text.rstrip(REPLACEMENT)
        if len(self._fresh) > MAX_HELD:
            whole = text
        delta = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if whole == text:
            self._context, self._fresh = self._fresh, []
            self._shown = len(self._decode(self._context))
        return self._release(delta)

    def finish(self) -> str:
        """What was held back: an incomplete character, or the beginning of a stop string."""
        if self.stopped:
            return ""
        rest = self._decode(self._context + self._fresh)[self._shown :] if self._fresh else ""
        self._context, self._fresh, self._shown = [], [], 0
        text = self._release(rest)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, delta: str) -> str:
        if not self._stop:
            return delta
        text = self._held + delta
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop]
        found = [ends for ends in found if ends[1] >= 0]
        if found:
            # The one that is complete first, however the text was cut into tokens.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
