"""The device that MLX runs on in this process, made ready before MLX is first imported."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import glob
import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError

METAL_CHUNK = 8192
CPU_CHUNK = 256
# Memory that MLX may keep for reuse on a CPU: its own default is a share of the machine's memory,
# which several processes on one machine would each claim.
CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Device:
    """What MLX runs on, and what was done to it.

    `memory_bytes` is the machine's memory, `working_set_bytes` what MLX may keep resident (Metal's
    recommended working set; on a CPU three quarters of the memory). `chunk` is the default prefill
    chunk in tokens. `dtype` is "checkpoint" (as stored) or "float32" (everything is widened: half
    precision and quantised products are far slower than float32 on a CPU). `blas` says which matrix
    library multiplies on a CPU, `wired` whether this process keeps its memory resident.
    """

    kind: Literal["metal", "cpu"]
    name: str
    memory_bytes: int
    working_set_bytes: int
    chunk: int
    dtype: Literal["checkpoint", "float32"]
    blas: str
    mlx: str
    wired: bool = False

    @property
    def kernels(self) -> str:
        """Whether a model's own Metal kernels run, or the plain operations in their place."""
        return "metal" if self.kind == "metal" else "fallback"

    def facts(self) -> dict[str, Any]:
        """The same as one flat dictionary, for reports and provenance."""
        return {
            "kind": self.kind,
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "working_set_bytes": self.working_set_bytes,
            "chunk": self.chunk,
            "dtype": self.dtype,
            "blas": self.blas,
            "mlx": self.mlx,
            "wired": self.wired,
        }


def kernels(device: Device) -> tuple[str, str]:
    """Which kernels models run by here, MLX's own for Metal or what stands in for them, and why.

    Scans, sparse attention and the packing of states have both; nothing else chooses.
    """
    if device.kind == "metal":
        return "metal", device.name
    return "fallback", f"MLX's CPU backend on {device.name}"


@functools.cache
def prepare() -> Device:
    """Make the device ready and describe it; later calls return the same object.

    Must run before anything in the process imports `mlx.core`: on Linux a fast BLAS has to be in
    the process first. On a Mac the wired limit is set to the recommended working set, by the
    first process of ours on the machine only: it is one memory.
    Raises `ModelError` when MLX came first on Linux or cannot be imported.
    """
    return _describe(wire=True)


def describe() -> Device:
    """The same for a process that only looks: the wired limit is left to the workers."""
    return _describe(wire=False)


def _describe(*, wire: bool) -> Device:
    blas = "accelerate"
    if sys.platform == "linux":
        if "mlx.core" in sys.modules:
            raise ModelError("MLX was imported too early; call engine.device.prepare() before that")
        blas = _load_openblas()
    try:
        import mlx.core as mx
    except ImportError as error:
        raise ModelError(
            f"MLX cannot be imported ({error}); install Tandem with its constraints"
        ) from error
    if mx.metal.is_available():
        info = mx.device_info()
        memory, working = int(info["memory_size"]), int(info["max_recommended_working_set_size"])
        wired = wire and own_wired_memory(Path(tempfile.gettempdir()))
        if wired:
            mx.set_wired_limit(working)
        return Device(
            kind="metal",
            name=str(info.get("device_name", "Metal")),
            memory_bytes=memory,
            working_set_bytes=working,
            chunk=METAL_CHUNK,
            dtype="checkpoint",
            blas="metal",
            mlx=version("mlx"),
            wired=wired,
        )
    mx.set_cache_limit(CPU_CACHE_BYTES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        name=str(mx.device_info().get("device_name", platform.processor() or "CPU")),
        memory_bytes=memory,
        working_set_bytes=memory * 3 // 4,
        chunk=CPU_CHUNK,
        dtype="float32",
        blas=blas,
        mlx=version("mlx"),
    )


def own_wired_memory(folder: Path) -> bool:
    """Whether this process is the one that may wire memory; it stays so until it ends.

    The lock is a file of this user in `folder`, which the system releases with the process.
    """
    path = folder / f"tandem-wired-{os.getuid()}.lock"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    return True  # the descriptor stays open on purpose


def _load_openblas() -> str:
    """Put OpenBLAS into the global symbol scope and return its name.

    MLX's own BLAS on Linux is about 20 times slower. The library is the one in opencv-python's
    wheel, which mlx-vlm depends on. `RTLD_GLOBAL` makes its `cblas_sgemm` win over the
    reference BLAS that MLX's Linux wheel links.
    """
    spec = importlib.util.find_spec("cv2")
    if spec is None or spec.origin is None:
        return "reference (opencv-python, whose OpenBLAS is used, is not installed)"
    site = os.path.dirname(os.path.dirname(spec.origin))
    reason = "no OpenBLAS in opencv-python's wheel"
    for path in sorted(glob.glob(os.path.join(site, "opencv_python*.libs", "libopenblas*.so*"))):
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = str(error)
        else:
            return f"openblas ({os.path.basename(path)})"
    return f"reference ({reason})"
