"""A process that has never seen the caches: it unpacks what it is sent and says what it found.

Requests and answers are msgpack with a length in front, on standard input and output.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

_LENGTH = struct.Struct("<Q")


class OtherProcess:
    """The parent's side: start it once, ask it often."""

    def __init__(self) -> None:
        here = Path(__file__)
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None,
            cwd=here.parents[2],
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises EOFError when the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _write(self._process.stdin, request)
        return _read(self._process.stdout)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def _write(stream: BinaryIO, value: dict[str, Any]) -> None:
    data = msgpack.packb(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> dict[str, Any]:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    found: dict[str, Any] = msgpack.unpackb(
        stream.read(*_LENGTH.unpack(head)), strict_map_key=False
    )
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack into a fresh tree, export again, and go on feeding it."""
    import made_caches

    from store.codec.header import Piece, parse
    from store.codec.layout import Layout
    from store.codec.pack import Exporter
    from store.codec.unpack import Importer

    recipe, seed, lengths = request["recipe"], request["seed"], request["lengths"]
    probe = made_caches.fresh(recipe)
    unit = Layout.of(probe, "any").unit
    made_caches.fill(probe, recipe, [unit], seed)
    layout = Layout.of(
        probe,
        "any",
        request["fingerprint"],
        tokens=unit,
        value_bytes=request["value_bytes"],
    )
    total = sum(lengths)
    importer = Importer(
        layout, made_caches.fresh(recipe), request["fingerprint"], total + request["spare"]
    )
    *rows, snapshot = (Piece(parse(head), memoryview(data)) for head, data in request["pieces"])
    for piece in rows:
        importer.add(piece)
    caches = importer.finish(snapshot)
    exporter = Exporter(layout, request["ids"])
    again = [*exporter.rows(caches, total, last=True), exporter.snapshot(caches)]
    found = made_caches.told(caches, recipe)
    made_caches.fill(caches, recipe, request["more"], seed, start=total)
    return {
        "heads": [piece.header.pack() for piece in again],
        "told": found,
        "told_later": made_caches.told(caches, recipe),
    }


def main() -> None:
    """Answer until the parent closes its end."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(Path(__file__).parent)]
    while True:
        try:
            request = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found = answer(request)
        except Exception as error:  # the parent's test is to fail with it, whatever it is
            found = {"error": f"{type(error).__name__}: {error}"}
        _write(sys.stdout.buffer, found)


if __name__ == "__main__":
    main()
