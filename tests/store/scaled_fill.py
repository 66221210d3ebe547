"""Fills a store of any size and turns it over, on a file whose bulk pages are holes.

What the size of a store changes is LMDB's work with pages: finding runs of free ones, its tree, its
free list. That work depends on how many pages there are, not on what is in them. So this runs the
real store on real LMDB with as many pages, and as many to a value, as a store of so many gigabytes
has on Apple silicon: 64 pages of 16 KiB there, 64 pages of this machine's size here. Every value is
written; then all of its pages but the first, which holds the headers, are given back to the file
system, so that the file takes a few gigabytes. Commits are not flushed: what a disk takes is not
measured here. States have the sizes of GLM-5.3-Flash: a snapshot of 141 values, a value for 80
tokens.

    python -P scaled_fill.py FOLDER GIGABYTES TURNOVERS

prints one JSON object a line: after each twentieth of the store's size that is written, the values
written so far in sizes of the store, milliseconds of CPU and of time per value over that part, live
share, states evicted, attempts that met a full map; at the end a check of everything but payloads.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import xxhash

import store.environment

PAGE = mmap.PAGESIZE
VALUE_PAGES = 64
APPLE_PAGE = 16_384
# Before anything else takes the length of a value from there.
store.environment.VALUE_BYTES = VALUE_PAGES * PAGE - 16

from made_states import MODEL, conversation_id, make_turn  # noqa: E402

from store.codec.chain import Chain  # noqa: E402
from store.codec.header import Header, Leaf, Piece, root  # noqa: E402
from store.errors import MapFull  # noqa: E402
from store.objects import ROOT  # noqa: E402
from store.parts import PART_BYTES  # noqa: E402
from store.store import Store  # noqa: E402

BLOCK_TOKENS = 80
SNAPSHOT_VALUES = 141
PARTS = 20
_PUNCH = 0x01 | 0x02  # keep the size, make a hole


class Filler:
    """A store that is filled by conversations which begin and go on."""

    def __init__(self, folder: Path, gigabytes: float) -> None:
        self.size = int(gigabytes * 1e9 / APPLE_PAGE) * PAGE
        real = lmdb.open
        lmdb.open = lambda *args, **more: real(*args, **{**more, "sync": False})
        try:
            self.store = Store.open(folder / "store", self.size)
        finally:
            lmdb.open = real
        self.fd = os.open(folder / "store" / "data.mdb", os.O_RDWR)
        self.zero = memoryview(mmap.mmap(-1, SNAPSHOT_VALUES * PART_BYTES, prot=mmap.PROT_READ))
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        self.chance = random.Random(7)
        self.going: list[tuple[str, str, list[int]]] = []
        self.full = 0
        self.number = 0
        self._write = self.store.environment.write
        self.store.environment.write = self.write  # type: ignore[method-assign]
        self._digests: dict[int, int] = {}

    def write(self, work: Any) -> Any:
        try:
            return self._write(work)
        except MapFull:
            self.full += 1
            raise

    def save(self) -> int:
        """One turn of a new conversation or of a recent one; returns the values written."""
        chance, held = self.chance, 0
        if self.going and chance.random() < 0.6:
            at = max(0, len(self.going) - 1 - int(chance.expovariate(1 / 60)))
            conversation, parent, past = self.going.pop(at)
            held, new = len(past), int(chance.lognormvariate(6.2, 1))
        else:
            conversation, parent, past = conversation_id(), None, []
            new = int(min(chance.lognormvariate(9.0, 1), 120_000))
        self.number += 1
        ids = [*past, *((self.number * 131_071 + i) % (1 << 31) for i in range(max(new, 20)))]
        turn = make_turn(ids[held:-1], ids[-1:], conversation=conversation, parent=parent)
        self.store.put_turn(turn)
        whole = parent is not None and self.store.find_state(parent) is not None
        start = max(0, held - 1) // BLOCK_TOKENS * BLOCK_TOKENS if whole else 0
        pieces, snapshot = self.state(ids[:-1], start)
        report = self.store.save_state(turn.id, pieces, snapshot)
        self.punch(turn.id, start)
        self.going.append((conversation, turn.id, ids))
        del self.going[:-400]
        return report.bytes_written // (PAGE * VALUE_PAGES - 16)

    def state(self, ids: list[int], start: int) -> tuple[list[Piece], Piece]:
        links = Chain(root(MODEL), ids, BLOCK_TOKENS)
        pieces = []
        for at in range(start, len(ids), BLOCK_TOKENS):
            stop = min(len(ids), at + BLOCK_TOKENS)
            pieces.append(self.piece("rows", at, stop, links, PART_BYTES))
        end = len(ids)
        return pieces, self.piece("snapshot", end, end, links, SNAPSHOT_VALUES * PART_BYTES)

    def piece(self, kind: str, start: int, stop: int, links: Chain, nbytes: int) -> Piece:
        payload = self.zero[:nbytes]
        if nbytes not in self._digests:
            self._digests[nbytes] = xxhash.xxh3_64_intdigest(payload)
        header = Header(
            kind=kind,
            fingerprint=MODEL,
            start=start,
            stop=stop,
            chain=links.at(stop),
            parent=links.at(start),
            leaves=(Leaf((0,), "keys", "uint8", (nbytes,)),),
            digest=self._digests[nbytes],
        )
        return Piece(header, payload)

    def punch(self, turn: str, start: int) -> None:
        """Give back what the new values of a state take, but their first pages."""
        blocks = self.store.blocks
        with self.store.environment.read() as txn:
            state = self.store.states.get(txn, turn)
            assert state is not None
            spans, ident = blocks.spans(txn, state.snap), state.head
            while ident != ROOT:
                record = blocks.get(txn, ident)
                if record is None or record.start < start:
                    break
                spans += blocks.spans(txn, ident)
                ident = record.parent
        for offset, length in spans:
            if self.libc.fallocate(self.fd, _PUNCH, offset + PAGE, length - PAGE):
                raise OSError(ctypes.get_errno(), "this file system makes no holes")

    def close(self) -> None:
        os.close(self.fd)
        self.store.close()


def main() -> None:
    folder, gigabytes, turnovers = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    filler = Filler(folder, gigabytes)
    whole = filler.size // (VALUE_PAGES * PAGE)
    written, saves = 0, 0
    reported = 0
    rates: list[tuple[float, float]] = []
    while written < turnovers * whole:
        cpu, began = time.process_time(), time.perf_counter()
        count = filler.save()
        rates.append(((time.process_time() - cpu) / count, (time.perf_counter() - began) / count))
        written, saves = written + count, saves + 1
        if written * PARTS // whole > reported:
            reported = written * PARTS // whole
            stats = filler.store.stats()
            told = {
                "turned": round(written / whole, 3),
                "saves": saves,
                "cpu_ms": round(statistics.median(one[0] for one in rates) * 1e3, 4),
                "cpu_ms_p99": round(
                    sorted(one[0] for one in rates)[len(rates) * 99 // 100] * 1e3, 4
                ),
                "ms": round(statistics.median(one[1] for one in rates) * 1e3, 4),
                "live_share": round(stats["live_share"], 4),
                "values": stats["values"],
                "states": stats["states"],
                "evicted": stats["evicted"],
                "map_full": filler.full,
                "file_on_disk": (folder / "store" / "data.mdb").stat().st_blocks * 512,
            }
            print(json.dumps(told), flush=True)
            rates.clear()
    began = time.perf_counter()
    report = filler.store.check(payload=False)
    seconds = round(time.perf_counter() - began, 2)
    print(json.dumps({"clean": report.clean, "objects": report.objects, "check_s": seconds}))
    filler.close()


if __name__ == "__main__":
    main()
