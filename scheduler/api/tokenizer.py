"""The served model's tokenizer and chat template, without the model.

Loaded with transformers from the model directory; nothing here imports MLX. Text that came from
a client can never become a control token: wherever a message contains the spelling of a special
token, that spelling is tokenised as ordinary text.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.api.least import WORTH, Least
from store.meter import work

_PROBE = "Q1system7c20b5f3d8Q"
Message = dict[str, Any]
"""One chat message as templates take it: role, content and perhaps tool_calls, name."""


class TokenizerError(Exception):
    """The tokenizer or its chat template cannot be used; the message names cause and cure."""


class TooLong(TokenizerError):
    """A text has `least` tokens at least, which is more than was asked for."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class TemplateError(TokenizerError):
    """The chat template refuses these messages (for example: roles in an order it forbids)."""


class Rendering:
    """A rendered prompt: its text, and which parts of it are client text spelled like control.

    `text` is what the template produced. `literals` are the (start, stop) character ranges of
    client text that must not be read as special tokens.
    """

    __slots__ = ("literals", "text")

    def __init__(self, text: str, literals: Sequence[tuple[int, int]] = ()) -> None:
        self.text = text
        self.literals = tuple(literals)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Rendering)
            and self.text == other.text
            and self.literals == other.literals
        )

    def __hash__(self) -> int:
        return hash((self.text, self.literals))

    def __repr__(self) -> str:
        return f"Rendering({self.text!r}, {self.literals!r})"

    def cut(self, start: int, stop: int | None = None) -> Rendering:
        """The part between two character positions; a literal must not lie across them."""
        stop = len(self.text) if stop is None else stop
        inside = [(a - start, b - start) for a, b in self.literals if start <= a and b <= stop]
        return Rendering(self.text[start:stop], inside)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(text, is_literal) runs in order, none of them empty."""
        at = 0
        for start, stop in self.literals:
            if start > at:
                yield self.text[at:start], False
            yield self.text[start:stop], True
            at = stop
        if at < len(self.text):
            yield self.text[at:], False


class Tokenizer:
    """Renders messages and turns text into token ids and back. Safe to use from many threads."""

    def __init__(self, hf: Any, *, context_length: int, eos_ids: frozenset[int]) -> None:
        self._hf = hf
        # Fast tokenizers switch between modes by a flag on the shared object.
        self._lock = threading.Lock()
        self.context_length = context_length
        self.eos_ids = eos_ids
        added = hf.added_tokens_decoder
        self.special: dict[str, int] = {
            str(token.content): int(number) for number, token in added.items() if token.special
        }
        self.added = frozenset(str(token.content) for token in added.values())
        self.special_ids = frozenset(self.special.values())
        self._spelled = (
            re.compile("|".join(re.escape(s) for s in sorted(self.special, key=len, reverse=True)))
            if self.special
            else None
        )
        self.vocab_size = len(hf)
        self.template = _template(hf.chat_template)
        self._late_system: bool | None = None

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read tokenizer, template, context length and end tokens from `model_dir`.

        Raises TokenizerError where a file is missing, damaged, or there is no chat template.
        """
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer  # slow to import, and only the API needs it

        config = _read_json(model_dir / "config.json", required=True)
        work("tokenizer_loads")
        try:
            hf = AutoTokenizer.from_pretrained(
                str(model_dir), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise TokenizerError(
                f"the tokenizer in {model_dir.name} cannot be loaded "
                f"({str(error).splitlines()[0][:200] if str(error) else type(error).__name__}): "
                "the model directory is incomplete or damaged; fetch the model again"
            ) from error
        # Where older processors of models with a vision tower keep the template with images.
        own = _read_json(model_dir / "chat_template.json").get("chat_template")
        if isinstance(own, str) and (config.get("vision_config") or not hf.chat_template):
            hf.chat_template = own
        if not hf.chat_template:
            raise TokenizerError(
                f"model {model_dir.name} has no chat template: choose an instruct model, or put "
                "a chat_template.jinja into its directory"
            )
        generation = _read_json(model_dir / "generation_config.json")
        return cls(
            hf,
            context_length=_context_length(config, hf),
            eos_ids=_eos_ids(config, generation, hf),
        )

    @property
    def late_system(self) -> bool:
        """Whether the template shows a system message that is not the first. Found by trying."""
        if self._late_system is None:
            turns = [("user", "a"), ("assistant", "b"), ("system", _PROBE), ("user", "c")]
            try:
                shown = self.render([{"role": role, "content": text} for role, text in turns])
                self._late_system = _PROBE in shown.text
            except TemplateError:
                self._late_system = False
        return self._late_system

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """The prompt's text by the model's own chat template.

        `options` are extra variables for the template (such as enable_thinking). Raises
        TemplateError with the template's own words where it refuses the messages.
        """
        marks = _Marks(self._spelled, messages, tools)
        compiled = _compiled()
        try:
            text = self._hf.apply_chat_template(
                marks.messages,
                tools=marks.tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **dict(options or {}),
            )
        except Exception as error:
            words = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise TemplateError(f"the model's chat template refuses these messages: {words}") from (
                error
            )
        work("template_compiles", _compiled() - compiled)
        return marks.resolve(str(text))

    @functools.cached_property
    def _least(self) -> Least:
        return Least(self._hf)

    def encode(self, rendering: Rendering | str, most: int | None = None) -> list[int]:
        """Token ids of a rendered prompt or of trusted text; nothing is added at either end.

        Raises TooLong where it is certain, before it is tokenised, that there are `most` or more.
        """
        if isinstance(rendering, str):
            rendering = Rendering(rendering)
        if most is not None and len(rendering.text) >= WORTH:
            least = self._least.tokens(rendering.text, most)
            if least >= most:
                raise TooLong(least)
        ids: list[int] = []
        for text, literal in rendering.pieces():
            ids += self._literal(text) if literal else self._encode(text, split=False)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of client text: no special token comes out, whatever it spells."""
        return self.encode(Rendering(text, [m.span() for m in self._matches(text)]))

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        with self._lock:
            return str(
                self._hf.decode(
                    list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
                )
            )

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return self._spelled.finditer(text) if self._spelled else iter(())

    def _encode(self, text: str, *, split: bool) -> list[int]:
        with self._lock:
            out = self._hf(text, add_special_tokens=False, split_special_tokens=split)
        return [int(i) for i in out["input_ids"]]

    def _literal(self, text: str) -> list[int]:
        """Ids of a special token's spelling as plain text."""
        ids = self._encode(text, split=True)
        if not self.special_ids.intersection(ids) or len(text) < 2:
            return ids
        # This tokenizer cannot switch special tokens off: no half of a spelling is a spelling.
        half = len(text) // 2
        return self._literal(text[:half]) + self._literal(text[half:])


class _Marks:
    """Stands placeholders in for special-token spellings in client text while a template runs.

    The template may move, trim or drop text; whatever it does to a placeholder it would have
    done to the spelling. Placeholders are plain ASCII letters and digits, so that no filter
    (tojson, trim) changes them, and are derived from the content, so that they cannot occur in it.
    """

    def __init__(
        self,
        spelled: re.Pattern[str] | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._found: list[str] = []
        self._spelled = spelled
        whole = json.dumps([list(messages), list(tools or ())], default=str, ensure_ascii=False)
        self._name = ""
        if spelled is not None and spelled.search(whole):
            salt = 0
            while not self._name or self._name in whole:
                digest = hashlib.blake2b(f"{salt}{whole}".encode("utf-8", "replace"))
                self._name = "Q" + digest.hexdigest()[:24]
                salt += 1
        self.messages = [self._replace(m, top=True) for m in messages]
        self.tools = [self._replace(t) for t in tools] if tools else None

    def _replace(self, value: Any, *, top: bool = False) -> Any:
        if not self._name:
            return copy.copy(value)
        if isinstance(value, str):
            assert self._spelled is not None
            return self._spelled.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {
                self._replace(k): v if top and k == "role" else self._replace(v)
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._replace(v) for v in value]
        return value

    def _mark(self, match: re.Match[str]) -> str:
        self._found.append(match.group())
        return f"{self._name}x{len(self._found) - 1}x"

    def resolve(self, text: str) -> Rendering:
        """Put the spellings back and say where they stand."""
        if not self._name:
            return Rendering(text)
        out: list[str] = []
        literals: list[tuple[int, int]] = []
        at = length = 0
        for match in re.finditer(rf"{self._name}x(\d+)x", text):
            before, spelling = text[at : match.start()], self._found[int(match.group(1))]
            start = length + len(before)
            length = start + len(spelling)
            literals.append((start, length))
            out += [before, spelling]
            at = match.end()
        out.append(text[at:])
        return Rendering("".join(out), literals)


def _compiled() -> int:
    """How many templates transformers has compiled in this process so far."""
    from transformers.utils import chat_template_utils

    told = getattr(chat_template_utils._compile_jinja_template, "cache_info", None)
    return int(told().misses) if told is not None else 0


def _template(found: Any) -> str:
    """The template that is used with tools, where there are several."""
    if isinstance(found, Mapping):
        found = found.get("tool_use") or found.get("default")
    return str(found or "")


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise TokenizerError(
            f"{path.name} is missing from model directory {path.parent}: "
            "the directory is incomplete; fetch the model again"
        ) from None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object: fetch the model again")
    return value


def _context_length(config: Mapping[str, Any], hf: Any) -> int:
    """Longest sequence in tokens: the configuration's, else the tokenizer's, else 2**20."""
    for part in (config.get("text_config") or {}, config):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    limit = int(min(hf.model_max_length, 1 << 20))
    return limit if limit > 0 else 1 << 20


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], hf: Any) -> frozenset[int]:
    """Every id that ends a turn, from the generation configuration, the model's, the tokenizer."""
    found: set[int] = set()
    for source in (generation, config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        found.update(v for v in (value if isinstance(value, list) else [value]) if v is not None)
    if hf.eos_token_id is not None:
        found.add(int(hf.eos_token_id))
    return frozenset(int(i) for i in found)
