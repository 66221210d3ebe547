"""Moving bytes between MLX arrays and flat memory.

Restored arrays lie in memory that MLX allocated, filled through writable views: MLX never
aliases memory that it does not own. A view is taken only of an evaluated, contiguous array: a
strided array handed to a buffer consumer gives wrong bytes. Evaluation happens on the calling
thread, to which MLX's streams belong; helper threads only ever touch numpy views.
"""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from store.codec.header import CodecError

Bytes = NDArray[np.uint8]

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_PARALLEL_BYTES = 4 << 20
_LARGE_BYTES = 1 << 20
_TOGETHER_BYTES = 32 << 20
_GRAIN = 64 << 10
ALIGN = 64
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


class _Blank:
    """A file of arrays that leaves the memory given to it as it is.

    MLX has no call for memory that is not filled; its loader allocates an array and then asks
    the file for the bytes. What is about to be overwritten need not be zeroed first: that would
    cost more than the copying, and touch every page once more.
    """

    closed = False

    def __init__(self, counts: Sequence[int]) -> None:
        table = {}
        at = 0
        for number, count in enumerate(counts):
            offsets = [at, at + 8 * count]
            table[str(number)] = {"dtype": "U64", "shape": [count], "data_offsets": offsets}
            at += 8 * count
        text = json.dumps(table).encode()
        self._head = len(text).to_bytes(8, "little") + text
        self._size = len(self._head) + at
        self._at = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int) -> bytes:
        return bytes(count)

    def readinto(self, into: memoryview) -> int:
        count = len(into)
        if self._at < len(self._head):
            into[:] = self._head[self._at : self._at + count]
        self._at += count
        return count


class Block(NamedTuple):
    """Memory of MLX's: `array` of uint64, to be evaluated once by the caller, and the same memory
    as flat, writable bytes. What is in it is arbitrary.

    An array is updated in place only where nothing else refers to its memory: let go of `view`.
    """

    array: mx.array
    view: Bytes


def allocate(*sizes: int) -> list[Block]:
    """A block for each of `sizes`, in bytes.

    It begins at a multiple of 64 bytes, where MLX's own allocation may not: copies between
    memory that is aligned otherwise take twice as long on some processors.
    """
    return _taken([[size] for size in sizes])


def allocate_together(*sizes: int) -> list[Block]:
    """As `allocate`, for arrays that are let go together: several share a piece of memory, which
    lasts as long as any of them. Taking memory costs far more than cutting it."""
    groups: list[list[int]] = []
    room = 0
    for size in sizes:
        if size > room:
            groups.append([])
            room = _TOGETHER_BYTES
        groups[-1].append(size)
        room -= size
    return _taken(groups)


def _taken(groups: Sequence[Sequence[int]]) -> list[Block]:
    """The blocks of each group cut out of one piece of memory."""
    words = [[-(-size // ALIGN) * (ALIGN // 8) for size in group] for group in groups]
    rooms = _unfilled([sum(group) + ALIGN // 8 for group in words])
    blocks = []
    for room, group in zip(rooms, words, strict=True):
        whole = view(room)
        at = -whole.ctypes.data % ALIGN // 8
        for count in group:
            blocks.append(Block(room[at : at + count], whole[8 * at : 8 * (at + count)]))
            at += count
    return blocks


def _unfilled(counts: Sequence[int]) -> list[mx.array]:
    """Evaluated arrays of so many uint64 each."""
    # The loader hands every array from thread to thread: clearing a small one is cheaper.
    large = [count for count in counts if 8 * count >= _LARGE_BYTES]
    file: Any = _Blank(large)  # the stubs know paths only
    loaded: Any = mx.load(file, format="safetensors") if large else {}
    given = (loaded[str(number)] for number in range(len(large)))
    arrays = [
        next(given) if 8 * count >= _LARGE_BYTES else mx.zeros((count,), mx.uint64)
        for count in counts
    ]
    mx.eval(arrays)
    return arrays


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
            base = np.empty(-(-(nbytes + ALIGN) // _GRAIN) * _GRAIN, np.uint8)
        skip = -base.ctypes.data % ALIGN
        loan = base[skip : skip + nbytes]
        weakref.finalize(loan, self._give_back, base).atexit = False
        return loan.data

    def _found(self, nbytes: int) -> Bytes | None:
        wanted = nbytes + ALIGN
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


class Running:
    """Tasks that other threads run already; `join`, which must follow, runs the rest with them.

    Each thread takes the next task when it is free. One is drawn at a time, so drawing may compute
    what a task needs, in order. Raises what the first task to fail raised; tasks that were not
    begun by then are left out.
    """

    def __init__(self, tasks: Iterable[Callable[[], object]], threads: int) -> None:
        self._tasks = iter(tasks)
        self._drawing = threading.Lock()
        self.stopped = False
        """Whether no more tasks are taken, because one failed or all must end."""
        self._others = [_pool().submit(self._drain) for _ in range(threads - 1)]

    def join(self) -> None:
        """Run tasks until there are none, and wait for those that others run."""
        try:
            self._drain()
        finally:
            others = self._end()
        for future in others:
            future.result()

    def _end(self) -> list[Future[None]]:
        # All must have ended before the memory that they touch can be let go.
        self.stopped = True
        begun = [future for future in self._others if not future.cancel()]
        wait(begun)
        return begun

    def _drain(self) -> None:
        try:
            while (task := self._draw()) is not None:
                task()
        except BaseException:
            self.stopped = True
            raise

    def _draw(self) -> Callable[[], object] | None:
        with self._drawing:
            return None if self.stopped else next(self._tasks, None)


def threads_for(nbytes: int) -> int:
    """How many threads pay for copies and digests of `nbytes` bytes in all."""
    return 1 if nbytes < _PARALLEL_BYTES else _THREADS


def run_all(tasks: Sequence[Callable[[], object]], nbytes: int) -> None:
    """Run copies and digests of `nbytes` bytes in all, on several threads where that pays; the
    calling thread is one of them. Raises as `Running`."""
    Running(tasks, min(threads_for(nbytes), len(tasks))).join()
