"""Streaming text: whole characters, stop strings across tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.text import TextStream, load_tokenizer

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stream(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    text = TextStream(tokenizer, stop)
    return [*(text.push(token) for token in ids), text.finish()]


@relaxed
@given(st.text(max_size=60))
def test_pieces_make_up_the_whole_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == expected
    if expected == text and "\ufffd" not in text:  # some bytes have no token at all
        assert not any("\ufffd" in piece for piece in pieces)


@relaxed
@given(st.lists(st.integers(3, 49_151), max_size=80))
def test_any_tokens_make_up_the_whole_text(tokenizer: Any, ids: list[int]) -> None:
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(stream(tokenizer, ids)) == expected


def test_an_emoji_appears_at_once(tokenizer: Any) -> None:
    ids = tokenizer.encode("a\U0001f9d1\U0001f3fdb", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == "a\U0001f9d1\U0001f3fdb"
    assert pieces.count("") > 1
    assert "\U0001f9d1" in pieces


def test_an_incomplete_character_comes_with_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("\U0001f9d1", add_special_tokens=False)[:-1]
    pieces = stream(tokenizer, ids)
    assert pieces[:-1] == [""] * len(ids)
    assert set(pieces[-1]) == {"\ufffd"}


@relaxed
@given(
    st.text(alphabet="ab \n", max_size=40),
    st.lists(st.text(alphabet="ab \n", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_shown(tokenizer: Any, text: str, stop: list[str]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = TextStream(tokenizer, stop)
    shown = "".join(found.push(token) for token in ids)
    at = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    shown += found.finish()
    assert shown == (text[: min(at)[1]] if at else text)
    assert found.stopped == bool(at)
    assert found.push(ids[0] if ids else 5) == "" or not at


def test_a_stop_string_spans_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    text = TextStream(tokenizer, ["wo th"])
    assert "".join(text.push(token) for token in ids) == "one t"
    assert text.stopped


def test_an_empty_stop_string_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="empty"):
        TextStream(tokenizer, ["x", ""])


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer in"):
        load_tokenizer(tmp_path)


def test_text_needs_no_mlx(default_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from engine.text import load_tokenizer\n"
        "from engine.library import resolve\n"
        f"path = resolve({str(default_path)!r}, Path('unused'))\n"
        "load_tokenizer(path)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_vlm')]\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
