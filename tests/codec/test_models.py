"""Whole models: prefill, pack, another process, unpack; arrays and next logits bit-equal.

One other process serves all models (importing the library takes seconds), each model built
anew there from the same seed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgpack
import pytest
from tiny_models import TINY, Tiny, prompt

from store.codec.classes import REFUSED, TABLE
from store.codec.header import Piece, parse
from store.codec.layout import Layout
from store.codec.pack import Exporter
from store.codec.unpack import Importer

MODEL = hashlib.blake2b(b"tiny", digest_size=16).digest()
CHUNKS = (64, 6, 79)
STEPS = 11  # past the ring of the tiny OCR model, into decode's own code paths
LATER = 4
IDS = prompt(sum(CHUNKS) + STEPS + LATER)
HELD = sum(CHUNKS) + STEPS


def layout_of(entry: Tiny, model: Any) -> Layout:
    probe = entry.fresh_cache(model)
    unit = Layout.of(probe, entry.name).unit
    entry.step(model, prompt(unit), probe)
    return Layout.of(probe, entry.name, MODEL, tokens=unit, value_bytes=1)


def bits(logits: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(logits).astype(mx.float32)))


def pieces_of(layout: Layout, caches: Any, held: int) -> list[Piece]:
    exporter = Exporter(layout, IDS[:held])
    return [*exporter.rows(caches, held, last=True), exporter.snapshot(caches)]


def sent(entry: Tiny) -> dict[str, Any]:
    """One model's part of the request, and what the answer must be."""
    model = entry.build()
    layout = layout_of(entry, model)
    caches = entry.fresh_cache(model)
    exporter = Exporter(layout, IDS)
    pieces: list[Piece] = []
    held = 0
    for count in (*CHUNKS, *[1] * STEPS):
        entry.step(model, IDS[held : held + count], caches)
        held += count
        pieces += exporter.rows(caches, held, last=held == HELD)
    pieces.append(exporter.snapshot(caches, {"pending": IDS[HELD : HELD + 1], "rope_delta": 0}))
    logits = [bits(entry.step(model, [token], caches)) for token in IDS[HELD:]]
    return {
        "name": entry.name,
        "pieces": [(piece.header.pack(), bytes(piece.payload)) for piece in pieces],
        "logits": logits,
        "after": [piece.header.pack() for piece in pieces_of(layout, caches, len(IDS))],
        "varied": len(set(logits)),
    }


def received(request: dict[str, Any]) -> dict[str, Any]:
    """What the other process finds: the state exported again, and the next logits."""
    entry = TINY[request["name"]]
    model = entry.build()
    layout = layout_of(entry, model)
    importer = Importer(layout, entry.fresh_cache(model), MODEL, HELD + LATER)
    *rows, snapshot = (Piece(parse(head), memoryview(data)) for head, data in request["pieces"])
    for piece in rows:
        importer.add(piece)
    caches = list(importer.finish(snapshot))
    exporter = Exporter(layout, IDS)
    again = [*exporter.rows(caches, HELD, last=True)]
    again.append(exporter.snapshot(caches, dict(snapshot.header.extra)))
    heads = [piece.header.pack() for piece in again]
    logits = [bits(entry.step(model, [token], caches)) for token in IDS[HELD:]]
    after = [piece.header.pack() for piece in pieces_of(layout, caches, len(IDS))]
    return {"heads": heads, "logits": logits, "after": after}


@pytest.fixture(scope="module")
def requests(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Those whose day it is."""
    ours = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in ours if hasattr(item, "callspec")]
    return {name: sent(TINY[name]) for name in names}


@pytest.fixture(scope="module")
def answers(requests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, str(here)],
        input=msgpack.packb([{**request, "logits": None} for request in requests.values()]),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, here.parents[1:3]))},
        check=True,
        timeout=400,
    )
    found: dict[str, dict[str, Any]] = msgpack.unpackb(done.stdout)
    return found


@pytest.mark.rotate(7)
@pytest.mark.parametrize("name", sorted(TINY))
def test_a_state_survives_the_change_of_process(
    name: str, requests: dict[str, dict[str, Any]], answers: dict[str, dict[str, Any]]
) -> None:
    request, answer = requests[name], answers[name]
    assert request["varied"] > 1, "logits that never change prove nothing"
    assert answer["heads"] == [head for head, _ in request["pieces"]]
    assert answer["logits"] == request["logits"]
    assert answer["after"] == request["after"]


def test_every_class_has_its_day() -> None:
    moved: set[str] = set()
    for entry in TINY.values():
        layout = Layout.of(entry.fresh_cache(entry.make()), entry.name)
        moved |= {slot.name for slot in layout.slots}
    library = {name for name in TABLE if name.startswith("mlx_vlm.")}
    assert library - moved == set()
    assert not moved & set(REFUSED)


def main(argv: Sequence[str]) -> None:
    requests = msgpack.unpackb(sys.stdin.buffer.read())
    found = {request["name"]: received(request) for request in requests}
    sys.stdout.buffer.write(msgpack.packb(found))


if __name__ == "__main__":
    main(sys.argv)
