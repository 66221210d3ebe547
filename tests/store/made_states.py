"""States made of pseudo-random bytes in the codec's form, without MLX."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from store.codec.chain import Chain
from store.codec.header import Header, Leaf, Piece, root
from store.codec.stored import Stored
from store.turns import Turn

MODEL = hashlib.blake2b(b"a model", digest_size=16).digest()


def turn_id() -> str:
    return "resp_" + uuid.uuid4().hex


def conversation_id() -> str:
    return "conv_" + uuid.uuid4().hex


def noise(seed: bytes, nbytes: int) -> memoryview:
    """Bytes that depend on the seed alone."""
    number = int.from_bytes(hashlib.blake2b(seed, digest_size=16).digest(), "big")
    return memoryview(np.random.default_rng(number).bytes(nbytes))


def brought(stored: Stored) -> bytes:
    """The payload of a piece that a store gives, verified."""
    return bytes(stored.piece(memoryview(bytearray(stored.header.nbytes))).payload)


def feeding(rows: Iterator[Stored], snapshot: Stored | None) -> list[bytes]:
    """The payloads of all that a reader feeds."""
    found = [brought(piece) for piece in rows]
    return found if snapshot is None else [*found, brought(snapshot)]


def piece(header_fields: dict[str, object], shape: tuple[int, ...], seed: bytes) -> Piece:
    leaf = Leaf((0,), "keys", "uint8", shape)
    payload = noise(seed, leaf.nbytes)
    digest = xxhash.xxh3_64_intdigest(payload)
    return Piece(Header(leaves=(leaf,), digest=digest, **header_fields), payload)  # type: ignore[arg-type]


def make_state(
    ids: Sequence[int],
    *,
    start: int = 0,
    block: int = 16,
    row_bytes: int = 4096,
    snapshot_bytes: int = 200_000,
    fingerprint: bytes = MODEL,
    seed: bytes = b"",
) -> tuple[list[Piece], Piece]:
    """Pieces of rows over [start, len(ids)) and a snapshot at the end.

    `seed` stands for everything that changes bits without changing ids.
    """
    links = Chain(root(fingerprint), ids, block)
    pieces = []
    at = start
    while at < len(ids):
        stop = min(len(ids), (at // block + 1) * block)
        fields = {
            "kind": "rows",
            "fingerprint": fingerprint,
            "start": at,
            "stop": stop,
            "chain": links.at(stop),
            "parent": links.at(at),
        }
        pieces.append(piece(fields, (stop - at, row_bytes), b"rows" + links.at(stop) + seed))
        at = stop
    end = links.at(len(ids))
    fields = {
        "kind": "snapshot",
        "fingerprint": fingerprint,
        "start": len(ids),
        "stop": len(ids),
        "chain": end,
        "parent": end,
        "extra": {"pending": [1]},
    }
    return pieces, piece(fields, (snapshot_bytes,), b"snap" + end + seed)


def make_turn(
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    conversation: str,
    parent: str | None = None,
    ident: str | None = None,
    owner: str = "anna",
    fingerprint: bytes = MODEL,
    rebased: bool = False,
    created: float = 1.7e9,
) -> Turn:
    return Turn(
        id=ident or turn_id(),
        conversation=conversation,
        parent=parent,
        owner=owner,
        created=created,
        model="made",
        fingerprint=fingerprint,
        items=[{"type": "message", "role": "user", "content": "Grüße \U0001f642"}],
        params={"temperature": 0, "seed": 1 << 70},
        prompt_ids=list(prompt),
        output_ids=list(output),
        rebased=rebased,
        schedule=[[8, 1], [1, len(output)]],
        usage={"output_tokens": len(output)},
        status="completed",
        finish="stop",
    )


def payloads(pieces: Sequence[Piece], snapshot: Piece) -> list[bytes]:
    return [bytes(one.payload) for one in (*pieces, snapshot)]
