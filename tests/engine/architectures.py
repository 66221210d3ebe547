"""One scenario over every architecture: what both processes of the test have to agree on."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ready
from tiny_models import TINY, VOCAB

from engine.model import Caches, Model, widen
from engine.sampling import SamplingParams
from store.codec.header import Piece, parse
from store.codec.pack import export_rows, export_snapshot
from store.codec.unpack import Importer

# florence2 has an encoder, which no text conversation can be continued with.
NAMES = [name for name in TINY if name != "florence2"]
CHUNK = 64


@dataclass(frozen=True)
class Part:
    """One row of the scenario; `steps` is when it is cancelled (0: never)."""

    name: str
    prompt: int
    tokens: int
    steps: int = 0


# In a batch: three that come and go, one that is cancelled. `alone` follows when they have gone.
PARTS = [
    Part("first", 117, 14),
    Part("short", 19, 5),
    Part("cancelled", 66, 40, 7),
    Part("late", 41, 9),
    Part("alone", 83, 6),
]


def build(name: str) -> Model:
    """The tiny model `name`, widened as the engine widens models on a CPU."""
    entry = TINY[name]
    lm = entry.build()
    if ready.DEVICE.dtype == "float32":
        widen(lm, ready.DEVICE)
    source = vars(getattr(lm, "config", None) or lm.args)
    config = {k: v for k, v in source.items() if isinstance(v, (int, str, dict, list))}
    config |= {"model_type": str(lm.model_type), "vocab_size": VOCAB}
    config["max_position_embeddings"] = 4096
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return Model(Path(name), lm, config, ready.DEVICE, digest, entry.caches)


def prompt_of(name: str, part: Part) -> list[int]:
    rng = random.Random(f"{name} {part.name}")
    return [rng.randrange(2, VOCAB - 16) for _ in range(part.prompt)]


def params_of(part: Part) -> SamplingParams:
    return SamplingParams(max_tokens=part.tokens)


def save(model: Model, caches: Caches, ids: list[int], path: Path) -> None:
    """Write a state as it goes over the wire: every piece after the other, the snapshot last."""
    with path.open("wb") as file:
        for piece in pieces(model, caches, ids):
            head = piece.header.pack()
            file.write(len(head).to_bytes(4, "big") + head + bytes(piece.payload))


def pieces(model: Model, caches: Caches, ids: list[int]) -> list[Piece]:
    rows = export_rows(model.layout, caches, ids, 0, len(ids))
    return [*rows, export_snapshot(model.layout, caches, ids, len(ids))]


def restore(model: Model, path: Path, tokens: int) -> Caches:
    """The state written by `save`, in fresh caches."""
    data = memoryview(path.read_bytes())
    importer = Importer(model.layout, model.fresh_cache(), model.fingerprint, tokens)
    at = 0
    while True:
        size = int.from_bytes(data[at : at + 4], "big")
        header = parse(data[at + 4 : at + 4 + size])
        start = at + 4 + size
        at = start + header.nbytes
        piece = Piece(header, data[start:at])
        if header.kind == "snapshot":
            assert at == len(data)
            return list(importer.finish(piece))
        importer.add(piece)


def state_digest(model: Model, caches: Caches, ids: list[int]) -> str:
    """A digest of every bit of a state."""
    digest = hashlib.blake2b()
    for piece in pieces(model, caches, ids):
        digest.update(piece.payload)
    return digest.hexdigest()


def last_logits(model: Model, caches: Caches, token: int) -> np.ndarray[Any, Any]:
    import mlx.core as mx

    logits = model.forward(mx.array([[token]], dtype=mx.int32), caches, [0])[0, -1]
    return np.array(logits.astype(mx.float32))
