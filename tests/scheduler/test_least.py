"""The lower bound of a text's tokens: never above what tokenising it gives, and soon told."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from api_kit import make_model_dir
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from scheduler.api import least
from scheduler.api.least import Least
from scheduler.api.prompt import build
from scheduler.api.tokenizer import Tokenizer, TooLong

TEXTS = [
    "The quick brown fox jumps over the lazy dog 12345 times... AAAA ====== 東京都東京都",
    "naïve café zażółć e\u0301e\u0301 a\u0300 か\u3099か\u3099  \u3000\u3000\n\n\t\t",
    "한국어 한국어 👩‍👩‍👧👩‍👩‍👧",
]
KINDS = ("bytes", "few bytes", "composing", "stripping", "pieces", "metaspace")
#: Of which nothing may be said: characters may be lost, or one token may stand for any of them.
UNKNOWN = ("lowercase", "stripped", "removed", "no fallback", "unigram")


def made(kind: str) -> Any:
    """A tokenizer of transformers with a vocabulary learnt from TEXTS."""
    whole = kind in ("pieces", "metaspace", "no fallback")
    spelled = [f"<0x{number:02X}>" for number in range(256)] if whole else []
    fast = Fast(models.BPE(byte_fallback=kind != "no fallback" and whole))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if whole:
        fast.normalizer = normalizers.Replace(" ", "▁")
        fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        if kind == "metaspace":
            fast.normalizer = None
            fast.pre_tokenizer = pre_tokenizers.Metaspace()
        fast.decoder = decoders.ByteFallback()
        alphabet = sorted("abcdefghijklmnopqrstuvwxyz▁東京")
    else:
        first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
        if kind == "removed":
            first = [pre_tokenizers.Punctuation("removed")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
        if kind == "composing":
            fast.normalizer = normalizers.Sequence([normalizers.NFC()])
        if kind == "lowercase":
            fast.normalizer = normalizers.Lowercase()
        if kind == "stripped":
            fast.normalizer = normalizers.Strip()
        if kind == "few bytes":
            alphabet = [c for c in alphabet if c not in "aAĠäĤ"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|end|>", *spelled],
        limit_alphabet=len(alphabet), show_progress=False,
    )  # fmt: skip
    # Few letters in one token, and two accented ones: what composes is not to be counted.
    fast.train_from_iterator((["ÉÉ ÉÉ"] if kind == "composing" else TEXTS) * 4, trainer)
    if kind == "unigram":
        fast.model = models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)
    hf = PreTrainedTokenizerFast(tokenizer_object=fast)
    strip = kind == "stripping"
    hf.add_tokens([AddedToken("<think>", lstrip=strip, rstrip=strip)])
    return hf


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {kind: made(kind) for kind in (*KINDS, *UNKNOWN)}


@pytest.fixture(scope="module")
def bounds(tokenizers: dict[str, Any]) -> dict[str, Least]:
    return {kind: Least(hf) for kind, hf in tokenizers.items()}


PARTS = st.sampled_from(
    ["a", "e", "\u0301", "\u0300", "か", "\u3099", "東", "京", "東京", "中", "0", "12", " ", "   ",
     "\u3000", "\n", "\t", "A", "AAAA", "===", "=", "\u0338", "▁", "<|end|>", "<think>", "<0x41>",
     "한", "ᄒ", "ᅡ", "ᆫ", "👩‍👩‍👧", "\U0010ffff", "\x00", "\x7f", "é", "ż", "가", "ᆨ"]
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@example(text="<think>" + " " * 1000)
@example(text="E\u0301" * 4)
@given(text=st.lists(PARTS | st.text(max_size=3), max_size=30).map("".join))
def test_no_text_has_fewer_tokens(
    tokenizers: dict[str, Any], bounds: dict[str, Least], kind: str, text: str
) -> None:
    text = (text * 3).encode("utf-8", "replace").decode()
    hf, bound = tokenizers[kind], bounds[kind]
    for split in (False, True):
        ids = hf(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        for size in (1, 7, 1 << 16):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(least, "_SLICE", size)
                assert bound.tokens(text, 1 << 40) <= len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_much_of_a_kind_is_many_tokens(
    tokenizers: dict[str, Any], bounds: dict[str, Least], kind: str
) -> None:
    text = "語" * 100_000
    found = bounds[kind].tokens(text, 1 << 40)
    assert 10_000 < found <= len(tokenizers[kind](text)["input_ids"])
    assert 1000 <= bounds[kind].tokens(text, 1000) <= found


@pytest.mark.parametrize("kind", UNKNOWN)
def test_nothing_is_said_where_characters_may_be_lost(bounds: dict[str, Least], kind: str) -> None:
    assert bounds[kind].tokens("語 a" * 100_000, 1) == 0


def test_what_is_counted_where_characters_compose_does_not_compose() -> None:
    def begins(text: str) -> set[str]:
        return {k for k in least._LASTING for c in text if c.encode()[0] in least._KINDS[k]}

    for number in range(0x110000):
        parts = unicodedata.decomposition(chr(number))
        if parts and not parts.startswith("<") and " " in parts:
            assert not begins("".join(chr(int(one, 16)) for one in parts.split()))


def test_an_added_token_counts_as_what_it_matches() -> None:
    """It is looked for in the text as the normalizer leaves it, in its own such form."""
    for steps, content, text in (
        ([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")], "▁▁▁", " "),
        ([normalizers.NFC(), normalizers.Replace(" ", "▁")], "\uf900" * 8, "\u8c48"),
    ):
        fast = Fast(models.BPE(byte_fallback=True))
        fast.normalizer = normalizers.Sequence(steps)
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=list("ab▁"), show_progress=False,
            special_tokens=[f"<0x{i:02X}>" for i in range(256)],
        )  # fmt: skip
        fast.train_from_iterator(["ab ab"], trainer)
        hf = PreTrainedTokenizerFast(tokenizer_object=fast)
        hf.add_tokens([AddedToken(content, normalized=True)])
        real = len(hf(text * 4000, add_special_tokens=False)["input_ids"])
        assert 0 < Least(hf).tokens(text * 4000, 1 << 40) <= real


def test_nothing_is_said_of_bytes_that_are_spelled_twice() -> None:
    fast = Fast(models.BPE())
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([step, step])
    assert Least(PreTrainedTokenizerFast(tokenizer_object=fast)).tokens("a" * 999, 9) == 0


def test_a_text_that_cannot_fit_is_not_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tok = Tokenizer.load(make_model_dir(tmp_path / "m", "llama3"))
    seen: list[int] = []
    encode = tok._encode

    def counted(text: str, *, split: bool) -> list[int]:
        seen.append(len(text))
        return encode(text, split=split)

    monkeypatch.setattr(tok, "_encode", counted)
    items: list[dict[str, Any]] = [{"role": "user", "content": "語" * 70_000}]
    with pytest.raises(TooLong, match="at least"):
        build(tok, items, most=tok.context_length)
    with pytest.raises(TooLong, match="at least"):
        build(tok, [{"role": "user", "content": "a"}], instructions="x" * 200_000, most=4096)
    assert seen == []
    # The template leaves out the white space, so that this one is short.
    items = [{"role": "user", "content": "a" + " " * 200_000}]
    assert build(tok, items, most=64) == build(tok, [{"role": "user", "content": "a"}])
