"""From a cache list to pieces: the rows of a token range, and the snapshot at a position.

Rows are cut at multiples of the layout's block, so what the link carries is what the store
keeps. Only live rows are read, never a buffer's slack, and every bit is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import mlx.core as mx

from store.codec.chain import Chain, Mark
from store.codec.gather import Source, blocks_of, gather_all, gather_rows
from store.codec.header import CodecError, Header, Leaf, Piece, root
from store.codec.layout import Layout, Slot, arrays_of, dtype_name, position


@cache
def build() -> dict[str, str]:
    """Where state is computed here: device kind and MLX build. Told, never compared."""
    return {
        "device": "metal" if mx.metal.is_available() else "cpu",
        "mlx": version("mlx"),
    }


def export_rows(
    layout: Layout,
    caches: Sequence[Any],
    ids: Sequence[int],
    start: int,
    stop: int,
    parent: bytes | None = None,
    *,
    marks: Sequence[Mark] = (),
    provenance: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """The rows of tokens [start, stop) as one piece per block, the ends partial where they are.

    `ids` are all token ids from position 0, `marks` what else decides rows (images, adapters).
    `parent` is the chain at `start`; it saves the hashing of everything before, and where
    `start` is inside a block it is checked instead. Must run on the thread that owns the
    arrays; the pieces may then go anywhere. Raises CodecError where the caches hold fewer
    tokens than `stop`, or are not this layout's.
    """
    if not 0 <= start < stop <= len(ids):
        raise CodecError(f"no rows [{start}, {stop}) among {len(ids)} token ids")
    block = layout.block_tokens
    seed = root(layout.fingerprint)
    aligned = parent is not None and start % block == 0
    chain = Chain(seed, ids, block, marks, known=(start, parent) if aligned else None)
    if parent is not None and chain.at(start) != parent:
        raise CodecError(f"the chain given for position {start} is not that of these token ids")
    return _rows(layout, caches, chain, start, stop, provenance)


def export_snapshot(
    layout: Layout,
    caches: Sequence[Any],
    ids: Sequence[int],
    stop: int,
    extra: Mapping[str, Any] | None = None,
    *,
    marks: Sequence[Mark] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Piece:
    """Everything overwritten in `caches` at position `stop`, as one piece.

    `extra` is what the model keeps outside its caches (rope offset, pending token ids) in
    msgpack values; `provenance` adds to `build()` (chunk lengths). Raises CodecError where
    the caches stand at another position.
    """
    if not 0 <= stop <= len(ids):
        raise CodecError(f"no position {stop} among {len(ids)} token ids")
    chain = Chain(root(layout.fingerprint), ids, layout.block_tokens, marks)
    return _snapshot(layout, caches, chain.at(stop), stop, extra, provenance)


class Exporter:
    """Exports one state as it grows: whole blocks while it does, the rest at the end."""

    def __init__(
        self,
        layout: Layout,
        ids: Sequence[int],
        start: int = 0,
        *,
        marks: Sequence[Mark] = (),
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """`ids` are all token ids, also those not computed yet; rows before `start`, a
        multiple of the block, are known to the other side."""
        if start % layout.block_tokens:
            raise CodecError(f"position {start} is not the start of a block")
        self.position = start
        self._layout = layout
        self._provenance = provenance
        self._chain = Chain(root(layout.fingerprint), ids, layout.block_tokens, marks)

    def rows(
        self, caches: Sequence[Any], stop: int, *, last: bool = False, ends: Sequence[int] = ()
    ) -> list[Piece]:
        """The rows not exported yet, up to the last block boundary before `stop`, or all.

        `ends` are the positions, in order, at which the forwards that made them ended: each piece
        tells those within it, since there a state of rows alone can be cut.
        """
        end = stop if last else stop - stop % self._layout.block_tokens
        if end <= self.position:
            return []
        pieces = _rows(
            self._layout, caches, self._chain, self.position, end, self._provenance, ends
        )
        self.position = end
        return pieces

    def snapshot(self, caches: Sequence[Any], extra: Mapping[str, Any] | None = None) -> Piece:
        """The snapshot at the exporter's position, after `rows(..., last=True)`."""
        return _snapshot(
            self._layout,
            caches,
            self._chain.at(self.position),
            self.position,
            extra,
            self._provenance,
        )


def _rows(
    layout: Layout,
    caches: Sequence[Any],
    chain: Chain,
    start: int,
    stop: int,
    provenance: Mapping[str, Any] | None,
    ends: Sequence[int] = (),
) -> list[Piece]:
    held = position(layout, caches)
    if held is not None and held < stop:
        raise CodecError(f"the caches hold {held} tokens, not {stop}")
    sources = [
        Source(slot, row, array, 0)
        for slot, cache_ in layout.match(caches)
        for row in slot.rows
        if (array := slot.kind.array(cache_, row.name)) is not None
    ]
    size = layout.block_tokens
    cuts = [start, *range(start - start % size + size, stop, size), stop]
    blocks = blocks_of(sources, cuts)
    payloads = gather_rows(sources, cuts, blocks)
    facts = {**build(), **(provenance or {})}
    return [
        Piece(
            Header(
                kind="rows",
                fingerprint=layout.fingerprint,
                start=a,
                stop=b,
                chain=chain.at(b),
                parent=chain.at(a),
                leaves=block.table,
                digest=payload.digest,
                provenance=facts,
                extra=_told(ends, a, b),
            ),
            payload.data,
        )
        for (a, b), block, payload in zip(pairwise(cuts), blocks, payloads, strict=True)
    ]


def _told(ends: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    """The ends of forwards in (start, stop] as [[step, count], ...] from `start` on, if any."""
    steps: list[list[int]] = []
    at = start
    for end in ends[bisect_right(ends, start) : bisect_right(ends, stop)]:
        if steps and steps[-1][0] == end - at:
            steps[-1][1] += 1
        else:
            steps.append([end - at, 1])
        at = end
    return {"ends": steps} if steps else {}


def _snapshot(
    layout: Layout,
    caches: Sequence[Any],
    link: bytes,
    stop: int,
    extra: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
) -> Piece:
    held = position(layout, caches)
    if held is not None and held != stop:
        raise CodecError(f"the caches stand at {held}, the snapshot was asked for {stop}")
    arrays: list[mx.array] = []
    leaves: list[Leaf] = []
    states = []
    for slot, cache_ in layout.match(caches):
        state = slot.kind.state(cache_)
        states.append(
            [
                list(slot.path),
                slot.name,
                slot.config,
                _row_table(slot, cache_, stop),
                _tree(state, len(arrays)),
            ]
        )
        for name, array in arrays_of(state):
            arrays.append(array)
            leaves.append(Leaf(slot.path, name, dtype_name(array), array.shape))
    table = tuple(leaves)
    payload = gather_all(arrays, table)
    return Piece(
        Header(
            kind="snapshot",
            fingerprint=layout.fingerprint,
            start=stop,
            stop=stop,
            chain=link,
            parent=link,
            leaves=table,
            digest=payload.digest,
            state=tuple(states),
            provenance={**build(), **(provenance or {})},
            extra=dict(extra or {}),
        ),
        payload.data,
    )


def _row_table(slot: Slot, cache_: Any, stop: int) -> list[Any]:
    """For each growing array its dtype and shape at `stop`, or None where it is unset."""
    table: list[Any] = []
    for row in slot.rows:
        array = slot.kind.array(cache_, row.name)
        if array is None:
            table.append(None)
            continue
        shape = list(array.shape)
        shape[row.axis] = stop // row.ratio
        table.append([dtype_name(array), shape])
    return table


def _tree(value: Any, first: int) -> Any:
    """A state value with its arrays replaced by their places in the leaf table."""
    place = iter(range(first, 1 << 30))

    def encode(node: Any) -> Any:
        if isinstance(node, mx.array):
            return ["a", next(place)]
        if isinstance(node, list):
            return ["l", [encode(member) for member in node]]
        if isinstance(node, tuple):
            return ["t", [encode(member) for member in node]]
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise CodecError(f"a cache holds a {type(node).__name__}, which has no encoding")

    return {name: encode(member) for name, member in value.items()}
