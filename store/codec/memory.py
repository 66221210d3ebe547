"""Moving bytes between MLX arrays and flat memory.

Restored arrays lie in memory that MLX allocated, filled through writable views: MLX never
aliases memory that it does not own. A view is taken only of an evaluated, contiguous array: a
strided array handed to a buffer consumer gives wrong bytes. Evaluation happens on the calling
thread, to which MLX's streams belong; helper threads only ever touch numpy views.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from store.codec.header import CodecError

Bytes = NDArray[np.uint8]

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_PARALLEL_BYTES = 4 << 20
_GRAIN = 64 << 10
_ALIGN = 64
_THREADS = min(4, os.cpu_count() or 1)


def dtype_of(name: str) -> mx.Dtype:
    """The MLX dtype of a name in DTYPES."""
    found: mx.Dtype = getattr(mx, "bool_" if name == "bool" else name)
    return found


@cache
def packs_on_device() -> bool:
    """Whether packing belongs to the GPU. The one place where platforms differ: on Metal one
    concatenate is faster than the host and leaves nothing strided behind; on the CPU backend
    concatenate is slow and numpy copies are not."""
    return bool(mx.metal.is_available())


def bits(array: mx.array) -> mx.array:
    """The same memory as unsigned integers of the item's width (bfloat16 as its bits)."""
    return array.view(_UNSIGNED[array.dtype.size])


def ready(arrays: Sequence[mx.array]) -> list[mx.array]:
    """The arrays, evaluated and contiguous, as unsigned integers."""
    done = [bits(mx.contiguous(array)) for array in arrays]
    mx.eval(done)
    return done


def exported(array: mx.array) -> memoryview:
    """MLX's buffer export of an evaluated array; the stubs do not know that it has one."""
    return memoryview(array)  # type: ignore[arg-type]


def flat_buffer(array: mx.array) -> memoryview:
    """The memory of an evaluated, contiguous array as flat, writable uint8."""
    return exported(array).cast("B") if array.size else memoryview(b"")


def view(array: mx.array) -> Bytes:
    """The memory of an evaluated, contiguous array of unsigned integers as flat bytes."""
    if array.size == 0:
        return np.empty(0, np.uint8)
    window = exported(array)
    if not window.c_contiguous:
        raise CodecError("an array with gaps was about to be exported: this is a defect")
    return np.asarray(window).reshape(-1).view(np.uint8)


def is_flat(array: mx.array) -> bool:
    """Whether an evaluated array lies in memory without gaps."""
    return array.size == 0 or exported(bits(array)).c_contiguous


def allocate(*sizes: int) -> list[mx.array]:
    """Zeroed, evaluated MLX memory of at least so many bytes each, as uint64.

    It begins at a multiple of 64 bytes, where MLX's own allocation may not: copies between
    memory that is aligned otherwise take twice as long on some processors.
    """
    counts = [(nbytes + 7) // 8 for nbytes in sizes]
    roomy = [mx.zeros((count + _ALIGN // 8,), mx.uint64) for count in counts]
    mx.eval(roomy)
    blocks = []
    for count, room in zip(counts, roomy, strict=True):
        skip = -np.asarray(exported(room)).ctypes.data % _ALIGN // 8
        blocks.append(room[skip : skip + count])
    mx.eval(blocks)
    return blocks


def shaped(memory: mx.array, dtype: str, shape: Sequence[int]) -> mx.array:
    """`memory` from `allocate` as an array, sharing it. To be evaluated once by the caller."""
    count = math.prod(shape)
    if count == 0:
        return mx.zeros(tuple(shape), dtype_of(dtype))
    flat = memory.view(dtype_of(dtype))
    if flat.size != count:
        flat = flat[:count]
    return flat.reshape(tuple(shape))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="tandem-codec")


def _each(tasks: Sequence[Callable[[], object]]) -> None:
    for task in tasks:
        task()


class _Arena:
    """Buffers for payloads, used again once nothing refers to them: memory that was touched
    before costs no page faults. Keeps at most `limit` bytes while they are idle."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: list[Bytes] = []
        self._lock = threading.Lock()

    def lease(self, nbytes: int) -> memoryview:
        """A writable buffer of `nbytes` bytes, not cleared, free again when all its
        memoryviews are gone."""
        base = self._found(nbytes)
        if base is None:
            base = np.empty(-(-(nbytes + _ALIGN) // _GRAIN) * _GRAIN, np.uint8)
        skip = -base.ctypes.data % _ALIGN
        loan = base[skip : skip + nbytes]
        weakref.finalize(loan, self._give_back, base).atexit = False
        return loan.data

    def _found(self, nbytes: int) -> Bytes | None:
        wanted = nbytes + _ALIGN
        with self._lock:
            fitting = [base for base in self._idle if wanted <= base.nbytes <= wanted + wanted // 4]
            if not fitting:
                return None
            best = min(fitting, key=lambda base: base.nbytes)
            self._idle = [base for base in self._idle if base is not best]
            return best

    def _give_back(self, base: Bytes) -> None:
        # May run in any thread, at any point, even inside `_found` of this one: never wait.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(base)
            while sum(idle.nbytes for idle in self._idle) > self._limit:
                self._idle.pop(0)
        finally:
            self._lock.release()


_ARENA = _Arena(512 << 20)


def lease(nbytes: int) -> memoryview:
    """A writable buffer for a payload, recycled when its last memoryview is gone."""
    return _ARENA.lease(nbytes)


def run_all(tasks: Sequence[Callable[[], object]], nbytes: int) -> None:
    """Run copies and digests of `nbytes` bytes in all, on several threads where that pays."""
    if nbytes < _PARALLEL_BYTES or len(tasks) < 2 or _THREADS < 2:
        _each(tasks)
        return
    # Few hand-overs: each costs a turn of the interpreter lock.
    lanes = min(2 * _THREADS, len(tasks))
    futures = [_pool().submit(_each, tasks[lane::lanes]) for lane in range(lanes)]
    # All must have ended before the memory that they touch can be let go.
    wait(futures)
    for future in futures:
        future.result()
