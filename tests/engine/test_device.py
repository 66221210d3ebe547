"""The device: what it says, and that it must come first."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.device import Device, own_wired_memory, prepare
from engine.errors import ModelError
from engine.model import load


def test_the_facts_are_plain_values(device: Device) -> None:
    assert prepare() is device
    assert json.loads(json.dumps(device.facts())) == dataclasses.asdict(device)
    assert device.working_set_bytes <= device.memory_bytes
    assert device.chunk in (256, 8192)


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX brings its own BLAS")
def test_linux_multiplies_with_openblas(device: Device) -> None:
    assert device.blas.startswith("openblas")


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX brings its own BLAS")
def test_mlx_may_not_come_first() -> None:
    code = (
        "import mlx.core\n"
        "from engine.device import prepare\n"
        "from engine.errors import ModelError\n"
        "try:\n    prepare()\n"
        "except ModelError as error:\n    print(error)\n"
    )
    output = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "MLX was imported too early" in output


def test_preparing_is_what_imports_mlx() -> None:
    code = (
        "import sys, engine.device, engine.library, engine.bench, engine.calibrate, engine.text\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('mlx', 'mlx_vlm')])\n"
    )
    output = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert output == "[]\n"


def test_one_process_wires_memory(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from engine.device import own_wired_memory\n"
        f"print(own_wired_memory(Path({str(tmp_path)!r})), flush=True)\n"
        "input()\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "True\n"
    assert not own_wired_memory(tmp_path)
    first.communicate("\n", timeout=60)
    assert own_wired_memory(tmp_path)


def test_a_model_that_does_not_fit_is_refused(default_path: Path, device: Device) -> None:
    tiny = dataclasses.replace(device, working_set_bytes=1 << 20)
    with pytest.raises(ModelError, match="GB of weights"):
        load(default_path, tiny)
    small = dataclasses.replace(device, working_set_bytes=400 << 20)
    with pytest.raises(ModelError, match="for a conversation of 8192 tokens"):
        load(default_path, small)
