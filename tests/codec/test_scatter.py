"""One pass that copies and digests: the library's digest, and what was loaded is what is stored."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from store.codec import scatter
from store.data_map import DataMap

SOURCE = Path(scatter.__file__).with_suffix(".c")
Copy = Callable[[memoryview, Sequence[memoryview], int], int]


def has_compiler() -> bool:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which("cc") is None or not headers.exists():
        return False
    # A Mac without Apple's tools has a cc that only offers to install them.
    return subprocess.run(["cc", "--version"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module without anything of one processor, as it is built for Apple silicon."""
    if not has_compiler():
        pytest.skip("no compiler here")
    built = tmp_path_factory.mktemp("built") / "_scatter.so"
    subprocess.run(
        [
            "cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
            "-DTANDEM_PORTABLE", f"-I{sysconfig.get_paths()['include']}",
            *(["-undefined", "dynamic_lookup"] if os.uname().sysname == "Darwin" else []),
            str(SOURCE), "-o", str(built),
        ],
        check=True,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("_scatter", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["as installed", "portable", "in turns"])
def copy(request: pytest.FixtureRequest) -> Copy:
    if request.param == "as installed":
        return lambda *copy: scatter.scatter([copy])[0]
    if request.param == "in turns":
        return scatter.in_turns
    module = request.getfixturevalue("portable")
    assert module.VARIANT == "portable"

    def built(source: memoryview, into: Sequence[memoryview], seed: int) -> int:
        if source.nbytes <= scatter.SHORT:
            return scatter.in_turns(source, into, seed)
        return int(module.scatter([(source, into, seed)])[0])

    return built


def test_it_is_built_where_there_is_a_compiler() -> None:
    if not has_compiler():
        pytest.skip("no compiler here")
    assert scatter.VARIANT != "in turns", "install again: pip install -e ."


# Around the edges of stripes (64), blocks (1,024) and the least that one pass takes.
EDGES = [0, 1, 239, 240, 241, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 81_920]
SIZES = st.sampled_from(EDGES) | st.integers(0, 5000) | st.integers(60_000, 70_000)
STEPS = st.lists(
    st.sampled_from([0, 1, 31, 32, 63, 64, 80, 1280, 65_536]) | st.integers(0, 3000), max_size=30
)


@given(
    nbytes=SIZES,
    steps=STEPS,
    skip=st.integers(0, 65),
    gap=st.integers(0, 65),
    seed=st.integers(0, 2**64 - 1),
)
def test_equal_to_the_library_however_it_is_cut(
    copy: Copy, nbytes: int, steps: list[int], skip: int, gap: int, seed: int
) -> None:
    """`skip` and `gap` shift where source and buffers begin against any alignment."""
    data = np.random.default_rng(nbytes).bytes(skip + nbytes)
    source = memoryview(data)[skip:]
    room = memoryview(bytearray((nbytes + 70 * (len(steps) + 2)) * 2))
    into, at, left = [], gap, nbytes
    for step in [*steps, nbytes]:
        some = min(step, left)
        into.append(room[at : at + some])
        at += some + gap
        left -= some
    assert copy(source, into, seed) == xxhash.xxh3_64_intdigest(source, seed)
    assert b"".join(into) == source
    # Nothing was written between the buffers or behind them.
    for buffer in into:
        buffer[:] = bytes(len(buffer))
    assert not any(room)


def test_what_was_loaded_is_what_is_digested_and_stored(copy: Copy) -> None:
    """Somebody writes to the source all the while: the digest is still that of the copy."""
    source = np.zeros(1 << 20, np.uint8)
    target = memoryview(bytearray(source.nbytes))
    into = [target[:4096], target[4096:4176], target[4176:]]
    stop = threading.Event()

    def disturb() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 251
            source.fill(value)

    writer = threading.Thread(target=disturb)
    writer.start()
    try:
        for _ in range(200):
            digest = copy(source.data, into, 5)
            assert digest == xxhash.xxh3_64_intdigest(target, 5)
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("into", [300, 500])
def test_sizes_that_differ_are_refused(copy: Copy, into: int) -> None:
    kept = bytearray(b"\7" * into)
    with pytest.raises(ValueError, match="do not fill"):
        copy(memoryview(bytes(400)), [memoryview(kept)], 0)
    assert kept == b"\7" * into


def test_what_is_no_writable_memory_is_refused(portable: Any) -> None:
    source = memoryview(bytes(400))
    for wrong in (bytes(400), memoryview(bytearray(800))[::2], 7):
        with pytest.raises((BufferError, TypeError)):
            portable.scatter([(source, [wrong], 0)])
    for wrong in (5, [5], [(source, 5, 0)], [(source, [])], [[source, [], 0]], [("", [], 0)]):
        with pytest.raises(TypeError):
            portable.scatter(wrong)
    with pytest.raises(ValueError, match="too few"):
        portable.scatter([(source[:240], [memoryview(bytearray(240))], 0)])


def test_several_copies_by_one_call(portable: Any) -> None:
    sources = [memoryview(os.urandom(size)) for size in (300, 70_000, 1024, 300)]
    rooms = [memoryview(bytearray(source.nbytes)) for source in sources]
    copies = [
        (source, [room[:7], room[7:]], seed)
        for seed, (source, room) in enumerate(zip(sources, rooms, strict=True))
    ]
    wanted = [xxhash.xxh3_64_intdigest(source, seed) for seed, source in enumerate(sources)]
    for scattered in (portable.scatter, scatter.scatter):
        assert scattered(copies) == wanted
        assert rooms == sources
        assert scattered([]) == []
    # One that is wrong, and none is made.
    for room in rooms:
        room[:] = bytes(len(room))
    with pytest.raises(ValueError, match="do not fill"):
        portable.scatter([*copies, (sources[0], [rooms[1]], 0)])
    assert not any(map(any, rooms))


def test_nothing_is_kept_of_a_call(portable: Any) -> None:
    """Whether it succeeds or fails, and however: all of what it held is let go."""
    source, room = memoryview(bytes(400)), bytearray(400)
    good = (source, [memoryview(room)], 0)
    calls = [[good], [good, 5], [good, (source, [memoryview(room), 7], 0)], [good, good[:2]],
             [(source, [memoryview(room)[:9]], 0)]]  # fmt: skip
    held = [sys.getrefcount(value) for value in (source, room, good)]
    for call in calls:
        for _ in range(50):
            with contextlib.suppress(TypeError, ValueError):
                portable.scatter(call)
    del call
    assert [sys.getrefcount(value) for value in (source, room, good)] == held
    del good, calls
    room.append(1)  # nobody looks at it any more


@pytest.mark.parametrize("way", ["right", "another digest", "an older one"])
def test_a_copy_that_was_built_wrong_is_not_used(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = scatter._native()
    if built is None:
        pytest.skip("not built here")

    def told(copies: Sequence[scatter.Copy]) -> list[int]:
        return [scatter.in_turns(*copy) ^ (way != "right") for copy in copies]

    monkeypatch.setattr(built, "scatter", scatter.in_turns if way == "an older one" else told)
    assert scatter._native() is (built if way == "right" else None)
    assert ("install again" in caplog.text) == (way != "right")


def test_a_map_shows_what_is_written_and_ends_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"a" * 5000)
    fd = os.open(path, os.O_RDONLY)
    data = DataMap(fd, 1 << 20)
    first = data.view(10, 4000)
    assert first is not None
    assert first == b"a" * 4000
    assert first.readonly
    assert data.view(4000, 1001) is None
    assert data.view(-1, 10) is None
    with path.open("r+b") as file:
        file.write(b"b" * 9000)
    later = data.view(4000, 5000)
    assert later == b"b" * 5000
    assert first == b"b" * 4000
    with path.open("r+b") as file:
        file.truncate(2 << 20)
    assert data.view((1 << 20) - 10, 11) is None  # longer than what is mapped
    os.close(fd)
    assert data.view(0, 9000) is not None
    assert data.view(9000, 1) is None  # whether there is more cannot be asked any more
    data.close()
    assert first == b"b" * 4000  # lives as long as anyone looks at it
    assert data.view(0, 1) is None


def test_what_the_system_does_not_map_is_no_memory(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert DataMap(fd, 1 << 20).view(0, 1) is None
    finally:
        os.close(fd)


def test_whether_it_is_in_memory(tmp_path: Path, portable: Any) -> None:
    """Of a file that was made longer and never read there is nothing in memory."""
    path = tmp_path / "data"
    path.touch()
    os.truncate(path, 3 << 20)
    fd = os.open(path, os.O_RDONLY)
    try:
        view = DataMap(fd, 3 << 20).view(100, (3 << 20) - 100)
        assert view is not None
        assert not portable.is_resident(view)
        assert bytes(view[: 1 << 20]) == bytes(1 << 20)
        assert portable.is_resident(view[: 1 << 20])
        assert bytes(view) == bytes(len(view))
        assert portable.is_resident(view)
        assert portable.is_resident(view[:0])
    finally:
        os.close(fd)
