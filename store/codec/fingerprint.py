"""The fingerprint of a model: state of one fingerprint is never used with another.

What is hashed (blake2b-128):

- the codec's format and layout versions;
- every weight file (safetensors, gguf, npz): name, size, and content. Up to 16 MiB the
  content is read whole. Beyond that, of a safetensors file the whole tensor table and, of
  every tensor, its first, middle and last 4 KiB; of any other, 1,024 windows of 4 KiB evenly
  spread. Other weights, another quantisation or another precision differ in every tensor, so
  this tells them apart at a cost of seconds on 180 GB. It is not a defence against somebody
  who edits a few bytes of a tensor on purpose;
- whole: config and index files, tokenizer, vocabulary, chat template, image preprocessing;
- what the caller adds in `extra` (KV dtype and quantisation, adapters).

The result is kept beside the model, or in the model cache where that is read-only, and used
again while every file has the same size, modification time, time of change and inode. (Whoever
copies over a file in place may set its modification time, but not its time of change.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from store.codec.header import FORMAT, LAYOUT_VERSION, CodecError
from store.meter import work
from store.paths import models_dir

WEIGHTS = (".safetensors", ".gguf", ".npz")
TEXTS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab")
"""Suffixes of what is hashed whole. Generation defaults do not decide state: see IGNORED."""
IGNORED = frozenset({"generation_config.json"})
RECORD = ".tandem-fingerprint.json"

_WHOLE = 16 << 20
_WINDOW = 4096
_WINDOWS = 1024
_TABLE_MAX = 256 << 20
_READ = 4 << 20


def fingerprint(
    model_dir: Path,
    *,
    extra: Mapping[str, str] | None = None,
    cache_dir: Path | None = None,
) -> bytes:
    """The fingerprint, 16 bytes, of the model in `model_dir` under the settings in `extra`.

    `cache_dir` takes the record where `model_dir` cannot be written (default: where
    models lie). Raises CodecError where the directory has no
    config or no weights, or a weight file is damaged.
    """
    work("fingerprints")
    files = _files(model_dir)
    content = _content(model_dir, files, cache_dir)
    digest = hashlib.blake2b(digest_size=16, person=b"tandem model")
    settings = [FORMAT, LAYOUT_VERSION, sorted((extra or {}).items())]
    digest.update(content)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.digest()


def _files(model_dir: Path) -> list[Path]:
    try:
        names = sorted(entry for entry in model_dir.iterdir() if entry.is_file())
    except OSError as error:
        raise CodecError(f"no model at {model_dir} ({error.strerror}): fetch it first") from None
    files = [
        path
        for path in names
        if path.suffix in WEIGHTS + TEXTS
        and path.name not in IGNORED
        and not path.name.startswith(".")
    ]
    if not any(path.name == "config.json" for path in files):
        raise CodecError(f"no config.json in {model_dir}: it is not a model directory")
    if not any(path.suffix in WEIGHTS for path in files):
        raise CodecError(f"no weights in {model_dir}: fetch the model again")
    return files


def _content(model_dir: Path, files: list[Path], cache_dir: Path | None) -> bytes:
    """The digest of all files, from the record where they are unchanged."""
    facts = [_facts(path) for path in files]
    places = [model_dir / RECORD, _fallback(model_dir, cache_dir)]
    for place in places:
        known = _recorded(place, facts)
        if known is not None:
            return known
    digest = hashlib.blake2b(digest_size=32)
    for path in files:
        digest.update(_framed(path.name.encode()))
        digest.update(_framed(_file_digest(path)))
    if facts != [_facts(path) for path in files]:
        raise CodecError(f"{model_dir} changed while it was read: wait until it is complete")
    for place in places:
        with contextlib.suppress(OSError):
            _record(place, facts, digest.digest())
            break
    return digest.digest()


def _facts(path: Path) -> list[Any]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(struct.pack("<Q", size), digest_size=32)
    with path.open("rb") as file:
        if size <= _WHOLE or path.suffix not in WEIGHTS:
            while block := file.read(_READ):
                digest.update(block)
        else:
            spans = _tensor_spans(file, size, path) if path.suffix == ".safetensors" else None
            for start, stop in spans or _even_spans(size):
                file.seek(start)
                digest.update(_framed(file.read(stop - start)))
    return digest.digest()


def _tensor_spans(file: BinaryIO, size: int, path: Path) -> Iterator[tuple[int, int]]:
    """The tensor table of a safetensors file, then windows of each tensor, as byte spans."""
    damaged = CodecError(f"{path} is not a complete safetensors file: fetch the model again")
    (length,) = struct.unpack("<Q", file.read(8))
    start = 8 + length
    if length > min(_TABLE_MAX, size - 8):
        raise damaged
    try:
        table = json.loads(file.read(length))
        spans = sorted(
            (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
            for name, entry in table.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged from None
    if any(not start <= first <= last <= size for first, last in spans):
        raise damaged
    return _windows(start, spans)


def _windows(table_end: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    yield 0, table_end
    for first, last in spans:
        if last - first <= 3 * _WINDOW:
            yield first, last
            continue
        middle = (first + last) // 2
        yield first, first + _WINDOW
        yield middle, middle + _WINDOW
        yield last - _WINDOW, last


def _even_spans(size: int) -> Iterator[tuple[int, int]]:
    for index in range(_WINDOWS):
        start = index * (size - _WINDOW) // (_WINDOWS - 1)
        yield start, start + _WINDOW


def _fallback(model_dir: Path, cache_dir: Path | None) -> Path:
    base = cache_dir or models_dir()
    name = hashlib.blake2b(str(model_dir.resolve()).encode(), digest_size=12).hexdigest()
    return base.expanduser() / "fingerprints" / f"{name}.json"


def _recorded(place: Path, facts: list[Any]) -> bytes | None:
    try:
        record = json.loads(place.read_text())
        if record["layout"] == [FORMAT, LAYOUT_VERSION] and record["files"] == facts:
            content = bytes.fromhex(record["content"])
            return content if len(content) == 32 else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _record(place: Path, facts: list[Any], content: bytes) -> None:
    """Write the record beside others' eyes: to a temporary file, renamed into place."""
    if place.name != RECORD:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = {
        "layout": [FORMAT, LAYOUT_VERSION],
        "files": facts,
        "content": content.hex(),
    }
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=RECORD, suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(name, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
