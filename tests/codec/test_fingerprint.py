"""A model's fingerprint: anything that changes its states changes it, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from store.codec import fingerprint as module
from store.codec.fingerprint import RECORD, fingerprint
from store.codec.header import CodecError

BIG = 24 << 20  # beyond what is read whole


def write_weights(path: Path, nbytes: int, fill: int = 0) -> None:
    """A sparse safetensors file of three tensors, `nbytes` bytes of them in all."""
    third = nbytes // 3
    table = {
        "__metadata__": {"format": "mlx"},
        **{
            f"layer.{index}.weight": {
                "dtype": "U8",
                "shape": [third],
                "data_offsets": [index * third, (index + 1) * third],
            }
            for index in range(3)
        },
    }
    head = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.write(bytes([fill]))
        file.truncate(8 + len(head) + 3 * third)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "quantization": {"bits": 4}}')
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"temperature": 0.6}')
    (path / "model.safetensors.index.json").write_text("{}")
    write_weights(path / "model.safetensors", BIG)
    return path


def anew(path: Path) -> bytes:
    """The fingerprint without a record."""
    (path / RECORD).unlink(missing_ok=True)
    return fingerprint(path)


def test_it_is_the_same_again_and_in_another_place(model: Path, tmp_path: Path) -> None:
    first = fingerprint(model)
    assert len(first) == 16
    assert fingerprint(model) == first == anew(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert fingerprint(copy) == first


def poke(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda path: (path / "config.json").write_text('{"model_type": "llama"}'),
    "tokenizer": lambda path: (path / "tokenizer.json").write_text("{ }"),
    "template": lambda path: (path / "chat_template.jinja").write_text("{{ message }}"),
    "index": lambda path: (path / "model.safetensors.index.json").write_text("{ }"),
    "new file": lambda path: (path / "added_tokens.json").write_text("{}"),
    "renamed": lambda path: (path / "model.safetensors").rename(path / "other.safetensors"),
    "size": lambda path: write_weights(path / "model.safetensors", BIG + 3),
    "first tensor": lambda path: write_weights(path / "model.safetensors", BIG, fill=1),
    "middle of a tensor": lambda path: poke(path / "model.safetensors", -(BIG // 6)),
    "last byte": lambda path: poke(path / "model.safetensors", -1),
    "small weights": lambda path: write_weights(path / "model-2.safetensors", 3000),
    "other format": lambda path: (path / "model.gguf").write_bytes(b"GGUF"),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_any_change_changes_it(model: Path, name: str) -> None:
    before = fingerprint(model)
    CHANGES[name](model)
    assert fingerprint(model) != before


def test_every_byte_of_a_small_file_counts(model: Path) -> None:
    write_weights(model / "model.safetensors", 30_000)
    before = anew(model)
    for offset in (200, 10_000, 20_001, 29_999):
        poke(model / "model.safetensors", offset)
        now = fingerprint(model)
        assert now != before
        before = now


def test_what_does_not_decide_state_does_not_count(model: Path) -> None:
    before = fingerprint(model)
    (model / "generation_config.json").write_text("{}")
    (model / "README.md").write_text("read me")
    (model / ".hidden.json").write_text("{}")
    (model / "folder").mkdir()
    assert anew(model) == before


def test_settings_count(model: Path) -> None:
    found = {
        fingerprint(model),
        fingerprint(model, extra={"kv_bits": "8"}),
        fingerprint(model, extra={"kv_bits": "4"}),
        fingerprint(model, extra={"kv": "bits8"}),
        fingerprint(model, extra={"kv_bits": "8", "dtype": "float16"}),
    }
    assert len(found) == 5
    both = {"dtype": "float16", "kv_bits": "8"}
    assert fingerprint(model, extra=both) == fingerprint(model, extra=dict(reversed(both.items())))


def test_versions_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model)
    monkeypatch.setattr(module, "LAYOUT_VERSION", module.LAYOUT_VERSION + 1)
    assert fingerprint(model) != before


def test_unchanged_files_are_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint(model)

    def unread(path: Path) -> bytes:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(module, "_file_digest", unread)
    assert fingerprint(model) == first
    (model / "tokenizer.json").touch()
    with pytest.raises(AssertionError, match="was read"):
        fingerprint(model)


def test_other_weights_are_seen_behind_the_same_size_and_time(model: Path) -> None:
    before = fingerprint(model)
    weights = model / "model.safetensors"
    told = weights.stat()
    poke(weights, -1)
    os.utime(weights, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert fingerprint(model) != before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"layout": 1}', "\0"])
def test_a_damaged_record_is_made_anew(model: Path, content: str) -> None:
    first = fingerprint(model)
    (model / RECORD).write_text(content)
    assert fingerprint(model) == first
    assert json.loads((model / RECORD).read_text())["content"]


def test_a_model_that_cannot_be_written_has_its_record_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(place: Path, *rest: object) -> None:
        if place.parent == model:
            raise PermissionError(13, "read-only", str(place))
        real(place, *rest)  # type: ignore[arg-type]

    real = module._record
    monkeypatch.setattr(module, "_record", refused)
    cache = tmp_path / "cache"
    first = fingerprint(model, cache_dir=cache)
    assert not (model / RECORD).exists()
    (record,) = (cache / "fingerprints").iterdir()
    assert record.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(module, "_file_digest", lambda path: b"")
    assert fingerprint(model, cache_dir=cache) == first


def test_other_weights_are_sampled_everywhere(model: Path) -> None:
    weights = model / "model.gguf"
    with weights.open("wb") as file:
        file.truncate(BIG)
    before = fingerprint(model)
    for offset in (0, BIG // 1023 * 500, BIG - 1):
        poke(weights, offset)
        now = fingerprint(model)
        assert now != before
        before = now


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "config.json").unlink(),
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: shutil.rmtree(path),
        lambda path: os.truncate(path / "model.safetensors", BIG - 3),
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * BIG),
        lambda path: (path / "model.safetensors").write_bytes(
            struct.pack("<Q", 3) + b"[1]" + bytes(BIG)
        ),
    ],
)
def test_an_incomplete_model_is_refused(model: Path, damage: Callable[[Path], object]) -> None:
    damage(model)
    with pytest.raises(CodecError):
        fingerprint(model)
