"""How many tokens a text has at least, told by counting its characters.

Tokenising tens of megabytes takes a minute and gigabytes, only to learn that they do not fit. A
token of the vocabulary holds so many letters, or so many ideographs, and no more: a text with n of
a kind has at least n / (most in one token) tokens. That is exact only where each character of a
text goes into a token as it is. Where a tokenizer may drop or compose characters, kinds that it
leaves alone are counted; of one that is not known, nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

WORTH = 1 << 16
"""Characters from which on a text is counted; less is tokenised at once."""
_SLICE = 1 << 16
_SPACE = "▁"
#: Bytes of UTF-8 that begin characters of a kind. The ideographs are U+4000 to U+9FFF.
_KINDS: dict[str, Sequence[int]] = {
    "lower": range(0x61, 0x7B),
    "upper": range(0x41, 0x5B),
    "digits": range(0x30, 0x3A),
    "marks": [c for c in range(0x21, 0x7F) if not chr(c).isalnum()],
    "blanks": [*range(0x21), 0x7F],
    "two bytes": range(0xC2, 0xE0),
    "three bytes": range(0xE0, 0xE4),
    "ideographs": range(0xE4, 0xEA),
    "last of three bytes": range(0xEA, 0xF0),
    "four bytes": range(0xF0, 0xF5),
}
#: No white space is among these: an added token may take what stands beside it.
_VISIBLE = ("lower", "upper", "digits", "marks", "ideographs", "last of three bytes", "four bytes")
#: Nothing of these composes with what follows (NFC).
_LASTING = ("digits", "ideographs")


class Least:
    """What the tokens of one tokenizer hold at most."""

    def __init__(self, hf: Any) -> None:
        """`hf`: a tokenizer of transformers."""
        backend = getattr(hf, "backend_tokenizer", None)
        self._composes = self._spaces = self._byte_level = False
        self._others: dict[str, bytes] = {}
        self._most: dict[str, int] = {}
        if backend is None or not self._understood(backend):
            return
        vocabulary = backend.get_vocab(with_added_tokens=False)
        whole: Sequence[int] = range(256)
        if self._byte_level:
            letters = _alphabet()
            # Bytes that no token spells are left out of the text; what has a character beyond
            # these is never made of one.
            whole = [n for c, n in letters.items() if c in vocabulary]
            table = str.maketrans(letters)
            tokens = [token.translate(table).encode("latin-1", "ignore") for token in vocabulary]
        else:
            tokens = [self._bytes(token) for token in vocabulary]
        added = list(hf.added_tokens_decoder.values())
        tokens += [self._bytes(str(one.content)) for one in added]
        if backend.normalizer is not None:
            # What such a token matches is another text than its content.
            normal = backend.normalizer.normalize_str
            tokens += [self._bytes(normal(str(one.content))) for one in added if one.normalized]
        strips = any(one.lstrip or one.rstrip for one in added)
        for kind in _VISIBLE if strips else _KINDS:
            self._others[kind] = bytes(set(range(256)) - set(_KINDS[kind]).intersection(whole))
            self._most[kind] = max(1, max(self._count(token, kind) for token in tokens))

    def tokens(self, text: str, enough: int) -> int:
        """A lower bound of the tokens of `text`; no more is counted once it is `enough`."""
        least = 0
        counts = dict.fromkeys(self._most, 0)
        for start in range(0, len(text) if counts else 0, _SLICE):
            part = text[start : start + _SLICE]
            kinds: Sequence[str] = list(counts)
            if self._composes:
                if part.isascii():
                    part = part[:-1]  # what follows may be an accent
                else:
                    kinds = [kind for kind in kinds if kind in _LASTING]
            data = self._bytes(part)
            for kind in kinds:
                counts[kind] += self._count(data, kind)
            least = max(-(-counts[kind] // self._most[kind]) for kind in counts)
            if least >= enough:
                break
        return least

    def _understood(self, backend: Any) -> bool:
        """Whether no character is lost on the way to the tokens but as `_composes` says."""
        from tokenizers.models import BPE

        model = backend.model
        if not isinstance(model, BPE):
            return False
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return False
        for step in _steps(backend.normalizer, "normalizers"):
            if step["type"] == "NFC":
                self._composes = True
            elif step["type"] == "Replace":
                if (step["pattern"], step["content"]) != ({"String": " "}, _SPACE):
                    return False
                self._spaces = True
            elif step["type"] != "Prepend":
                return False
        kinds = []
        for step in _steps(backend.pre_tokenizer, "pretokenizers"):
            kinds.append(step["type"])
            if step.get("behavior") == "Removed":
                return False
            if step["type"] == "Metaspace":
                if step["replacement"] != _SPACE:
                    return False
                self._spaces = True
            elif step["type"] not in ("ByteLevel", "Digits", "Punctuation", "Split"):
                return False
        if kinds.count("ByteLevel") > 1:
            return False
        self._byte_level = "ByteLevel" in kinds
        if self._byte_level:
            return not self._spaces
        # What is in no token is spelled by tokens of one byte each.
        spelled = {f"<0x{number:02X}>" for number in range(256)}
        return bool(model.byte_fallback) and spelled <= backend.get_vocab().keys()

    def _bytes(self, text: str) -> bytes:
        return (text.replace(" ", _SPACE) if self._spaces else text).encode("utf-8", "ignore")

    def _count(self, data: bytes, kind: str) -> int:
        return len(data.translate(None, self._others[kind]))


def _steps(part: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as they stand in tokenizer.json."""
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step[inner]
        else:
            yield step


def _alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [n for n in range(256) if n not in shown]
    return {chr(n): n for n in shown} | {chr(256 + i): n for i, n in enumerate(hidden)}
